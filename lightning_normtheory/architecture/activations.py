"""Constants of activations: Lipschitz and smoothness constants, value at zero, homogeneity."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

__all__ = ["ELEMENTWISE", "ActivationConstants", "known_activation", "measure_activation"]


class ActivationConstants(NamedTuple):
    """Constants of an activation φ: ℝ → ℝ.

    Attributes:
        name: the name for messages.
        lipschitz: sup |φ'|.
        smoothness: sup |φ''|, β_φ of WN and RSC; infinite if φ' jumps.
        at_zero: φ(0).
        homogeneous: whether φ(tz) = tφ(z) for t ≥ 0, and φ(1) = 1.
        measured: whether the numbers were measured on a grid instead of derived from a formula.
    """

    name: str
    lipschitz: float
    smoothness: float
    at_zero: float
    homogeneous: bool = False
    measured: bool = False


_GELU = ActivationConstants("GELU", 1.12890415, 2 / math.sqrt(2 * math.pi), 0.0)
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


def _fixed(name: str, lipschitz: float, smoothness: float, at_zero: float = 0.0, homogeneous: bool = False) -> Any:
    constants = ActivationConstants(name, lipschitz, smoothness, at_zero, homogeneous)
    return lambda arguments: constants


def _leaky(arguments: Mapping[str, Any]) -> ActivationConstants:
    slope = arguments.get("negative_slope", 0.01)
    return ActivationConstants("LeakyReLU", max(1.0, abs(slope)), math.inf, 0.0, True)


def _elu(arguments: Mapping[str, Any]) -> ActivationConstants | None:
    alpha = arguments.get("alpha", 1.0)
    # φ' jumps from α to 1 at zero unless α = 1.
    smoothness = 1.0 if alpha == 1 else math.inf
    return ActivationConstants("ELU", max(1.0, alpha), smoothness, 0.0) if alpha > 0 else None


def _hardtanh(arguments: Mapping[str, Any]) -> ActivationConstants | None:
    around_zero = arguments.get("min_val", -1.0) <= 0 <= arguments.get("max_val", 1.0)
    return ActivationConstants("Hardtanh", 1.0, math.inf, 0.0) if around_zero else None


def _softplus(arguments: Mapping[str, Any]) -> ActivationConstants | None:
    beta = arguments.get("beta", 1.0)
    # Above the threshold, 20 by default, PyTorch uses a straight line: φ' jumps by 2e-9, which is below rounding error.
    usual = beta > 0 and arguments.get("threshold", 20.0) >= 20
    return ActivationConstants("Softplus", 1.0, beta / 4, math.log(2) / beta) if usual else None


def _gelu(arguments: Mapping[str, Any]) -> ActivationConstants | None:
    return _GELU if arguments.get("approximate", "none") == "none" else None  # the tanh form is measured


# By the name of the torch function. Each entry was compared with a grid of points in float64.
_KNOWN: dict[str, Callable[[Mapping[str, Any]], ActivationConstants | None]] = {
    "tanh": _fixed("tanh", 1.0, 4 / (3 * math.sqrt(3))),
    "sigmoid": _fixed("sigmoid", 0.25, 1 / (6 * math.sqrt(3)), 0.5),
    "relu": _fixed("ReLU", 1.0, math.inf, 0.0, True),
    "leaky_relu": _leaky,
    "gelu": _gelu,
    "silu": _fixed("SiLU", 1.09983933, 0.5),
    "elu": _elu,
    "selu": _fixed("SELU", _SELU_SCALE * _SELU_ALPHA, math.inf),
    "softplus": _softplus,
    "softsign": _fixed("Softsign", 1.0, 2.0),
    "hardtanh": _hardtanh,
    "relu6": _fixed("ReLU6", 1.0, math.inf),
    "sin": _fixed("sin", 1.0, 1.0),
    "cos": _fixed("cos", 1.0, 1.0, 1.0),
    "atan": _fixed("arctan", 1.0, 3 * math.sqrt(3) / 8),
    "erf": _fixed("erf", 2 / math.sqrt(math.pi), math.sqrt(8 / (math.e * math.pi))),
    "abs": _fixed("abs", 1.0, math.inf, 0.0, True),
}


def known_activation(function: str, arguments: Mapping[str, Any] | None = None) -> ActivationConstants | None:
    """Return the constants of a torch function by name (``"tanh"``, ``"leaky_relu"``), or ``None`` without a formula.

    Args:
        arguments: keyword arguments of the call, such as ``negative_slope``.

    Example:
        tanh'' is largest where tanh² = 1/3

        >>> known_activation("tanh")
        ActivationConstants(name='tanh', lipschitz=1.0, smoothness=0.76980..., at_zero=0.0, homogeneous=False, ...)
        >>> known_activation("gelu").lipschitz > 1  # WN, Remark 6.1 lists it as 1-Lipschitz
        True
    """
    rule = _KNOWN.get(function.rstrip("_"))
    return rule(arguments or {}) if rule else None


def measure_activation(function: Callable[[Tensor], Tensor], name: str) -> ActivationConstants:
    """Measure the constants of an elementwise function on a grid of points in float64.

    The grid has 2·10⁵ points in [−30, 30], which gives a maximum to six digits; slopes are checked up to ±10⁶. A
    difference quotient that grows with the number of points indicates a jump of φ or φ', one that grows with the
    interval an unbounded slope; both count as infinite. Values between the points are not checked: the result is
    evidence and no proof, which ``measured`` indicates.

    Example:
        >>> measure_activation(torch.tanh, "mine")
        ActivationConstants(name='mine', lipschitz=1.001, smoothness=0.770..., at_zero=0.0, ..., measured=True)
    """
    with _OnTheCPU():
        return _measure(function, name)


class _OnTheCPU(TorchFunctionMode):
    """Inside, constants of the function move to the CPU: the grid is there, since not every device has float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, Tensor.cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


