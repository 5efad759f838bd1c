"""Bound the Rademacher complexity of a network's class, layer by layer.

Extends Golowich, Rakhlin and Shamir (2018), Theorem 1, to biases, activations that are not homogeneous, convolutions,
sums and poolings; docs/theorems.md has the derivation. For each value h of the network, two numbers C and κ satisfy,
for the class of all networks with the same radii and for every μ > 0,

    E sup exp(μ ‖Σ_i ε_i h(x_i)‖) ≤ κ · E exp(μ C ‖Σ_i ε_i x_i‖)

with random signs ε_i. At the output, (1/n) E sup |Σ ε f| ≤ C max‖x‖ (√(2 ln κ) + 1)/√n.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.architecture.operations import (
    Activation,
    Affine,
    EntrywiseScaling,
    FixedMap,
    Input,
    LogSoftmax,
    MaxPooling,
    Opaque,
    Operation,
    Sum,
    walk,
)
from lightning_normtheory.linalg.precision import norm_in_float64, to_float64

__all__ = ["Complexity", "NoBound", "network_complexity"]


class NoBound(ValueError):
    """There is no bound for a network; the message is the reason."""


class Complexity(NamedTuple):
    """The complexity of a class of networks f with k outputs.

    Attributes:
        factors: C_h of each output: ‖f_h‖ ≤ C_h ‖x‖ for every network of the class.
        log_kappa: ln κ, about ln 2 for each layer with an activation.
        radii: the measured norms that define the class.
        constant: whether biases add a coordinate 1 to x; then ‖x‖² above means ‖x‖² + 1.
        positions: how often each of these outputs occurs, at the positions of a convolution or of a sequence.
    """

    factors: tuple[float, ...]
    log_kappa: float
    radii: tuple[float, ...]
    constant: bool
    positions: int = 1

    def input_norm(self, x_norm: float) -> float:
        """Return max ‖x‖ including the added coordinate."""
        return math.hypot(x_norm, 1.0) if self.constant else x_norm

    def output_bounds(self, x_norm: float) -> tuple[float, ...]:
        """Return F_h ≥ |f_h(x)| for every network of the class and ‖x‖ ≤ ``x_norm``."""
        return tuple(factor * self.input_norm(x_norm) for factor in self.factors)

    def rademacher(self, n: int, x_norm: float) -> float:
        """Return Σ_h R_n(f_h) ≥ E sup (1/n) Σ_i Σ_h ε_ih f_h(x_i); for one output, its complexity."""
        return self.positions * sum(self.output_bounds(x_norm)) * (math.sqrt(2 * self.log_kappa) + 1) / math.sqrt(n)


class _State(NamedTuple):
    factor: float
    log_kappa: float


def network_complexity(output: Operation) -> Complexity:
    """Compute the complexity of all networks with the structure and the norms of this one.

    Args:
        output: the result of `record_forward`, with outputs (k,) per sample.

    Raises:
        NoBound: if there is no bound for an operation of the network; the message is the reason.

    Example:
        A tanh layer whose three rows have norm 2, and a unit vector: C = √3 · 2, κ = 2

        >>> from torch import nn
        >>> from lightning_normtheory.architecture.recorder import record_forward
        >>> net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 1, bias=False))
        >>> net[0].weight.data = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
        >>> net[2].weight.data = torch.tensor([[0.0, 0.0, 1.0]])
        >>> found = network_complexity(record_forward(net, torch.randn(2, 2)))
        >>> round(found.factors[0] ** 2, 4), round(found.log_kappa / math.log(2), 4)
        (12.0, 1.0)
    """
    steps = list(walk(output))
    for step in steps:
        if isinstance(step, Opaque):
            raise NoBound(step.reason)
        if isinstance(step, LogSoftmax):
            raise NoBound("log_softmax has a rule only as the last step before the NLL loss of its classes")
    peeling = _Peeling(constant=any(map(_adds_constant, steps)))
    states: dict[int, _State] = {}
    for step in _needed(steps):
        states[id(step)] = peeling.state(step, states)
    factors, log_kappa = peeling.outputs(output, states)
    positions = output.positions if isinstance(output, Affine) else 1
    return Complexity(factors, log_kappa, tuple(peeling.radii), peeling.constant, positions)


def _needed(steps: list[Operation]) -> list[Operation]:
    """Return all steps except affine maps that only an activation uses: they are peeled off with the activation."""
    output = steps[-1]
    needed = {id(output.source if isinstance(output, Affine) else output)}
    for step in reversed(steps):
        if id(step) in needed:
            needed |= {id(s) for s in ([_layer_before(step).source] if isinstance(step, Activation) else step.sources)}
    return [step for step in steps if id(step) in needed]


def _adds_constant(step: Operation) -> bool:
    if isinstance(step, Affine):
        return step.bias is not None and bool(step.bias.any())
    if isinstance(step, EntrywiseScaling):
        return step.shift is not None and bool(step.shift.any())
    return isinstance(step, Activation) and step.constants.at_zero != 0


class _Layer(NamedTuple):
    """The affine map before an activation, with a BatchNorm's scaling folded in."""

    source: Operation
    frobenius: float
    row: float
    bias: float
    largest_bias: float
    size: int


