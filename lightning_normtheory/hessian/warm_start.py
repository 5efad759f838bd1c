"""Follow λ_max of the loss's Hessian from one measurement to the next."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.hessian.eigenvalues import (
    COLD_PRODUCTS,
    Eigenpair,
    Method,
    basis_for,
    is_asymmetric,
    judged,
    leading_eigenpairs,
    mixed_start,
)
from lightning_normtheory.hessian.operator import LossHessian
from lightning_normtheory.linalg.eigensolvers import AT_LEAST_LANCZOS, Pair, lanczos
from lightning_normtheory.linalg.inner_products import dot
from lightning_normtheory.linalg.noise import Noise
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.measuring.workspace import empty, give_back
from lightning_normtheory.model.parameters import FlatParameters

__all__ = ["WarmStart", "follow_top_eigenvalue"]

# Five bits of exponent, two of mantissa: an error of about 7 % of a vector. In bfloat16 it is 0.2 %, less than a
# residual of 1e-2 allows.
_SHORT, _FIRST = torch.float8_e5m2, torch.bfloat16
# After so many measurements without, and after a change of the Hessian, Lanczos takes as many products as in a cold
# start; where the change may be another leading eigenvector, two more.
_PERIOD, _NEAR_PRODUCTS = 16, COLD_PRODUCTS + 2
_LONGEST_PAUSE = 8
# A residual of the last vector, relative to λ, above which the Hessian is another one.
_TURNED = 0.15
# The weight of noise in the test vector y, relative to that of each of the two vectors.
_NOISE = 2.0
# ‖ΔH y‖ relative to the change of v₁ up to which it is no sign of another eigenvector, and relative to what it was in
# the last measurement. On the constructed spectra of the tests the former is a third, on most networks less.
_USUAL, _MARGIN = 0.5, 1.5
# The numbers that stand for the image of y: enough for the length of a difference to 10 %.
_BUCKETS = 256
# The weights of v₂, of s and of H y, without its part along them, in the start of a long iteration.
_OTHERS = 0.3
# Entries of the vectors that are read at once: on the CPU those that fit into its cache, on other devices more.
_CACHED, _PIECE = 2**18, 2**22
_OTHER_SEED = 2**32
_TINY = torch.finfo(torch.float64).tiny
# With fewer products there is none to spare.
_LEAST_BUDGET = 20


class Check(NamedTuple):
    """How the Hessian acted on the test vector y (see `follow_top_eigenvalue`).

    Attributes:
        value: λ_max of the last measurement.
        gaps: (λ_max − ρ_i)/|λ_max| at the last long iteration, for each of the other vectors.
        image: a random projection of H y in the last measurement, without its part along the other vectors.
        usual: ‖ΔH y‖ relative to the change of v₁, where it was no sign of another leading eigenvector.
        scale: a lower bound of ‖H‖ at the last long iteration, less if λ_max has become smaller since.
        age: the number of measurements since the last long iteration.
    """

    value: float
    gaps: list[float]
    image: Tensor
    usual: float
    scale: float
    age: int


class WarmStart(NamedTuple):
    """What a measurement leaves to the next: four bytes per parameter, or one without a test.

    The next measurement of an uninterrupted run begins with the same rounded vectors as that of a resumed one.

    Attributes:
        vectors: by parameter name the bytes of v₁ in bfloat16, v₂ and s in float8 (4, *shape); or those of v₁ alone in
            float8, in the shape of the parameter, as older versions kept them.
        check: the numbers to compare with; None: the next measurement makes no test.
        seed: that of the noise, another one after each long iteration.
        pause: the number of measurements before the next test: where the Hessian changes much, a test is in vain.
        pauses: the length of the last pause.
    """

    vectors: Mapping[str, Tensor] = MappingProxyType({})
    check: Check | None = None
    seed: int = 0
    pause: int = 0
    pauses: int = 0

    def state_dict(self) -> dict[str, Any]:
        check = None if self.check is None else self.check._asdict()
        numbers = {"seed": self.seed, "pause": self.pause, "pauses": self.pauses}
        return {"vector": dict(self.vectors), "check": check, **numbers}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "WarmStart":
        check = state.get("check")
        numbers = {name: state.get(name, 0) for name in ("seed", "pause", "pauses")}
        return cls(dict(state.get("vector", {})), None if check is None else Check(**check), **numbers)

    def longer_pause(self) -> "WarmStart":
        """Pause twice as long as the last time."""
        length = min(max(1, 2 * self.pauses), _LONGEST_PAUSE)
        return self._replace(pause=length, pauses=length)


def follow_top_eigenvalue(
    hessian: LossHessian, last: WarmStart, *, method: Method, tol: float, max_hvps: int
) -> tuple[Eigenpair, WarmStart]:
    """Compute λ_max from what the last measurement left: by Lanczos in two products, where the Hessian changes little.

    The first product is with v₁, the last vector, the second with a test vector y = v₂ + s + 2z, normalized: v₂ is the
    second Ritz vector, s a mix of the third with the gradient, z noise. All three stay the same until the next long
    iteration, so that H y can be compared with the last measurement, in which the Hessian was H − ΔH. The residual of
    v₁, or a few more products in the Krylov space of v₁ alone, decide on convergence, if nothing speaks for another
    leading eigenvector:

    * (λ − ρ_i)/|λ| is at least half of what it was after the last long iteration, for ρ_i = v_iᵀHy/v_iᵀy, the Rayleigh
      quotient of v₂ and of s if both are nearly eigenvectors: none of them approaches λ;
    * ‖ΔH y‖ ≤ c max(‖Hv₁ − λv₁‖, |Δλ|), but for the parts along v₂ and s, where c is ½, or 1.5 times the ratio of the
      last measurement: the Hessian has not got a direction of large curvature that is none of v₁, v₂, s. H y is kept as
      a random projection to 256 numbers;
    * the last long iteration is less than 16 measurements ago, and the parameters are the same.

    Else Lanczos starts from all vectors, the gradient, new noise and what is new in H y, and iterates for long, at
    least as in a cold start. If the residual of v₁ is above 0.15 λ, it starts so without the test, and stops as soon as
    from one vector. Where that, or a test that found no other eigenvector, shows that the Hessian changes much between
    measurements, the next one, two, four, at last eight go without a test, from one vector; the one after them takes at
    least eight products and prepares the next test.

    None of this is a proof. What is missed until the next long iteration: a new leading eigenvector along which neither
    y nor the change of v₁ has a component, and in a crowded spectrum, where v₂ is a mix of many eigenvectors, one of
    these that overtakes the first.

    Args:
        last: what the last measurement returned; ``WarmStart()`` for a cold start.
        method: ``"power"`` iteration starts as `hessian_top_eigenvalue` does, without a test.
        tol: the relative residual at which to stop.
        max_hvps: the largest number of products. If it is less than 20, there is no test.

    Returns:
        The pair, and what to pass to the next measurement.
    """
    space = hessian.space
    if method != "lanczos" or max_hvps < _LEAST_BUDGET:
        # In a list, out of which it is taken, so that nobody else keeps it.
        known = [first for first in (_first(last.vectors, space),) if first is not None]
        options: dict[str, Any] = {"method": method, "which": "algebraic", "tol": tol, "max_hvps": max_hvps}
        (found,) = leading_eigenpairs(hessian, 1, start=known.pop if known else None, **options)
        return found, WarmStart({name: _bytes(part, space.size) for name, part in found.vector.items()})
    pair, left = _Measurement(hessian, last, tol, max_hvps).run()
    return judged(hessian, [pair])[0], left


class _Seen(NamedTuple):
    """The ρ_i, the projection of H y without its part along the other vectors, and that part of H y itself."""

    curvatures: list[float]
    image: Tensor
    rest: Tensor


class _Plan(NamedTuple):
    """How to go on after the test.

    Attributes:
        vectors: for a short iteration v₁ and H v₁, else the start. They are taken out of the list when they are used,
            so that nobody else keeps them.
        check: for a short iteration, what to compare the next test with.
        at_least: the least number of products of a long one.
        test: whether to prepare the next test after it.
        in_vain: whether the test was in vain if the leading eigenvector turns out to be the same.
    """

    vectors: list[Tensor]
    check: Check | None
    at_least: int = COLD_PRODUCTS
    test: bool = True
    in_vain: bool = False


class _Measurement:
    """The arguments are those of `follow_top_eigenvalue`."""

    def __init__(self, hessian: LossHessian, last: WarmStart, tol: float, max_hvps: int) -> None:
        self._hessian, self._last = hessian, last
        self._max_hvps, self._used = max_hvps, 0
        # ‖ΔH y‖ relative to the change of v₁, and the Rayleigh quotient of v₁ with its residual, if there was a test.
        self._usual, self._before = 0.0, (math.nan, math.nan)
        basis = min(basis_for(tol), hessian.vectors)
        self._lanczos = partial(lanczos, which="algebraic", tol=tol, basis=basis)

    def run(self) -> tuple[Pair, WarmStart]:
        plan = self._plan()
        return self._long(plan) if plan.check is None else self._short(plan.vectors, plan.check)

    def _plan(self) -> _Plan:
        hessian, last = self._hessian, self._last
        first = _first(last.vectors, hessian.space)
        if first is None:
            return _Plan([mixed_start(hessian.gradient, None, last.seed)], None)
        check = last.check if _fits(last.vectors, hessian.space) else None
        if last.pause > 0:
            return _Plan([mixed_start(hessian.gradient, first, last.seed)], None, AT_LEAST_LANCZOS, test=False)
        if check is None:
            return _Plan([self._start(first, None)], None, _NEAR_PRODUCTS)
        first.div_(first.norm())
        image = self._product(first)
        value = dot(first, image)
        residual = float(torch.add(image, first, alpha=-value).norm())
        if residual > _TURNED * abs(value):
            step = 1 / (2 * abs(value) + residual)
            first.mul_(1 - step * value).add_(image, alpha=step)
            return _Plan([self._start(first, None)], None, AT_LEAST_LANCZOS, test=False, in_vain=True)
        seen = self._look(last)
        assert seen is not None  # of the vectors that the check is about
        near = any(value - curvature < gap * abs(value) / 2 for curvature, gap in zip(seen.curvatures, check.gaps))
        moved = max(residual, abs(value - check.value))
        change = float((seen.image - check.image).norm())
        changed = near or change > max(_USUAL, _MARGIN * check.usual) * moved
        self._usual = change / moved if moved > 0 else 0.0
        if changed or check.age + 1 >= _PERIOD:
            self._before = value, residual
            at_least = _NEAR_PRODUCTS if near else COLD_PRODUCTS
            return _Plan([self._start(first, seen.rest)], None, at_least, in_vain=changed and not near)
        give_back(seen.rest)
        scale = check.scale * min(1.0, abs(value) / max(abs(check.value), _TINY))  # H may have become smaller
        left = check._replace(image=seen.image, usual=self._usual, scale=scale, age=check.age + 1)
        return _Plan([image, first], left)

    def _product(self, vector: Tensor) -> Tensor:
        self._used += 1
        tick("product")
        return self._hessian @ vector

    def _short(self, vectors: list[Tensor], check: Check) -> tuple[Pair, WarmStart]:
        """Continue in the Krylov space of v₁."""
        self._hessian.forget_gradient()
        pair = self._lanczos(
            lambda v: vectors.pop() if vectors else self._hessian.unchecked(v),
            vectors.pop,
            max_products=self._max_hvps - self._used + 1,  # the first one is known
            at_least=1,
            starts=1,
            scale=check.scale,
        )
        left = self._last._replace(vectors=self._packed(pair, None), check=check._replace(value=pair.value), pauses=0)
        return pair._replace(products=self._used + pair.products - 1, starts=None), left

    def _long(self, plan: _Plan) -> tuple[Pair, WarmStart]:
        """Iterate from a mixed start, and prepare the next test."""
        gradient = self._hessian.gradient.to(_FIRST)
        self._hessian.forget_gradient()
        pair = self._lanczos(
            self._hessian.unchecked,
            plan.vectors.pop,
            max_products=self._max_hvps - self._used,
            at_least=plan.at_least,
            starts=3,
        )
        self._used += pair.products
        last = self._last
        left = WarmStart(self._packed(pair, gradient), None, last.seed + 1, max(last.pause - 1, 0), last.pauses)
        pair = pair._replace(starts=None)
        value, residual = self._before
        same = not abs(pair.value - value) > residual  # the same eigenvalue, or unknown
        if plan.in_vain and same:
            return pair._replace(products=self._used), left.longer_pause()
        # An asymmetry shows in a long iteration only, so none but these may follow. The test takes a product.
        testable = plan.test and pair.converged and not is_asymmetric(pair) and self._used < self._max_hvps
        seen = self._look(left) if testable else None
        if seen is not None:
            gaps = [(pair.value - curvature) / max(abs(pair.value), _TINY) for curvature in seen.curvatures]
            usual = self._usual if same else 0.0
            left = left._replace(check=Check(pair.value, gaps, seen.image, usual, pair.scale, 0))
        return pair._replace(products=self._used), left

    def _start(self, first: Tensor, rest: Tensor | None) -> Tensor:
        """Mix all that is known, and noise."""
        mixed = mixed_start(self._hessian.gradient, first, self._last.seed)
        others = _Others.read(self._last.vectors, self._hessian.space)
        if others is not None:
            others.add_to(mixed, (_OTHERS, _OTHERS))
        if rest is not None:
            mixed.add_(rest, alpha=_OTHERS / max(float(rest.norm()), torch.finfo(rest.dtype).tiny))
        return mixed

    def _look(self, start: WarmStart) -> _Seen | None:
        """Multiply H with the test vector; None if there is none."""
        space = self._hessian.space
        others = _Others.read(start.vectors, space)
        if others is None:
            return None
        # On other random numbers than those of y, the projection of H y is independent of it.
        noise, signs = (
            Noise(space.size, seed, device=space.device, dtype=space.dtype)
            for seed in (start.seed, start.seed + _OTHER_SEED)
        )
        y = empty(space.size, dtype=space.dtype, device=space.device).zero_()
        others.add_to(y, (1.0, 1.0))
        noise.add_to(y, _NOISE / noise.norm)
        y.div_(y.norm())
        along = others.dots(y)
        rest = self._product(y)
        give_back(y)
        del y
        parts = others.dots(rest)
        others.add_to(rest, [-part for part in parts])
        return _Seen([part / each for part, each in zip(parts, along)], _projected(rest, signs), rest)

    def _packed(self, pair: Pair, gradient: Tensor | None) -> dict[str, Tensor]:
        """Return the bytes of all vectors; without a gradient, v₂ and s stay what they are."""
        space, starts = self._hessian.space, pair.starts
        assert starts is not None
        starts.div_(starts.norm(dim=1, keepdim=True))
        packed = {name: _two_bytes(part) for name, part in space.unflatten(starts[0]).items()}
        if gradient is None:
            return {name: torch.cat([part, self._last.vectors[name][2:]]) for name, part in packed.items()}
        if len(starts) < 3:  # the basis has fewer
            return {name: torch.cat([part, torch.zeros_like(part)]) for name, part in packed.items()}
        rest = gradient.to(starts)
        rest.sub_((starts @ rest) @ starts)
        size = float(rest.norm())
        starts[2].add_(rest, alpha=1 / size if size > 0 else 0.0)
        starts[2].div_(starts[2].norm())
        rows = [space.unflatten(row) for row in starts[1:]]
        others = {name: [_bytes(row[name], space.size)[None] for row in rows] for name in packed}
        return {name: torch.cat([part, *others[name]]) for name, part in packed.items()}


def _projected(values: Tensor, signs: Noise) -> Tensor:
    """Add up neighbors to a few numbers; with random signs the length stays the same on average."""
    size = len(values)
    width = math.ceil(size / _BUCKETS)
    padded = empty(width * _BUCKETS, dtype=values.dtype, device=values.device)
    padded[size:] = 0.0
    signs.times(values, padded[:size])
    found = padded.view(_BUCKETS, width).sum(1).cpu().float()
    give_back(padded)
    return found


def _bytes(part: Tensor, size: int) -> Tensor:
    # Scaled to entries of order one: those of a unit vector with millions of entries are too small for eight bits.
    # As bytes, which every version of torch can save and load.
    return (part * size**0.5).cpu().to(_SHORT).view(torch.uint8)


def _two_bytes(part: Tensor) -> Tensor:
    """Return the bytes of bfloat16 (2, *shape)."""
    return part.cpu().to(_FIRST).reshape(-1).view(torch.uint8).view(2, *part.shape)


def _first(vectors: Mapping[str, Tensor], space: FlatParameters) -> Tensor | None:
    """Return v₁ without the parameters that have been frozen since; None if nothing is left of it."""
    four = {name: vectors[name][:2].reshape(-1).view(_FIRST) for name in _fitting(vectors, space)}
    one = {name: part.view(_SHORT) for name, part in vectors.items() if name not in four}
    return _joined({**one, **four}, space)


class _Others:
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
    def read(cls, vectors: Mapping[str, Tensor], space: FlatParameters) -> "_Others | None":
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
        begin, piece = 0, _CACHED if self._space.device.type == "cpu" else _PIECE
        for name, p in self._space.parameters.items():
            if name in self._fitting:
                rows = self._vectors[name][2:].reshape(2, -1)
                for at in range(0, p.numel(), piece):  # on the CPU: not every device has float8
                    parts = rows[:, at : at + piece].view(_SHORT).to(self._space.dtype).to(self._space.device)
                    yield slice(begin + at, begin + at + parts.shape[1]), parts
            begin += p.numel()


def _joined(parts: Mapping[str, Tensor], space: FlatParameters) -> Tensor | None:
    fitting = {name: p for name, p in space.parameters.items() if name in parts and parts[name].numel() == p.numel()}
    flat = space.join({p: parts[name].to(space.dtype) for name, p in fitting.items()})
    return flat if 0 < float(flat.norm()) < math.inf else None


def _fitting(vectors: Mapping[str, Tensor], space: FlatParameters) -> list[str]:
    """The parameters of which all vectors are known."""
    return [name for name, p in space.parameters.items() if name in vectors and vectors[name].shape == (4, *p.shape)]


def _fits(vectors: Mapping[str, Tensor], space: FlatParameters) -> bool:
    """Whether the parameters are those of the vectors."""
    return len(_fitting(vectors, space)) == len(vectors) == len(space.parameters)
