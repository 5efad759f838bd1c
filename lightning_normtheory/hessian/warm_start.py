"""What a measurement of λ_max leaves to the next one, in few bytes per parameter."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.linalg.inner_products import norms
from lightning_normtheory.measuring.workspace import empty
from lightning_normtheory.model.parameters import FlatParameters

__all__ = [
    "FIRST",
    "Check",
    "OtherVectors",
    "WarmStart",
    "first_vector",
    "fits",
    "one_byte",
    "packed",
    "with_first",
]

# Five bits of exponent, two of mantissa: an error of about 7 % of a vector. In bfloat16 it is 0.2 %, less than a
# residual of 1e-2 allows.
_SHORT, FIRST = torch.float8_e5m2, torch.bfloat16
# Entries of the vectors that are read at once: on the CPU those that fit into its cache, on other devices more.
_CACHED, _PIECE = 2**18, 2**22


class Check(NamedTuple):
    """How the Hessian acted on the test vector y (see `follow_top_eigenvalue`).

    Attributes:
        value: λ_max of the last measurement.
        gaps: (λ_max − ρ_i)/|λ_max| for each of the other vectors, when they were chosen.
        image: a random projection of H y in the last measurement, without its part along the other vectors; ``None`` if
            there was no test.
        usual: ‖ΔH y‖ relative to the change of v₁, where it was no sign of another leading eigenvector.
        scale: a lower bound of ‖H‖ in the last measurement, taken to shrink with λ_max.
        age: the number of measurements since the last long iteration.
    """

    value: float
    gaps: list[float]
    image: Tensor | None
    usual: float
    scale: float
    age: int


class WarmStart(NamedTuple):
    """What a measurement leaves to the next: four bytes per parameter, or one where only v₁ is followed.

    The next measurement of an uninterrupted run begins with the same rounded vectors as that of a resumed one.

    Attributes:
        vectors: by parameter name the bytes of v₁ in bfloat16, v₂ and s in float8 (4, *shape); or those of v₁ alone in
            float8, in the shape of the parameter, as older versions kept them.
        check: the numbers to compare with; None: the next measurement makes no test.
        seed: that of the noise, another one for other vectors.
    """

    vectors: Mapping[str, Tensor] = MappingProxyType({})
    check: Check | None = None
    seed: int = 0

    def state_dict(self) -> dict[str, Any]:
        check = None if self.check is None else self.check._asdict()
        return {"vector": dict(self.vectors), "check": check, "seed": self.seed}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "WarmStart":
        check = state.get("check")
        return cls(dict(state.get("vector", {})), None if check is None else Check(**check), state.get("seed", 0))


def one_byte(part: Tensor, size: int) -> Tensor:
    # Scaled to entries of order one: those of a unit vector with millions of entries are too small for eight bits.
    # As bytes, which every version of torch can save and load.
    return (part * size**0.5).cpu().to(_SHORT).view(torch.uint8)


def packed(vectors: Tensor, space: FlatParameters) -> dict[str, Tensor]:
    """Return the bytes of v₁ and, if there are three vectors, of v₂ and s; else those of the others are zero.

    The other vectors are scaled in place.
    """
    others = vectors[1:].mul_(space.size**0.5) if len(vectors) == 3 else vectors[:0]
    rows = [space.unflatten(row) for row in (vectors[0], *others)]
    found = {}
    for name, part in rows[0].items():
        into = torch.zeros(4, *part.shape, dtype=torch.uint8, device="cpu")
        into[:2].view(-1).view(FIRST).copy_(part.reshape(-1).cpu())
        for row, each in zip(into[2:], rows[1:]):
            row.view(_SHORT).copy_(each[name].cpu())  # not every device has float8
        found[name] = into
    return found


def with_first(vectors: Mapping[str, Tensor], first: Tensor, space: FlatParameters) -> dict[str, Tensor]:
    """Return the same bytes with another v₁."""
    return {name: torch.cat([part[:2], vectors[name][2:]]) for name, part in packed(first[None], space).items()}


def first_vector(vectors: Mapping[str, Tensor], space: FlatParameters) -> Tensor | None:
    """Return v₁ without the parameters that have been frozen since; None if nothing is left of it."""
    four = {name: vectors[name][:2].reshape(-1).view(FIRST) for name in _fitting(vectors, space)}
    one = {name: part.view(_SHORT) for name, part in vectors.items() if name not in four}
    return _joined({**one, **four}, space)


class OtherVectors:
    """v₂ and s, orthonormal, which are read from their bytes a few at a time: they take no memory to speak of."""

    def __init__(self, vectors: Mapping[str, Tensor], space: FlatParameters) -> None:
        self._vectors, self._space = vectors, space
        self._fitting = set(_fitting(vectors, space))
        # Rows: v₂ and s in terms of the vectors that are kept.
        self._rows = torch.eye(2, dtype=torch.float64, device="cpu")
        gram = self._added(parts @ parts.t() for _, parts in self._pieces())
        size = float(gram[0, 0]) ** 0.5
        across = float(gram[1, 1]) - float(gram[0, 1]) ** 2 / size**2 if size > 0 else 0.0
        self.missing = not (0 < size < math.inf and 0 < across < math.inf)
        if not self.missing:
            self._rows = torch.tensor(
                [[1 / size, 0.0], [-float(gram[0, 1]) / size**2, 1.0]], dtype=torch.float64, device="cpu"
            )
            self._rows[1] /= across**0.5

    @classmethod
    def read(cls, vectors: Mapping[str, Tensor], space: FlatParameters) -> "OtherVectors | None":
        """None if one of them is missing."""
        others = cls(vectors, space) if _fitting(vectors, space) else None
        return None if others is None or others.missing else others

    def add_to(self, total: Tensor, weights: Sequence[float]) -> None:
        """Add a combination of both in place."""
        coefficients = torch.tensor(weights, dtype=torch.float64, device="cpu") @ self._rows
        on_device = coefficients.to(self._space.dtype).to(self._space.device)
        for where, parts in self._pieces():
            total[where].addmv_(parts.t(), on_device)

    def dots(self, x: Tensor) -> list[float]:
        """The inner products with both."""
        return (self._rows @ self._added(parts @ x[where] for where, parts in self._pieces())).tolist()

    def _added(self, sums: Iterable[Tensor]) -> Tensor:
        """Add up what the pieces give, in float64. Inside of a piece float32 is enough for a test."""
        return torch.stack([each.cpu().double() for each in sums]).sum(0)

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Parts (2, …) of the vectors that are kept, with their place in a flat vector."""
        for name, where, at in _places(self._space):
            if name in self._fitting:
                parts = _decoded(self._vectors[name].reshape(4, -1)[2:, at], self._space.dtype)
                yield where, parts.to(self._space.device)