class _Peeling:
    def __init__(self, *, constant: bool) -> None:
        self.constant = constant
        self.radii: list[float] = []

    def state(self, step: Operation, states: dict[int, _State]) -> _State:
        if isinstance(step, Input):
            return _State(1.0, 0.0)
        if isinstance(step, Activation):
            return self._peel(step, states)
        if isinstance(step, Sum):
            # exp(μ(A + B)) ≤ t exp(μA/t) + (1 − t) exp(μB/(1 − t)), with t = C_A/(C_A + C_B).
            parts = [states[id(source)] for source in step.sources]
            return _State(sum(part.factor for part in parts), max(part.log_kappa for part in parts))
        before = states[id(step.source)]
        if isinstance(step, MaxPooling):
            return self._pool(step, before)
        return _State(before.factor * self._norm(step), before.log_kappa)

    def _norm(self, step: Operation) -> float:
        """Return the norm of an affine map on (h, 1) without an activation, which leaves κ unchanged."""
        if isinstance(step, Affine):
            return self._with_constant(self._radius(step.spectral), self._shift(step.bias_norm))
        if isinstance(step, EntrywiseScaling):
            return self._with_constant(self._radius(step.norm), self._shift(step.shift_norm))
        assert isinstance(step, FixedMap)
        return self._with_constant(step.norm, 0.0)

    def _radius(self, value: float) -> float:
        self.radii.append(value)
        return value

    def _shift(self, norm: float) -> float:
        return self._radius(norm) if norm > 0 else 0.0

    def _with_constant(self, norm: float, shift: float) -> float:
        """Return ‖[[‖A‖, ‖b‖], [0, 1]]‖₂, for ‖(Ah + b, 1)‖ ≤ ‖[[‖A‖, ‖b‖], [0, 1]]‖₂ ‖(h, 1)‖."""
        if not self.constant:
            return norm
        affine = torch.tensor([[norm, shift], [0.0, 1.0]], dtype=torch.float64, device="cpu")
        return float(torch.linalg.matrix_norm(affine, 2))

    def _peel(self, step: Activation, states: dict[int, _State]) -> _State:
        layer = _layer_before(step)
        before = states[id(layer.source)]
        c, zero = step.constants.lipschitz, abs(step.constants.at_zero)
        if not math.isfinite(c):
            raise NoBound(f"the activation {step.constants.name} is not Lipschitz")
        if step.trained:
            self._radius(c)
        if step.constants.homogeneous:
            # One row of norm ‖A‖_F is the worst case: Golowich et al., Lemma 1.
            radius = self._radius(math.hypot(layer.frobenius, layer.bias))
            factor = c * (math.hypot(radius, 1.0) if self.constant else radius)
            log_kappa = math.log(2)
        else:
            # Bound every row by the longest. The coordinate 1 is one more function in the maximum.
            radius = self._radius(math.hypot(layer.row, layer.largest_bias))
            units = layer.size + self.constant
            factor = math.sqrt(units) * max(c * radius, float(self.constant))
            log_kappa = math.log(3 if self.constant else 2)
        shifted = self._with_constant(1.0, zero * math.sqrt(layer.size))
        return _State(before.factor * factor * shifted, before.log_kappa + log_kappa)

    def _pool(self, step: MaxPooling, before: _State) -> _State:
        """Apply max(a, b) = (a + b)/2 + |a − b|/2 pair by pair: a sum with one more activation |·|."""
        factor, log_kappa = before.factor * math.sqrt(step.reach), before.log_kappa
        entries = step.window
        while entries > 1:
            entries = math.ceil(entries / 2)
            difference = math.sqrt(entries * step.size / 2)  # ‖D‖_F/2 of entries·size rows (1, −1)
            factor *= 1 + (math.hypot(difference, 1.0) if self.constant else difference)
            log_kappa += math.log(2)
        return _State(factor, log_kappa)

    def outputs(self, output: Operation, states: dict[int, _State]) -> tuple[tuple[float, ...], float]:
        """Return C_h of every output and ln κ; each output is a row of the last layer if that is an affine map.

        At every position the row is applied to a patch, which is no longer than the whole value.
        """
        if isinstance(output, Affine):
            before = states[id(output.source)]
            rows = torch.hypot(*_rows(output)).tolist()
            self.radii += rows
            return tuple(before.factor * row for row in rows), before.log_kappa
        state = states[id(output)]
        return (state.factor,) * max(output.size, 1), state.log_kappa


def _layer_before(step: Activation) -> _Layer:
    source = step.source
    scaling = source if isinstance(source, EntrywiseScaling) else None
    affine = scaling.source if scaling else source
    if not isinstance(affine, Affine):
        # No affine map to fold in: use the identity as the layer's matrix.
        return _Layer(source, math.sqrt(source.size), 1.0, 0.0, 0.0, source.size)
    rows, bias = _folded(affine, scaling)
    positions = affine.positions
    return _Layer(
        affine.source,
        math.sqrt(positions) * float(rows.norm()),
        float(rows.max()),
        math.sqrt(positions) * float(bias.norm()),
        float(bias.abs().max()),
        affine.size,
    )


def _folded(affine: Affine, scaling: EntrywiseScaling | None) -> tuple[Tensor, Tensor]:
    """Return the norms of the rows and the biases of s∘(Wh + b) + t; a scale that varies within a unit becomes its
    maximum."""
    rows, bias = _rows(affine)
    if scaling is None:
        return rows, bias
    scale = _per_unit(scaling.scale, affine).abs()
    shift = torch.zeros_like(bias) if scaling.shift is None else _per_unit(scaling.shift, affine)
    return rows * scale, bias.abs() * scale + shift.abs()


def _rows(affine: Affine) -> tuple[Tensor, Tensor]:
    """Return the norms of the rows and the biases, in float64. The rows themselves would take much memory."""
    rows = norm_in_float64(affine.weight, dim=1)
    return rows, torch.zeros_like(rows) if affine.bias is None else to_float64(affine.bias)


def _per_unit(value: Tensor, affine: Affine) -> Tensor:
    units = len(affine.weight)
    value = to_float64(value)
    form = (units,) + (1,) * (len(affine.shape) - 1) if affine.units_first else (units,)
    if value.numel() == units and tuple(value.shape) == form:
        return value.reshape(units)
    return value.abs().max().expand(units)