def _measure(function: Callable[[Tensor], Tensor], name: str) -> ActivationConstants:
    coarse, inner, grid = (_largest_slopes(function, *g) for g in ((30, 100_001), (20, 200_001), (30, 200_001)))
    zero = float(function(torch.zeros(1, dtype=torch.float64, device="cpu"))[0].detach())
    bounds = [
        # Round up: the maximum lies between two points, or just before a jump.
        1.001 * top if math.isfinite(zero + top) and top <= 1.2 * min(first, narrow) + 1e-3 else math.inf
        for first, narrow, top in zip(coarse, inner, grid)
    ]
    lipschitz = max(bounds[0], 1.001 * _largest_outer_slope(function))
    smoothness = bounds[1] if math.isfinite(lipschitz) and lipschitz == bounds[0] else math.inf
    return ActivationConstants(name, lipschitz, smoothness, zero, _is_homogeneous(function), True)


def _largest_outer_slope(function: Callable[[Tensor], Tensor]) -> float:
    far = torch.logspace(1, 6, 10_001, dtype=torch.float64, device="cpu")
    z = torch.cat([-far, far]).requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(function(z).sum(), z)
    return float(slope.abs().max())


def _largest_slopes(function: Callable[[Tensor], Tensor], end: float, points: int) -> tuple[float, float]:
    """Return max |φ'| and max |φ''|, the latter from differences of φ', which include its jumps."""
    z = torch.linspace(-end, end, points, dtype=torch.float64, device="cpu", requires_grad=True)
    with torch.enable_grad():
        value = function(z)
        (slope,) = torch.autograd.grad(value.sum(), z)
    h = 2 * end / (points - 1)
    jumps = value.detach().diff().abs().max() / h
    return float(torch.maximum(slope.abs().max(), jumps)), float(slope.diff().abs().max()) / h


def _is_homogeneous(function: Callable[[Tensor], Tensor]) -> bool:
    z = torch.linspace(-2, 2, 101, dtype=torch.float64, device="cpu")
    one = torch.ones_like(z[:1])
    scaled = all(torch.allclose(function(t * z), t * function(z), rtol=1e-9, atol=1e-12) for t in (0.0, 0.3, 7.0))
    return scaled and bool(torch.allclose(function(one), one, rtol=1e-9))


# The torch functions that act on every entry separately, with or without known constants.
# fmt: off
ELEMENTWISE = frozenset(_KNOWN) | {
    "mish", "hardswish", "hardsigmoid", "celu", "tanhshrink", "softshrink", "hardshrink", "logsigmoid", "square", "exp",
    "expm1", "log1p", "arctan", "asinh", "sinh", "sign", "neg", "clamp", "clamp_min", "clamp_max", "clip", "pow",
    "sinc", "reciprocal", "sqrt", "rsqrt",
}
# fmt: on
