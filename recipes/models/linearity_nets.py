"""The networks of LIN's experiments: wide networks that are, or are not, nearly linear in their weights."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_normtheory import empirical_ntk
from lightning_normtheory.recipes.models.supervised import Supervised, square_loss

__all__ = ["BottleneckNet", "ConvolutionNet", "ResidualNet", "WideNet", "softmax_outputs"]


class _Linearity(Supervised):
    """Draw all weights from N(0, 1), and set the learning rate to a fraction of the largest stable one for the initial
    kernel, 2n/(c·λ_max(K_0)), where c = ½ for cross entropy, whose Hessian in one output is at most ½, and c = 2 for
    the square loss."""

    step_fraction: float
    curvature = 0.5

    def start(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        x = self.trainer.datamodule.x.to(next(self.parameters()))  # type: ignore[attr-defined]
        largest = empirical_ntk(self, x, outputs="full").lambda_max
        self.lr = self.step_fraction * 2 * len(x) / (self.curvature * largest)
        return super().configure_optimizers()


class WideNet(_Linearity):
    """f(x) = V σ(wx + b)/√m, σ = ReLU (LIN, eqs. (26)–(28)).

    Args:
        inputs: 1 in the paper.
        width: m.
        classes: C.
        output: ``"linear"``: f, trained with the cross entropy of softmax(f), so that the run also trains the
            network softmax(f), see `softmax_outputs`; ``"swish"``: f/(1 + exp(−0.1f)), trained with the square loss.
        step: the learning rate as a fraction of the largest stable one.

    Example:
        >>> WideNet(width=30)(torch.zeros(60, 1)).shape
        torch.Size([60, 3])
    """

    def __init__(
        self,
        inputs: int = 1,
        width: int = 1000,
        classes: int = 3,
        output: Literal["linear", "swish"] = "linear",
        step: float = 0.5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.output, self.step_fraction = output, step
        self.hidden = nn.Linear(inputs, width)
        self.head = nn.Linear(width, classes, bias=False)
        self.start()
        if output == "swish":
            self.curvature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        f = self.head(torch.relu(self.hidden(x))) / math.sqrt(self.head.in_features)
        return f * torch.sigmoid(0.1 * f) if self.output == "swish" else f

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        if self.output == "linear":
            return super().loss(output, y)
        return square_loss(output, y)


def softmax_outputs(module: nn.Module, batch: Any) -> Tensor:
    """softmax(f), the second network of a run of `WideNet`: a ``predict`` for `NTKLeastEigenvalue`.

    Example:
        >>> softmax_outputs(nn.Identity(), (torch.zeros(1, 2), None))
        tensor([[0.5000, 0.5000]])
    """
    return module(batch[0]).softmax(1)


class BottleneckNet(_Linearity):
    """f(x) = W_4 σ(W_3 (W_2 σ(W_1 x + b)/√m))/√m with W_2 (m_b, m) (LIN, eq. (31)).

    The network in the paper has no b. Then f(x) = |x|·f(±1), and no weights separate the class around 0 from the other
    two.

    Args:
        inputs: 1 in the paper.
        width: m.
        bottleneck: m_b.
        classes: C.
        bias: ``False``: without b, as in the paper.
        step: the learning rate as a fraction of the largest stable one.

    Example:
        >>> BottleneckNet(width=30, bottleneck=3)(torch.zeros(60, 1)).shape
        torch.Size([60, 3])
    """

    def __init__(
        self,
        inputs: int = 1,
        width: int = 10_000,
        bottleneck: int = 10,
        classes: int = 3,
        bias: bool = True,
        step: float = 0.5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.step_fraction = step
        self.first = nn.Linear(inputs, width, bias=bias)
        self.second = nn.Linear(width, bottleneck, bias=False)
        self.third = nn.Linear(bottleneck, width, bias=False)
        self.head = nn.Linear(width, classes, bias=False)
        self.start()

    def forward(self, x: Tensor) -> Tensor:
        root = math.sqrt(self.head.in_features)
        narrow = self.second(torch.relu(self.first(x))) / root
        return self.head(torch.relu(self.third(narrow))) / root


class ConvolutionNet(_Linearity):
    """α_l = tanh(W_l ∗ α_{l−1}/√m_{l−1}), f = vᵀα_L/√m, on inputs (n, channels, pixels) (LIN, eq. (73)).

    Args:
        inputs: the number of pixels.
        channels: m_0, of the input.
        width: m, the number of channels of every hidden layer.
        depth: L.
        kernel: K, odd.
        classes: C.
        step: the learning rate as a fraction of the largest stable one.

    Example:
        >>> ConvolutionNet(inputs=5, width=8)(torch.zeros(6, 1, 5)).shape
        torch.Size([6, 3])
    """

    def __init__(
        self,
        inputs: int = 8,
        channels: int = 1,
        width: int = 100,
        depth: int = 2,
        kernel: int = 3,
        classes: int = 3,
        step: float = 0.5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.step_fraction = step
        widths = [channels] + depth * [width]
        self.layers = nn.ModuleList(nn.Conv1d(m, width, kernel, padding=kernel // 2, bias=False) for m in widths[:-1])
        self.head = nn.Linear(width * inputs, classes, bias=False)
        self.start()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) / math.sqrt(x.shape[1]))
        return self.head(x.flatten(1)) / math.sqrt(x.shape[1])


class ResidualNet(_Linearity):
    """α_1 = tanh(W_1 x/√d), α_l = tanh(W_l α_{l−1}/√m) + α_{l−1}, f = vᵀα_L/√m (LIN, eq. (80)).

    Args:
        inputs: d.
        width: m.
        depth: L.
        classes: C.
        step: the learning rate as a fraction of the largest stable one.

    Example:
        >>> ResidualNet(inputs=2, width=8)(torch.zeros(6, 2)).shape
        torch.Size([6, 3])
    """

    def __init__(self, inputs: int = 1, width: int = 1000, depth: int = 3, classes: int = 3, step: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.step_fraction = step
        self.first = nn.Linear(inputs, width, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth - 1))
        self.head = nn.Linear(width, classes, bias=False)
        self.start()

    def forward(self, x: Tensor) -> Tensor:
        root = math.sqrt(self.head.in_features)
        x = torch.tanh(self.first(x) / math.sqrt(x.shape[1]))
        for layer in self.layers:
            x = torch.tanh(layer(x) / root) + x
        return self.head(x) / root
