"""The network of WN's experiments."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory.recipes.models.supervised import Supervised

__all__ = ["WeightNormMLP"]


class WeightNormMLP(Supervised):
    """A tanh network with WeightNorm in every hidden layer, trained with the square loss.

    f(x) = V φ(W_L … φ(W_1 x)), each row of W_l being g_i v_i/‖v_i‖ with trained lengths g, which start at ‖v_i‖. The
    loss is the papers' L = (1/n) Σ_i Σ_h (y_ih − f_h(x_i))² against one-hot targets.

    Args:
        inputs: d, the number of input features.
        width: m, the units of each hidden layer.
        depth: L, the number of hidden layers.
        classes: k, the outputs.
        lr: of plain SGD; without momentum and weight decay the norms ‖v_i‖ cannot fall (DGM, eq. 2.3).
        init: c: draw all weights uniformly from ±c/√m (WN, Section 7); ``None``: PyTorch's default.

    Example:
        >>> import torch
        >>> model = WeightNormMLP(inputs=4, width=8, depth=2, classes=3)
        >>> model(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        inputs: int = 784,
        width: int = 256,
        depth: int = 2,
        classes: int = 10,
        lr: float = 0.2,
        init: float | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        widths = [inputs] + [width] * depth
        layers = [nn.Linear(a, b, bias=False) for a, b in [*pairwise(widths), (width, classes)]]
        if init is not None:
            for layer in layers:
                nn.init.uniform_(layer.weight, -init / width**0.5, init / width**0.5)
        hidden = [module for layer in layers[:-1] for module in (weight_norm(layer), nn.Tanh())]
        self.net = nn.Sequential(nn.Flatten(), *hidden, layers[-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)
