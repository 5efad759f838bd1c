"""What a measurement of λ_max leaves to the next one, in few bytes per parameter."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.linalg.inner_products import norms
from lightning_normtheory.measuring.workspace import empty, give_back
from lightning_normtheory.model.parameters import FlatParameters

__all__ = [
    "FIRST",
    "Check",
    "OtherVectors",
    "WarmStart",
    "first_vector",
    "fits",
    "one_byte",
    "with_drift",
    "without_drift",
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
        usual: ‖ΔH y‖ relative to the change that u showed in the last measurement.
        scale: a lower bound of ‖H‖ in the last measurement, taken to shrink with λ_max.
        age: the number of measurements since the last long iteration.
        size: ‖y‖ before y was normalized.
        along: the inner products of y with the other vectors.
        rows: the other vectors in terms of those that are kept.
        sides: the same projection of them (2, …).
    """

    value: float
    gaps: list[float]
    image: Tensor | None
    usual: float
    scale: float
    age: int
    size: float
    along: list[float]
    rows: list[list[float]]
    sides: Tensor


class WarmStart(NamedTuple):
    """What a measurement leaves to the next: five bytes per parameter, or one where only v₁ is followed.

    The next measurement of an uninterrupted run begins with the same rounded vectors as that of a resumed one.

    Attributes:
        first: by parameter name the bytes of u in bfloat16 and of d in float8 (3, *shape): u is v₁ ahead of its drift,
            the change of v₁ between the last two measurements, and d that drift, of length one; or the bytes of v₁
            alone in float8, in the shape of the parameter.
        others: by parameter name the bytes of v₂ and s in float8 (2, *shape).
        check: the numbers to compare with; None: the next measurement makes no test.
        seed: that of the noise, another one for other vectors.
        drift: the length of the drift.
        ahead: u − v₁ in terms of the drift.
    """

    first: Mapping[str, Tensor] = MappingProxyType({})
    others: Mapping[str, Tensor] = MappingProxyType({})
    check: Check | None = None
    seed: int = 0
    drift: float = 0.0
    ahead: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        check = None if self.check is None else self.check._asdict()
        # One tensor for each parameter, since a file needs some hundred bytes for every tensor.
        joined = {name: torch.cat([self.first[name], part]) for name, part in self.others.items()}
        vectors = {"vectors": joined} if joined else {"vector": dict(self.first)}
        return {**vectors, "check": check, "seed": self.seed, "drift": self.drift, "ahead": self.ahead}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "WarmStart":
        check = state.get("check") or {}
        joined = state.get("vectors", {})
        return cls(
            {name: part[:3] for name, part in joined.items()} or dict(state.get("vector", {})),
            {name: part[3:] for name, part in joined.items()},
            Check(**check) if set(check) == set(Check._fields) else None,  # an older version's has fewer
            state.get("seed", 0),
            state.get("drift", 0.0),
            state.get("ahead", 0.0),
        )


def one_byte(part: Tensor, size: int) -> Tensor:
    # Scaled to entries of order one: those of a unit vector with millions of entries are too small for eight bits.
    # As bytes, which every version of torch can save and load.
    return (part * size**0.5).cpu().to(_SHORT).view(torch.uint8)


