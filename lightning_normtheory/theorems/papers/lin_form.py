"""Compare a network with those of LIN: fully connected (46), convolutional (73), residual (80), or a mixture (H.3)."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

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
from lightning_normtheory.record.wording import join_names
from lightning_normtheory.theorems.problem import Problem

__all__ = ["hidden_values", "lin_form"]

# Relative tolerance for comparing factors in float32.
_CLOSE = 1e-3


def lin_form(problem: Problem) -> tuple[str, ...]:
    """Return the differences of a network from those for which LIN proves ‖∇²f‖ = Õ(1/√m); empty if there are none.

    These are, with one smooth σ, hidden layers of one width m, no biases, and all weights trained:

        α_l = σ(W_l α_{l−1}/√m_{l−1})                  (46), a Linear; m_0 = d
        α_l = σ(W_l ∗ α_{l−1}/√m_{l−1})                (73), a convolution that keeps the number of pixels; m_0 channels
        α_l = σ(W_l α_{l−1}/√m_{l−1}) + α_{l−1}        (80), l ≥ 2; by Remark H.1, also over several layers
        f = vᵀα_L/√m

    in any order (Section H.3). The factor of a convolution, or of v on m channels of Q pixels, may also be that of the
    fan-in: it differs by a number that does not depend on m. Not compared: the start, which must be N(0, 1), and
    whether m is large.

    Example:
        >>> from torch import nn
        >>> from lightning_normtheory.theorems.problem import network_problem
        >>> net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))
        >>> lin_form(network_problem(net, torch.randn(2, 3)))
        ('no factor 1/√(fan-in) (0, 2)',)
    """
    unknown = [step.reason for step in walk(problem.output) if isinstance(step, Opaque)]
    if unknown:
        return (unknown[0],)
    form = _Form()
    form.follow(problem.output)
    return (*form.differences(), *_parameters(form, problem), *_activations(form))


def hidden_values(output: Operation) -> list[Operation]:
    """Return the values α_l that layers take as inputs, without the factors around them, x excepted.

    Example:
        >>> from torch import nn
        >>> from lightning_normtheory.architecture.recorder import record_forward
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> [type(value).__name__ for value in hidden_values(record_forward(net, torch.randn(2, 3)))]
        ['Activation']
    """
    found = {id(value): value for layer in walk(output) if isinstance(layer, Affine) for value in _inputs(layer)}
    return [value for value in found.values() if not isinstance(value, Input)]


def _inputs(layer: Affine) -> Iterator[Operation]:
    for source in layer.sources:
        yield _bare(source).value


class _Bare(NamedTuple):
    """A value without the reshapings and factors after it."""

    value: Operation
    factor: float
    problems: tuple[str, ...]


def _bare(step: Operation) -> _Bare:
    factor, problems = 1.0, []
    while isinstance(step, (FixedMap, EntrywiseScaling)):
        if isinstance(step, EntrywiseScaling):
            plain = step.is_number and not step.trained and (step.shift is None or not bool(step.shift.any()))
            problems += [] if plain else ["a normalization, a constant that is added, or a trained scale"]
            factor *= step.norm if plain else 1.0
        elif step.norm != 1 or step.size != step.source.size:
            problems.append("an average pooling, a padding or a selection")
        step = step.source
    return _Bare(step, factor, tuple(problems))


class _Form:
    """Follow a network from its output to its input, and collect what differs."""

    def __init__(self) -> None:
        self.layers: list[Affine] = []
        self.activations: list[Activation] = []
        self.hidden: list[int] = []
        self._found: dict[str, list[str]] = {}
        self._seen: set[int] = set()

    def differences(self) -> tuple[str, ...]:
        found = ((text, [name for name in reversed(names) if name]) for text, names in self._found.items())
        return tuple(f"{text} ({join_names(dict.fromkeys(names))})" if names else text for text, names in found)

    def _add(self, difference: str, name: str = "") -> None:
        self._found.setdefault(difference, []).append(name)

    def follow(self, output: Operation) -> None:
        after = _bare(output)
        if not isinstance(after.value, Affine):
            name = after.value.constants.name if isinstance(after.value, Activation) else ""
            return self._add("the output layer is not linear", name or type(after.value).__name__)
        self._layer(after, head=True)

    def _layer(self, after: _Bare, *, head: bool = False) -> None:
        """Compare z = W h with its factors, then h."""
        layer = after.value
        assert isinstance(layer, Affine)
        before = _bare(layer.source)
        name = layer.origin.name.removesuffix(".weight")
        self.layers.append(layer)
        for problem in (*after.problems, *before.problems):
            self._add(problem, name)
        if layer.bias is not None:
            self._add("a bias", name)
        self._compare_factor(layer, before.value, abs(after.factor * before.factor), name)
        if not head:
            self.hidden.append(len(layer.weight))
        self._value(before.value)

    def _compare_factor(self, layer: Affine, value: Operation, factor: float, name: str) -> None:
        allowed = {layer.weight.shape[1]}
        weight = layer.origin.tensors[0] if layer.origin.kind == "parameter" else layer.weight
        if layer.units_first and weight.dim() > 2:
            channels = layer.source.shape[0]
            allowed.add(channels)
            if layer.shape[1:] != layer.source.shape[1:]:
                self._add("a convolution that changes the number of pixels", name)
            if weight.shape[:2] != (len(layer.weight), channels):
                self._add("a grouped or transposed convolution", name)
        elif layer.positions > 1:
            self._add("a Linear at several positions", name)
        elif len(value.shape) > 1:
            allowed.add(value.shape[0])
        if not any(math.isclose(factor, number**-0.5, rel_tol=_CLOSE) for number in allowed):
            self._add("no factor 1/√(fan-in)", name)

    def _value(self, value: Operation) -> None:
        """Compare α_l and everything before it, once."""
        if id(value) in self._seen or isinstance(value, Input):
            return
        self._seen.add(id(value))
        if isinstance(value, Activation):
            after = _bare(value.source)
            self.activations.append(value)
            if isinstance(after.value, Affine):
                return self._layer(after)
            self._add("an activation that does not follow a layer", value.constants.name)
            self._value(after.value)
        elif isinstance(value, Sum) and _is_addition(value):
            self._skip(value)
        elif isinstance(value, Affine):
            self._add("no activation after a layer", value.origin.name.removesuffix(".weight"))
            self._layer(_Bare(value, 1.0, ()))
        else:
            self._add(_WORDS.get(type(value), "values that are concatenated or subtracted"))
            for source in value.sources:
                self._value(_bare(source).value)

    def _skip(self, value: Sum) -> None:
        """Compare σ(W α/√m) + α': a branch that ends with an activation, and an earlier value as it is."""
        branch, skipped = sorted(value.sources, key=lambda source: len(list(walk(source))), reverse=True)
        if not isinstance(branch, Activation) or not any(step is skipped for step in walk(branch)):
            self._add("a sum of other than an activation and an earlier value")
        if isinstance(_bare(skipped).value, Input):
            self._add("a skip connection from the input")
        for source in (branch, skipped):
            bare = _bare(source)
            if bare.value is not source:
                self._add("a factor or a reshaping on a skip connection")
            self._value(bare.value)


