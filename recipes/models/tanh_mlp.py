"""The network of RSC's experiments."""

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_normtheory import hessian_top_eigenvalue
from lightning_normtheory.recipes.models.supervised import Supervised, square_loss

__all__ = ["TanhMLP"]


class TanhMLP(Supervised):
    """A tanh network without normalization, in the scaling of RSC's theory or in PyTorch's, trained with the square
    loss by gradient descent.

    RSC (Section 3): f_h = v_hᵀα_L/√m, α_l = φ(W_l α_{l−1}/√m_{l−1}), α_0 = x with ‖x‖ = √d, W_l ~ N(0, σ₀²), ‖v_h‖ = 1.
    PyTorch: the same without the factors, all weights uniform in ±1/√(fan-in). Outputs and their gradients in the last
    layer are about √m times those of the paper's scaling, gradients in the second about m times.

    Args:
        inputs: d.
        width: m, the units of each hidden layer.
        depth: L, the number of hidden layers.
        classes: k, the outputs.
        scaling: ``"paper"`` or ``"pytorch"``.
        sigma: σ₀ of the paper's scaling.
        step: the learning rate as a fraction of 2/λ_max, the largest stable one at the start.

    Example:
        >>> model = TanhMLP(inputs=4, width=8, classes=3)
        >>> model(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
        >>> bool((model.layers[-1].weight.norm(dim=1) - 1).abs().max() < 1e-6)
        True
    """

    def __init__(
        self,
        inputs: int = 784,
        width: int = 256,
        depth: int = 2,
        classes: int = 10,
        scaling: Literal["paper", "pytorch"] = "paper",
        sigma: float = 1.0,
        step: float = 0.5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        widths = [inputs, *[width] * depth, classes]
        layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
        self.layers = nn.ModuleList(layers)
        self.factors = [1.0] * (depth + 1)
        self.step_fraction = step
        if scaling == "paper":
            self.factors = [fan_in**-0.5 for fan_in in widths[:-1]]
            for layer in layers:
                nn.init.normal_(layer.weight, std=sigma)
            with torch.no_grad():
                layers[-1].weight.div_(layers[-1].weight.norm(dim=1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.flatten(1)
        for layer, factor in zip(self.layers[:-1], self.factors[:-1], strict=True):
            hidden = torch.tanh(factor * layer(hidden))
        return self.factors[-1] * self.layers[-1](hidden)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        x, y = next(iter(self.trainer.datamodule.train_dataloader()))  # type: ignore[attr-defined]
        batch = (x.to(self.layers[0].weight), y.to(self.device))
        top = hessian_top_eigenvalue(self, square_loss, [batch], method="lanczos", tol=1e-2)
        self.lr = self.step_fraction * 2 / top.value
        return super().configure_optimizers()
