"""The nodes of a recorded forward pass: affine maps, activations, sums and poolings.

`record_forward` builds the graph. Shapes and norms are for one sample.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from torch import Tensor

from lightning_normtheory.architecture.activations import ActivationConstants
from lightning_normtheory.linalg.precision import norm_in_float64, to_float64
from lightning_normtheory.linalg.spectrum import spectral_norm

__all__ = [
    "Activation",
    "Affine",
    "EntrywiseScaling",
    "FixedMap",
    "Input",
    "LogSoftmax",
    "MaxPooling",
    "Opaque",
    "Operation",
    "Origin",
    "Sum",
    "evaluate",
    "form",
    "opaque",
    "walk",
]


@dataclass(frozen=True, eq=False)
class Operation:
    """One step of a forward pass.

    Attributes:
        sources: the operations whose values it takes.
        shape: the shape of its value for one sample.
        replay: the operation as a function of the values of its sources.
    """

    sources: tuple["Operation", ...]
    shape: tuple[int, ...]
    replay: Callable[..., Tensor] = field(repr=False)

    @property
    def source(self) -> "Operation":
        return self.sources[0]

    @property
    def size(self) -> int:
        """The number of entries of its value."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Input(Operation):
    """The sample x; tokens stand for unit vectors, one per token."""


class Origin(NamedTuple):
    """Where a weight comes from.

    Attributes:
        name: the parameter's name, without the suffixes of WeightNorm.
        kind: ``"parameter"``: a parameter; ``"weight_norm"``: g v/‖v‖; ``"constant"``: not trained; ``"computed"``:
            computed from parameters in any other way.
        tensors: the parameter; or g and v.
        dim: ``dim`` of the WeightNorm, -1 for one norm of the whole tensor.
    """

    name: str
    kind: Literal["parameter", "weight_norm", "constant", "computed"]
    tensors: tuple[Tensor, ...] = ()
    dim: int = 0


@dataclass(frozen=True, eq=False)
class Affine(Operation):
    """z = A h + b: a Linear at every position of a sequence, or a convolution.

    A applies W (units, entries), one row per unit, to every patch of h. Patches overlap: every entry of h is in at most
    ``reach`` of them, so all patches together have norm ≤ √reach ‖h‖, and ‖A‖₂ ≤ √reach ‖W‖₂,
    ‖A‖_F ≤ √positions ‖W‖_F. ``units_first``: whether the units are the first axis of its value, else the last.
    """

    weight: Tensor
    bias: Tensor | None
    origin: Origin
    bias_origin: Origin | None
    positions: int = 1
    reach: int = 1
    units_first: bool = False

    @cached_property
    def matrix_norm(self) -> float:
        """‖W‖₂."""
        return spectral_norm(self.weight)

    @cached_property
    def spectral(self) -> float:
        """‖A‖₂, or an upper bound."""
        return math.sqrt(self.reach) * self.matrix_norm

    @cached_property
    def frobenius(self) -> float:
        """‖A‖_F, or an upper bound."""
        return math.sqrt(self.positions) * float(norm_in_float64(self.weight))

    @cached_property
    def row(self) -> float:
        """The largest norm of a row of A."""
        return float(norm_in_float64(self.weight, dim=1).max())

    @cached_property
    def bias_norm(self) -> float:
        """‖b‖, with b repeated at every position."""
        return 0.0 if self.bias is None else math.sqrt(self.positions) * float(to_float64(self.bias).norm())


@dataclass(frozen=True, eq=False)
class EntrywiseScaling(Operation):
    """z = s∘h + t, entry by entry: a BatchNorm with running statistics, or arithmetic with constants.

    ``scale`` and ``shift`` broadcast to the shape of a sample.
    """

    scale: Tensor
    shift: Tensor | None
    trained: bool = False

    @property
    def is_number(self) -> bool:
        """Whether scale and shift are the same for every entry."""
        return self.scale.numel() == 1 and (self.shift is None or self.shift.numel() == 1)

    @cached_property
    def norm(self) -> float:
        return float(self.scale.abs().max())

    @cached_property
    def shift_norm(self) -> float:
        return 0.0 if self.shift is None else float(to_float64(self.shift).expand(self.shape).norm())


@dataclass(frozen=True, eq=False)
class FixedMap(Operation):
    """A fixed linear map with known norm: 1 for a reshaping, less for an average."""

    norm: float = 1.0


@dataclass(frozen=True, eq=False)
class Activation(Operation):
    """φ of every entry; ``trained`` if it has trained parameters."""

    constants: ActivationConstants
    function: Callable[[Tensor], Tensor] = field(repr=False)
    trained: bool = False


@dataclass(frozen=True, eq=False)
class MaxPooling(Operation):
    """The maximum of ``window`` entries; every entry is in at most ``reach`` windows."""

    window: int
    reach: int


@dataclass(frozen=True, eq=False)
class LogSoftmax(Operation):
    """Logarithms of the probabilities along an axis of a sample."""

    axis: int


@dataclass(frozen=True, eq=False)
class Sum(Operation):
    """The sum of its sources, or their concatenation."""


@dataclass(frozen=True, eq=False)
class Opaque(Operation):
    """An operation without a rule."""

    reason: str


def opaque(reason: str, sources: tuple[Operation, ...] = (), shape: tuple[int, ...] = ()) -> Opaque:
    """Return an operation without a rule, which cannot be replayed."""

    def unknown(*values: Tensor) -> Tensor:
        raise RuntimeError(f"This operation cannot be replayed: {reason}.")

    return Opaque(sources, shape, unknown, reason)


def walk(output: Operation) -> Iterator[Operation]:
    """Yield every operation that an output depends on, sources first."""
    seen: set[int] = set()
    stack: list[tuple[Operation, bool]] = [(output, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((source, False) for source in reversed(node.sources))


def form(output: Operation) -> Hashable:
    """Return the kinds and shapes of all operations and how they are connected, to compare with another recording."""
    steps = list(walk(output))
    numbers = {id(step): number for number, step in enumerate(steps)}
    return tuple((type(step), step.shape, tuple(numbers[id(source)] for source in step.sources)) for step in steps)


def evaluate(output: Operation, x: Tensor) -> dict[Operation, Tensor]:
    """Compute the values of an operation and of all operations it depends on, for samples x."""
    values: dict[Operation, Tensor] = {}
    for node in walk(output):
        values[node] = x if isinstance(node, Input) else node.replay(*(values[source] for source in node.sources))
    return values
