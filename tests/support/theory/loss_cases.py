"""Random chains with every loss that has constants, and dense derivatives of that loss anywhere in a ball."""

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory.architecture.chain import Chain, chain_of
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.theorems.descent import LossState
from lightning_normtheory.theorems.losses import KnownLoss, identify_loss

from support.theory.bound_cases import SMOOTH, largest_norm, random_chain

LOSSES = ("square", "cross_entropy", "logistic")


def positions_chain(seed: int) -> tuple[nn.Module, Tensor]:
    """Convolutions whose last layer has two or three classes at every position."""
    torch.manual_seed(seed)
    width, bias, activation = 1 + seed % 3, seed % 2 == 0, SMOOTH[seed % len(SMOOTH)]
    first = nn.Conv1d(2, width, 2, padding=seed % 2, bias=bias)
    net = nn.Sequential(
        weight_norm(first) if seed % 4 > 1 else first, activation(), nn.Conv1d(width, 2 + seed % 2, 1, bias=bias)
    )
    return net.double(), (0.5 + seed % 3) * torch.randn(3, 2, 4, dtype=torch.float64)


class LossCase:
    """A chain, its samples, targets and loss. The loss is recognized by its value, as in a run.

    Args:
        name: of the loss.
        seed: of the network, the targets and the reduction.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self._prepare(seed)
        if self.kind.name != name:  # outputs near 0, where a cross entropy and a logistic loss are both ln 2
            self._prepare(seed + 10_000)
        assert self.kind.name == name

    def _prepare(self, seed: int) -> None:
        self.seed = seed
        self.net, self.x = self.build()
        self.parameters = {name: p.detach() for name, p in self.net.named_parameters() if p.requires_grad}
        self.sizes = [p.numel() for p in self.parameters.values()]
        self.theta = torch.cat([p.reshape(-1) for p in self.parameters.values()])
        self._plain = _without_weight_norm(self.build()[0])
        with torch.no_grad():
            torch.testing.assert_close(self.net(self.x), self.outputs(self.theta), rtol=1e-10, atol=1e-12)
        self.criterion, self.y = self._targets(self.name, seed)
        known = identify_loss(float(self.loss(self.theta)), self.outputs(self.theta), self.y)
        assert isinstance(known, KnownLoss), known
        self.kind = known

    def build(self) -> tuple[nn.Module, Tensor]:
        """The same network and samples at every call."""
        return _chain(self.name, self.seed)

    def _targets(self, name: str, seed: int) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
        shape = self.outputs(self.theta).shape
        generator = torch.Generator().manual_seed(seed)
        if name == "cross_entropy":
            labels = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
            return F.cross_entropy, labels
        if name == "square":
            criterion = F.mse_loss if seed % 2 else lambda f, y: (f - y).square().sum(1).mean()
            return criterion, torch.randn(shape, dtype=torch.float64, generator=generator)
        y = torch.rand(shape, dtype=torch.float64, generator=generator)  # soft targets in every third case
        y = y if seed % 3 == 0 else y.round()
        mean = F.binary_cross_entropy_with_logits
        return (mean if seed % 2 else lambda f, y: mean(f, y, reduction="none").sum(1).mean()), y

    def outputs(self, theta: Tensor) -> Tensor:
        """f, with WeightNorm written out: PyTorch's own has wrong second derivatives."""
        parts = zip(self.parameters.items(), theta.split(self.sizes))
        given = dict(self.net.named_parameters()) | {name: part.view(p.shape) for (name, p), part in parts}
        return functional_call(self._plain, _weights(given), (self.x,))

    def loss(self, theta: Tensor) -> Tensor:
        return self.criterion(self.outputs(theta), self.y)

    @cached_property
    def chain(self) -> Chain:
        found = chain_of(record_forward(self.net, self.x))
        assert isinstance(found, Chain), found
        return found

    @cached_property
    def gradient(self) -> Tensor:
        return torch.func.grad(self.loss)(self.theta)

    @cached_property
    def local(self) -> LossState:
        squares = float(self.gradient.square().sum())
        return LossState(float(self.loss(self.theta)), squares, self.kind, largest_norm(self.x))

    @cached_property
    def mean_gradient(self) -> Tensor:
        """ḡ, over samples and outputs."""
        return torch.func.grad(lambda theta: self.outputs(theta).mean())(self.theta)

    @cached_property
    def jacobian(self) -> Tensor:
        """∂f/∂θ of all samples and outputs, (nk, p)."""
        return torch.func.jacrev(lambda theta: self.outputs(theta).flatten())(self.theta)

    def curvature(self, theta: Tensor) -> float:
        """‖∇²L‖₂."""
        return float(torch.linalg.eigvalsh(torch.func.hessian(self.loss)(theta)).abs().max())

    def slope(self, theta: Tensor) -> float:
        """The mean of ‖∂ℓ/∂f‖ over the samples."""
        outputs = self.outputs(theta).detach()
        gradients = torch.func.grad(lambda f: self.criterion(f, self.y))(outputs)
        return float(gradients.flatten(1).norm(dim=1).sum())  # of the mean loss: each has the factor 1/n

    def in_ball(self, radius: float, seed: int) -> Tensor:
        step = torch.randn(len(self.theta), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return self.theta + radius * step / step.norm()


def _chain(name: str, seed: int) -> tuple[nn.Module, Tensor]:
    if name == "cross_entropy" and seed % 4 == 0:
        return positions_chain(seed)
    net, x = random_chain(seed)
    one_class = name == "cross_entropy" and net(x).shape[1] == 1
    return _chain(name, seed + 100_000) if one_class else (net, x)


def _without_weight_norm(net: nn.Module) -> nn.Module:
    for module in list(net.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")
    return net


def _weights(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain network's parameters, g v/‖v‖ for a WeightNorm."""
    found = {}
    for name, value in given.items():
        before, separator, last = name.partition("parametrizations.weight.")
        if not separator:
            found[name] = value
        elif last == "original1":
            g = given[f"{before}{separator}original0"]
            axes = [axis for axis in range(value.dim()) if g.dim() == 0 or g.shape[axis] == 1]
            norms = value.square().sum(axes, keepdim=True).sqrt() if axes else value.abs()
            found[f"{before}weight"] = g * value / norms
    return found


def softmax_covariances(seed: int) -> Tensor:
    """diag(p) − ppᵀ of many p, also of p with all of its weight on two classes."""
    generator = torch.Generator().manual_seed(seed)
    classes = 2 + seed % 6
    logits = math.exp(seed % 5) * torch.randn(100, classes, dtype=torch.float64, generator=generator)
    logits[:10, 2:] = -1e3
    p = logits.softmax(1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