def _places(space: FlatParameters) -> Iterator[tuple[str, slice, slice]]:
    """Pieces of all parameters: the name, the place in a flat vector, and that in the parameter's own."""
    begin, piece = 0, _CACHED if space.device.type == "cpu" else _PIECE
    for name, p in space.parameters.items():
        for at in range(0, p.numel(), piece):
            end = min(at + piece, p.numel())
            yield name, slice(begin + at, begin + end), slice(at, end)
        begin += p.numel()


def _decoded(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers from bytes on the CPU, since not every device has float8: a byte is the upper half of a float16."""
    return (parts.to(torch.int16) << 8).view(torch.float16).to(dtype)


def _joined(parts: Mapping[str, Tensor], space: FlatParameters) -> Tensor | None:
    """Return a flat vector in memory that can be given back; missing parts are zero."""
    flat = empty(space.size, dtype=space.dtype, device=space.device)
    for name, into in space.unflatten(flat).items():
        if name in parts and parts[name].numel() == into.numel():
            into.view(-1).copy_(parts[name].reshape(-1).to(space.dtype))  # not every device has float8
        else:
            into.zero_()
    return flat if 0 < float(norms(flat)) < math.inf else None


def _fitting(vectors: Mapping[str, Tensor], space: FlatParameters) -> list[str]:
    """The parameters of which all vectors are known."""
    return [name for name, p in space.parameters.items() if name in vectors and vectors[name].shape == (4, *p.shape)]


def fits(vectors: Mapping[str, Tensor], space: FlatParameters) -> bool:
    """Whether the parameters are those of the vectors."""
    return len(_fitting(vectors, space)) == len(vectors) == len(space.parameters)
