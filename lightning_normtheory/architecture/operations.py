"""A network as the bounds see it: a graph of affine maps, activations, sums and poolings.

`recorded_forward` makes one from a forward pass. Every number here is about one sample.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.architecture.activations import ActivationConstants
from lightning_normtheory.linalg.spectrum import spectral_norm

__all__ = [
    "Activation",
    "Affine",
    "EntrywiseScaling",
    "FixedMap",
    "Input",
    "MaxPooling",
    "Opaque",
    "Operation",
    "Origin",
    "Sum",
    "evaluate",
    "opaque",
    "walk",
]


@dataclass(frozen=True, eq=False)
class Operation:
    """One step of a forward pass.

    Attributes:
        sources: what it is applied to.
        shape: of its value, for one sample.
        replay: the step itself, as a function of the values of its sources.
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
    """The sample x."""


class Origin(NamedTuple):
    """Where a weight comes from.

    Attributes:
        name: of the parameter, without WeightNorm's own parts.
        kind: ``"parameter"``: a parameter itself; ``"weight_norm"``: g v/‖v‖; ``"constant"``: nothing that is trained;
            ``"computed"``: anything else that is computed from parameters.
        tensors: the parameter; or g and v.
        dim: of WeightNorm, -1 for the norm over everything.
    """

    name: str
    kind: Literal["parameter", "weight_norm", "constant", "computed"]
    tensors: tuple[Tensor, ...] = ()
    dim: int = 0


@dataclass(frozen=True, eq=False)
class Affine(Operation):
    """z = A h + b: a Linear at every position of a sequence, or a convolution.

    With W (units, entries) the rows, one per unit, the operator A applies W to every patch of h. Patches overlap: every
    entry of h is in at most ``reach`` of them, so that the norms of all patches together are ≤ √reach ‖h‖, and
    ‖A‖₂ ≤ √reach ‖W‖₂, ‖A‖_F ≤ √positions ‖W‖_F. ``units_first`` says which axis of its value has the units.
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
        """‖A‖₂, or a bound of it."""
        return math.sqrt(self.reach) * self.matrix_norm

    @cached_property
    def frobenius(self) -> float:
        """‖A‖_F, or a bound of it."""
        return math.sqrt(self.positions) * float(torch.linalg.vector_norm(self.weight, dtype=torch.float64))

    @cached_property
    def row(self) -> float:
        """The largest norm of a row of A."""
        return float(torch.linalg.vector_norm(self.weight, dim=1, dtype=torch.float64).max())

    @cached_property
    def bias_norm(self) -> float:
        """‖b‖, b being repeated at every position."""
        return 0.0 if self.bias is None else math.sqrt(self.positions) * float(self.bias.double().norm())


@dataclass(frozen=True, eq=False)
class EntrywiseScaling(Operation):
    """z = s∘h + t entry by entry: a BatchNorm with running statistics, or a product with constants.

    ``scale`` and ``shift`` broadcast to the shape of a sample.
    """

    scale: Tensor
    shift: Tensor | None
    trained: bool = False

    @property
    def is_number(self) -> bool:
        """Whether it does the same to every entry."""
        return self.scale.numel() == 1 and (self.shift is None or self.shift.numel() == 1)

    @cached_property
    def norm(self) -> float:
        return float(self.scale.abs().max())

    @cached_property
    def shift_norm(self) -> float:
        return 0.0 if self.shift is None else float(self.shift.double().expand(self.shape).norm())


@dataclass(frozen=True, eq=False)
class FixedMap(Operation):
    """A fixed linear map of known norm: 1 for a reshaping, less for an average."""

    norm: float = 1.0


@dataclass(frozen=True, eq=False)
class Activation(Operation):
    """φ of every entry; ``trained`` if it has a parameter of its own."""

    constants: ActivationConstants
    function: Callable[[Tensor], Tensor] = field(repr=False)
    trained: bool = False


@dataclass(frozen=True, eq=False)
class MaxPooling(Operation):
    """The largest of ``window`` entries; every entry is in at most ``reach`` windows."""

    window: int
    reach: int


@dataclass(frozen=True, eq=False)
class Sum(Operation):
    """The sum of its sources, or their concatenation."""

    concatenated: bool = False


@dataclass(frozen=True, eq=False)
class Opaque(Operation):
    """A step of which nothing is known."""

    reason: str


def opaque(reason: str, sources: tuple[Operation, ...] = (), shape: tuple[int, ...] = ()) -> Opaque:
    """A step of which nothing is known."""

    def unknown(*values: Tensor) -> Tensor:
        raise RuntimeError(f"This step cannot be repeated: {reason}.")

    return Opaque(sources, shape, unknown, reason)


def walk(output: Operation) -> Iterator[Operation]:
    """Every operation that an output depends on, sources first."""
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


def evaluate(output: Operation, x: Tensor) -> dict[Operation, Tensor]:
    """The values of an operation, and of all that it depends on, for samples x."""
    values: dict[Operation, Tensor] = {}
    for node in walk(output):
        values[node] = x if isinstance(node, Input) else node.replay(*(values[source] for source in node.sources))
    return values