def without_drift(vectors: Tensor, space: FlatParameters) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the bytes of v₁, and those of v₂ and s if there are three vectors; else those of the others are zero.

    The other vectors are scaled in place.
    """
    others = vectors[1:].mul_(space.size**0.5) if len(vectors) == 3 else vectors[:0]
    first_rows, other_rows = space.unflatten(vectors[0]), [space.unflatten(row) for row in others]
    first, rest = {}, {}
    for name, part in first_rows.items():
        first[name] = torch.zeros(3, *part.shape, dtype=torch.uint8, device="cpu")
        first[name][:2].view(-1).view(FIRST).copy_(part.reshape(-1).cpu())
        rest[name] = torch.zeros(2, *part.shape, dtype=torch.uint8, device="cpu")
        for row, each in zip(rest[name], other_rows):
            row.view(_SHORT).copy_(each[name].cpu())  # not every device has float8
    return first, rest


def with_drift(last: WarmStart, v: Tensor, space: FlatParameters) -> WarmStart:
    """Return the same with another v₁, its drift since the last one, and u, with which the next measurement begins: as
    far ahead as would have been best this time, but no further than the drift was.

    Args:
        v: the new v₁ (p,).
    """
    drift, unit = empty(space.size, dtype=space.dtype, device=space.device), space.size**-0.5
    last_drift = last.drift * unit  # of an entry of d, which is scaled
    sums = []
    for name, where, at in _places(space):
        u, d = _first_parts(last.first[name], at, space)
        moved = torch.sub(v[where], u, out=drift[where]).add_(d, alpha=last.ahead * last_drift)
        sums.append(torch.stack([torch.dot(moved, moved), torch.dot(moved, d), torch.dot(d, d)]))
    # In one copy: the host waits for a device once.
    square, along, last_square = torch.stack(sums).cpu().double().sum(0).tolist()
    best = along / (last_drift * last_square) if last_drift * last_square > 0 else 0.0
    ahead, size = min(max(best, 0.0), 1.0), square**0.5
    first = {name: torch.empty(3, *p.shape, dtype=torch.uint8, device="cpu") for name, p in space.parameters.items()}
    for name, where, at in _places(space):
        moved = drift[where]
        first[name][:2].view(-1).view(FIRST)[at].copy_(torch.add(v[where], moved, alpha=ahead).cpu())
        moved.mul_(1 / (unit * size) if size > 0 else 0.0)
        first[name][2].view(-1).view(_SHORT)[at].copy_(moved.cpu())
    give_back(drift)
    return last._replace(first=first, drift=size, ahead=ahead)


def _first_parts(part: Tensor, at: slice, space: FlatParameters) -> tuple[Tensor, Tensor]:
    """Entries of u and, scaled, of d."""
    u = part[:2].view(-1).view(FIRST)[at].to(space.dtype)
    return u.to(space.device), _decoded(part[2].view(-1)[at], space.dtype).to(space.device)


def first_vector(first: Mapping[str, Tensor], space: FlatParameters) -> Tensor | None:
    """Return u, or v₁, without the parameters that have been frozen since; None if nothing is left of it."""
    long = {name: first[name][:2].reshape(-1).view(FIRST) for name in _fitting(first, space, 3)}
    short = {name: part.view(_SHORT) for name, part in first.items() if name not in long}
    return _joined({**short, **long}, space)


class OtherVectors:
    """v₂ and s, orthonormal, which are read from their bytes a few at a time: they take no memory to speak of.

    Args:
        rows: v₂ and s in terms of the vectors that are kept, if that is known.
    """

    def __init__(self, others: Mapping[str, Tensor], space: FlatParameters, rows: list[list[float]] | None) -> None:
        self._vectors, self._space = others, space
        self._fitting = set(_fitting(others, space, 2))
        known = [[1.0, 0.0], [0.0, 1.0]] if rows is None else rows
        self._rows = torch.tensor(known, dtype=torch.float64, device="cpu")
        self.missing = rows is None and not self._orthonormalize()

    def _orthonormalize(self) -> bool:
        gram = self._added(parts @ parts.t() for _, parts in self._pieces())
        size = float(gram[0, 0]) ** 0.5
        across = float(gram[1, 1]) - float(gram[0, 1]) ** 2 / size**2 if size > 0 else 0.0
        if not (0 < size < math.inf and 0 < across < math.inf):
            return False
        self._rows[0] /= size
        self._rows[1] = (self._rows[1] - self._rows[0] * float(gram[0, 1]) / size) / across**0.5
        return True

    @property
    def rows(self) -> list[list[float]]:
        return self._rows.tolist()

    @classmethod
    def read(
        cls, others: Mapping[str, Tensor], space: FlatParameters, rows: list[list[float]] | None = None
    ) -> "OtherVectors | None":
        """None if one of them is missing."""
        found = cls(others, space, rows) if _fitting(others, space, 2) else None
        return None if found is None or found.missing else found

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
                parts = _decoded(self._vectors[name].view(2, -1)[:, at], self._space.dtype)
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
    if 0 < float(norms(flat)) < math.inf:
        return flat
    give_back(flat)
    return None


def _fitting(vectors: Mapping[str, Tensor], space: FlatParameters, bytes: int) -> list[str]:
    """The parameters of which so many bytes are known."""
    return [
        name for name, p in space.parameters.items() if name in vectors and vectors[name].shape == (bytes, *p.shape)
    ]


def fits(last: WarmStart, space: FlatParameters) -> bool:
    """Whether the parameters are those of the vectors."""
    kept = ((last.first, 3), (last.others, 2))
    return all(len(_fitting(each, space, bytes)) == len(each) == len(space.parameters) for each, bytes in kept)
