"""A network as a chain of layers, with the bounds of each layer that the theorems use."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.architecture.activations import ActivationConstants
from lightning_normtheory.architecture.operations import (
    Activation,
    Affine,
    EntrywiseScaling,
    FixedMap,
    LogSoftmax,
    MaxPooling,
    Opaque,
    Operation,
    Sum,
    walk,
)
from lightning_normtheory.linalg.precision import norm_in_float64, to_float64

__all__ = ["Chain", "Link", "LinkBounds", "chain_of", "link_bounds"]

# sup ‖D²(v/‖v‖)[u, u']‖ over unit vectors, times ‖v‖².
_DIRECTION = 2 / math.sqrt(3)


@dataclass(frozen=True)
class Link:
    """One layer: z = ν(W h + b) on patches, h' = φ(z).

    Attributes:
        affine: W and b.
        before: the norm of the fixed linear maps between the last activation and W, such as an average pooling.
        after: the scalar ν that multiplies z, such as 1/√m.
        factor: the part of ``before`` that is a scalar factor of h.
        activation: φ; ``None`` at the output.
    """

    affine: Affine
    before: float
    after: float
    factor: float
    activation: ActivationConstants | None

    @cached_property
    def lengths_and_norms(self) -> tuple[Tensor, Tensor]:
        """|g_i| and ‖v_i‖ under WeightNorm, on the CPU: the host needs their bounds for many radii."""
        g, v = self.affine.origin.tensors
        return to_float64(g.detach()).abs().flatten().cpu(), _unit_norms(g, v).cpu()


@dataclass(frozen=True)
class Chain:
    """f as a composition of layers; the last one has no activation."""

    links: tuple[Link, ...]

    @property
    def depth(self) -> int:
        """L, the number of hidden layers."""
        return len(self.links) - 1

    @property
    def head(self) -> Link:
        return self.links[-1]

    @property
    def outputs(self) -> int:
        return self.head.affine.size

    @property
    def tensors(self) -> list[Tensor]:
        """All weights and biases; under WeightNorm, g and v."""
        origins = [origin for link in self.links for origin in (link.affine.origin, link.affine.bias_origin)]
        return [tensor for origin in origins if origin is not None for tensor in origin.tensors]


def chain_of(output: Operation) -> Chain | str:
    """Convert a recorded forward pass to a chain of layers, or return the reason why it is none.

    Example:
        >>> from torch import nn
        >>> from lightning_normtheory.architecture.recorder import record_forward
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> chain = chain_of(record_forward(net, torch.randn(2, 3)))
        >>> chain.depth, chain.outputs, chain.links[0].activation.name
        (1, 2, 'tanh')
    """
    steps = list(walk(output))
    problems = [problem for kind in (True, False) for step in steps if (problem := _problem(step, opaque=kind))]
    if problems:
        return problems[0]
    links: list[Link] = []
    affine: Affine | None = None
    before, after, factor = 1.0, 1.0, 1.0
    for step in steps:
        if isinstance(step, Affine):
            if affine is not None:
                return f"{step.origin.name!r} follows another layer without an activation in between"
            affine, after = step, 1.0
        elif isinstance(step, Activation):
            if affine is None:
                return f"the activation {step.constants.name} does not follow a linear layer"
            links.append(Link(affine, before, after, factor, step.constants))
            affine, before, after, factor = None, 1.0, 1.0, 1.0
        elif isinstance(step, (FixedMap, EntrywiseScaling)):
            if affine is None:
                before *= step.norm
                factor *= step.norm if isinstance(step, EntrywiseScaling) else 1.0
            elif isinstance(step, FixedMap) and (step.norm != 1 or step.size != affine.size):
                return "there is an averaging or padding between a layer and its activation"
            else:
                after *= step.norm
    if affine is None:
        return "the last step is not a linear layer"
    return _shared_parameter(links, affine) or Chain((*links, Link(affine, before, after, factor, None)))


def _problem(step: Operation, *, opaque: bool) -> str:
    """Return why a step cannot be part of a chain. With ``opaque``, check only for an operation without a rule."""
    if opaque or isinstance(step, Opaque):
        return step.reason if isinstance(step, Opaque) else ""
    if isinstance(step, Activation) and step.trained:
        return f"the activation {step.constants.name} has trained parameters"
    if isinstance(step, MaxPooling):
        return "max pooling is not smooth"
    if isinstance(step, LogSoftmax):
        return "log_softmax is no layer of a chain"
    if isinstance(step, Sum):
        return "the network branches: values are added or concatenated"
    if isinstance(step, EntrywiseScaling) and (step.trained or not step.is_number):
        return "a layer is followed by a BatchNorm or a trained scale"
    if isinstance(step, EntrywiseScaling) and step.shift is not None and bool(step.shift.any()):
        return "a constant is added between layers"
    if isinstance(step, Affine):
        for origin in (step.origin, step.bias_origin):
            if origin is not None and origin.kind == "computed":
                return f"{origin.name!r} is computed from parameters, but not by WeightNorm"
    return ""


def _shared_parameter(links: list[Link], head: Affine) -> str:
    """Return which parameter two layers share, if any: their derivatives add up, which the bounds do not cover."""
    used: dict[int, tuple[str, bool]] = {}  # by memory address: a view or a detached tensor is the same parameter
    for affine in (*(link.affine for link in links), head):
        for origin in (affine.origin, affine.bias_origin):
            for tensor in () if origin is None else origin.tensors:
                memory = tensor.data_ptr()
                name, trained = used.get(memory, ("", False))
                if memory in used and (trained or tensor.requires_grad):
                    return f"two layers share the parameters of {name!r}"
                used[memory] = ("" if origin is None else origin.name, tensor.requires_grad)
    return ""


class LinkBounds(NamedTuple):
    """Bounds of one layer for all parameters within a distance ρ of the current ones.

    Attributes:
        spectral: T ≥ ‖ν A‖₂.
        row: the largest norm of a row of νA.
        bias: ‖νb‖.
        first: M ≥ ‖ν DW[u]‖_F for unit u, the derivative in the layer's parameters.
        second: S ≥ ‖ν D²W[u, u']‖_F.
        bias_gradient: ‖∂z/∂b‖, zero if b is not trained.
        reach: √ of the number of patches that contain an entry of h.
    """

    spectral: float
    row: float
    bias: float
    first: float
    second: float
    bias_gradient: float
    reach: float


def link_bounds(link: Link, radius: float, *, directions_shrink: bool = False) -> LinkBounds:
    """Compute bounds of a layer for all parameters in a ball of this radius.

    Args:
        directions_shrink: whether ‖v‖ of a WeightNorm may shrink, by up to ``radius``. It cannot along a step of
            gradient descent, where ∇_v L ⟂ v.
    """
    affine, scale = link.affine, abs(link.after)
    first, second = _derivatives(link, radius, directions_shrink=directions_shrink)
    drift = first * radius
    reach = math.sqrt(affine.reach)
    positions = math.sqrt(affine.positions)
    trained_bias = affine.bias_origin is not None and any(t.requires_grad for t in affine.bias_origin.tensors)
    return LinkBounds(
        spectral=scale * (affine.spectral + reach * drift),
        row=scale * (affine.row + drift),
        bias=scale * (affine.bias_norm + (positions * radius if trained_bias else 0.0)),
        first=scale * first,
        second=scale * second,
        bias_gradient=scale * positions if trained_bias else 0.0,
        reach=reach,
    )


def _derivatives(link: Link, radius: float, *, directions_shrink: bool) -> tuple[float, float]:
    """Return M and S of W as a function of its parameters."""
    origin = link.affine.origin
    if origin.kind != "weight_norm":
        return (1.0, 0.0) if any(t.requires_grad for t in origin.tensors) else (0.0, 0.0)
    g, v = origin.tensors
    lengths, norms = link.lengths_and_norms
    if directions_shrink:
        norms = norms - radius
        if not bool((norms > 0).all()):
            return math.inf, math.inf
    if g.requires_grad:
        lengths = lengths + radius
    by_direction = lengths / norms if v.requires_grad else torch.zeros_like(lengths)
    by_length = torch.full_like(lengths, float(g.requires_grad))
    # With u = (u_g, u_v): D²w[u, u] = 2 u_g u_v⊥/‖v‖ + g D²(v/‖v‖)[u_v, u_v].
    bend = _DIRECTION * by_direction / norms
    mixed = float(g.requires_grad and v.requires_grad) / norms
    second = (bend + (bend.square() + 4 * mixed.square()).sqrt()) / 2
    return float(torch.maximum(by_direction, by_length).max()), float(second.max())


def _unit_norms(g: Tensor, v: Tensor) -> Tensor:
    """Return ‖v_i‖ in the order of g."""
    axes = [axis for axis in range(v.dim()) if g.dim() == 0 or g.shape[axis] == 1]
    v = v.detach()
    return (norm_in_float64(v, axes) if axes else to_float64(v).abs()).flatten()