_WORDS = {MaxPooling: "max pooling", LogSoftmax: "log_softmax inside the network"}


def _is_addition(step: Sum) -> bool:
    if len(step.sources) != 2 or any(source.shape != step.shape for source in step.sources):
        return False
    one = torch.ones(1, *step.shape, device="cpu")
    return bool((step.replay(one, one) == 2).all())


def _parameters(form: _Form, problem: Problem) -> Iterator[str]:
    used: dict[int, str] = {}
    by_text: dict[str, list[str]] = {}
    for layer in reversed(form.layers):
        if layer.origin.kind in ("weight_norm", "computed"):
            text = "weights that are computed, by WeightNorm or otherwise"
        elif not all(tensor.requires_grad for tensor in layer.origin.tensors):
            text = "weights that are not trained"
        else:
            continue
        by_text.setdefault(text, []).append(layer.origin.name.removesuffix(".weight"))
    yield from (f"{text} ({join_names(dict.fromkeys(names))})" for text, names in by_text.items())
    for layer in form.layers:
        origin, name = layer.origin, layer.origin.name.removesuffix(".weight")
        for tensor in origin.tensors:
            if tensor.data_ptr() in used:
                yield f"layers that share their weights ({used[tensor.data_ptr()]} and {name})"
            used[tensor.data_ptr()] = name
    known = {id(tensor) for layer in form.layers for tensor in layer.origin.tensors}
    known |= {id(t) for layer in form.layers if layer.bias_origin for t in layer.bias_origin.tensors}
    others = [name for name, parameter in problem.trained.items() if id(parameter) not in known]
    if others:
        yield f"trained parameters outside the layers ({others[0]})"


def _activations(form: _Form) -> Iterator[str]:
    constants = dict.fromkeys(step.constants for step in form.activations)
    for phi in constants:
        if not (math.isfinite(phi.smoothness) and math.isfinite(phi.lipschitz)):
            yield f"the activation {phi.name} has no bounded first and second derivatives"
    if any(step.trained for step in form.activations):
        yield "an activation with trained parameters"
    if len(constants) > 1:
        yield f"different activations ({join_names(phi.name for phi in constants)})"
    if not constants:
        yield "no hidden layer"
    if len(set(form.hidden)) > 1:
        widths = join_names(map(str, dict.fromkeys(reversed(form.hidden))))
        yield f"hidden layers of different widths ({widths})"
