"""Follow λ_max of the loss's Hessian from one measurement to the next."""

import math
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
from lightning_normtheory.hessian.warm_start import (
    FIRST,
    Check,
    OtherVectors,
    WarmStart,
    first_vector,
    fits,
    one_byte,
    packed,
    with_first,
)
from lightning_normtheory.linalg.eigensolvers import AT_LEAST_LANCZOS, Pair, is_small, lanczos
from lightning_normtheory.linalg.inner_products import norms
from lightning_normtheory.linalg.noise import Noise
from lightning_normtheory.linalg.ritz import RitzBasis
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.measuring.workspace import empty, give_back

__all__ = ["follow_top_eigenvalue"]

# After so many measurements, Lanczos begins anew, with more products than in a cold start: it has more to find.
_PERIOD, _LONG_PRODUCTS = 16, COLD_PRODUCTS + 2
# The most and the fewest vectors of the basis, each with its image. When it is full, the two leading Ritz vectors stay.
_BASIS, _LEAST_BASIS = 6, 4
# A residual of the last vector, relative to λ, above which the Hessian is another one.
_TURNED = 0.15
# After a sign of another leading eigenvector, the products beyond those with v₁ and y; and when the second Ritz pair is
# known well enough: its residual, relative to the distance of the two values, or to the first.
_LEAST_SEARCH, _SEARCH = 3, 6
_CLEAR, _PRECISE = 0.5, 0.05
# The weight of noise in the test vector y, relative to that of each of the two vectors.
_NOISE = 2.0
# ‖ΔH y‖ relative to the change of v₁ up to which it is no sign of another eigenvector, and relative to what it was in
# the last measurement. On the constructed spectra of the tests the former is a third, on most networks less.
_USUAL, _MARGIN = 0.5, 1.5
# The numbers that stand for the image of y: enough for the length of a difference to 10 %.
_BUCKETS = 256
# The weights of v₂ and s in the start of a long iteration.
_OTHERS = 0.3
_OTHER_SEED = 2**32
_TINY = torch.finfo(torch.float64).tiny
# With fewer products there is none to spare.
_LEAST_BUDGET = 20


def follow_top_eigenvalue(
    hessian: LossHessian, last: WarmStart, *, method: Method, tol: float, max_hvps: int
) -> tuple[Eigenpair, WarmStart]:
    """Compute λ_max from what the last measurement left: in two products, where the Hessian changes little.

    The first product is with v₁, the last vector, the second with a test vector y = v₂ + s + 2z, normalized: v₂ is the
    second Ritz vector, s a mix of the third with the gradient, z noise. y stays the same until another eigenvector
    comes near or leads, so that H y can be compared with the last measurement, in which the Hessian was H − ΔH. The
    leading Ritz pair of span{v₁, y}, to which its residuals are added until it has converged, is the result, unless
    something speaks for another leading eigenvector:

    * (λ − ρ_i)/|λ| is less than half of what it was when y was chosen, for ρ_i = v_iᵀHy/v_iᵀy, the Rayleigh quotient of
      v₂ and of s if both are nearly eigenvectors: one of them approaches λ;
    * ‖ΔH y‖ > c max(‖Hv₁ − λv₁‖, |Δλ|), but for the parts along v₂ and s, where c is ½, or 1.5 times the ratio of the
      last measurement: the Hessian may have got a direction of large curvature that is none of v₁, v₂, s. Of H y, a
      random projection to 256 numbers is kept.

    Then three to six products follow before the result is taken, with what is new in H y and what H makes of that, or
    with residuals of the second Ritz pair. If v₂ or s came near, or the leading eigenvalue is another one, a further
    product prepares the next test with other vectors. If the residual of v₁ is above 0.15 λ, the Hessian is another
    one: there is no test, and gradient and noise are added to the residual of v₁. Every 16th measurement is a long one,
    by Lanczos from a mix of all vectors, the gradient and new noise.

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
        known = [first for first in (first_vector(last.vectors, space),) if first is not None]
        options: dict[str, Any] = {"method": method, "which": "algebraic", "tol": tol, "max_hvps": max_hvps}
        (found,) = leading_eigenpairs(hessian, 1, start=known.pop if known else None, **options)
        return found, WarmStart({name: one_byte(part, space.size) for name, part in found.vector.items()})
    pair, left = _Measurement(hessian, last, tol, max_hvps).run()
    return judged(hessian, [pair])[0], left


class _Seen(NamedTuple):
    """How H acts on y.

    Attributes:
        curvatures: the ρ_i.
        projection: of H y without its part along the other vectors.
        y, image: y and H y.
        rest: that part of H y.
    """

    curvatures: list[float]
    projection: Tensor
    y: Tensor
    image: Tensor
    rest: Tensor


class _Measurement:
    """The arguments are those of `follow_top_eigenvalue`."""

    def __init__(self, hessian: LossHessian, last: WarmStart, tol: float, max_hvps: int) -> None:
        self._hessian, self._last = hessian, last
        self._tol, self._max_hvps, self._used = tol, max_hvps, 0
        self._size = min(_BASIS, hessian.vectors // 2)
        # Other noise than that of y, and than in earlier measurements with it.
        age = 0 if last.check is None else last.check.age
        self._noise = last.seed + (age + 2) * _OTHER_SEED

    def run(self) -> tuple[Pair, WarmStart]:
        hessian, last = self._hessian, self._last
        first = first_vector(last.vectors, hessian.space)
        if first is None:
            return self._long([mixed_start(hessian.gradient, None, self._noise)], COLD_PRODUCTS)
        follows = last.check is not None and last.check.age + 1 < _PERIOD and fits(last.vectors, hessian.space)
        if last.check is not None and follows and self._size >= _LEAST_BASIS:
            basis = RitzBasis()
            basis.add(first.div_(norms(first)), self._product(first))
            del first
            return self._short(basis, last.check)
        starts = [self._mixed(first)]
        del first
        return self._long(starts, _LONG_PRODUCTS)

    def _product(self, vector: Tensor) -> Tensor:
        self._used += 1
        tick("product")
        return self._hessian @ vector

    # -- Rayleigh–Ritz in the span of v₁, y and residuals -------------------------------------------------------------

    def _short(self, basis: RitzBasis, check: Check) -> tuple[Pair, WarmStart]:
        """Continue from v₁, the only vector so far."""
        (value,), _ = basis.pairs()
        residual = math.sqrt(max(basis.scale**2 - value**2, 0.0))
        # H may have become smaller.
        basis.scale = max(basis.scale, check.scale * min(1.0, abs(value) / max(abs(check.value), _TINY)))
        if residual > _TURNED * abs(value):
            self._add_around(basis)
            self._converge(basis, AT_LEAST_LANCZOS)
            return self._kept(basis, check._replace(image=None))
        seen = self._look(self._last)
        assert seen is not None  # of the vectors that the check is about
        basis.add_with_image(seen.y, seen.image)
        near = any(value - curvature < gap * abs(value) / 2 for curvature, gap in zip(seen.curvatures, check.gaps))
        changed, usual = True, check.usual
        if check.image is not None:
            moved = max(residual, abs(value - check.value))
            change = float((seen.projection - check.image).norm())
            changed = change > max(_USUAL, _MARGIN * usual) * moved
            usual = change / moved if moved > 0 else 0.0
        check, new = check._replace(image=seen.projection, usual=usual), [seen.rest]
        del seen  # from here on, only the basis keeps vectors
        if near or changed:
            self._search(basis, new, near=near)
        give_back(*new)
        new.clear()
        self._converge(basis)
        values, _ = basis.pairs()
        if near or abs(values[0] - value) > residual:
            return self._renewed(basis, check.age + 1)
        return self._kept(basis, check)

    def _add_around(self, basis: RitzBasis) -> None:
        """Add the residual of v₁ with some of the gradient and noise, as in a mixed start."""
        values, coefficients = basis.pairs()
        rest = basis.residual(values[0], coefficients[:, 0])
        rest.mul_(1 / max(float(norms(rest)), _TINY))
        mixed = mixed_start(self._hessian.gradient, rest, self._noise)
        give_back(rest)
        self._expand(basis, mixed)

    def _search(self, basis: RitzBasis, new: list[Tensor], *, near: bool) -> None:
        """Look for another leading eigenvector: in the Krylov space of what is new in H y, or, if the second one comes
        near, by residuals of the second pair; until that is known well enough.

        What is new is taken out of the list.
        """
        for products in range(1, _SEARCH + 1):
            if not self._expand(basis, new.pop()):
                return
            values, coefficients = basis.pairs()
            rest = basis.residual(values[1], coefficients[:, 1])
            known = float(norms(rest)) < max(_CLEAR * (values[0] - values[1]), _PRECISE * abs(values[0]))
            if products == _SEARCH or (known and products >= _LEAST_SEARCH):
                give_back(rest)
                return
            new.append(rest if near else basis.last_image())
            if not near:
                give_back(rest)
            del rest  # before the next product

    def _converge(self, basis: RitzBasis, at_least: int = 0) -> None:
        """Add residuals of the leading pair until it is small enough, after a number of products at least."""
        while True:
            values, coefficients = basis.pairs()
            rest = basis.residual(values[0], coefficients[:, 0])
            self._residual = float(norms(rest))
            self._small = is_small(self._residual, values[0], basis.scale, self._tol, rest)
            if self._small and self._used >= at_least:
                give_back(rest)
                return
            if not self._expand(basis, rest):
                return

    def _expand(self, basis: RitzBasis, vector: Tensor) -> bool:
        """Add a vector, whose memory is the basis' from now on; return whether that was possible."""
        if len(basis) == self._size:
            basis.restart(2)
        if self._used == self._max_hvps or not basis.normalize(vector):
            give_back(vector)
            return False
        basis.add(vector, self._product(vector))
        return True

    def _kept(self, basis: RitzBasis, check: Check) -> tuple[Pair, WarmStart]:
        """Keep y, and what it is compared with."""
        pair, starts = self._finished(basis, 1)
        vectors = with_first(self._last.vectors, starts[0], self._hessian.space)
        give_back(starts)
        check = check._replace(value=pair.value, scale=pair.scale, age=check.age + 1)
        return pair, self._last._replace(vectors=vectors, check=check)

    def _renewed(self, basis: RitzBasis, age: int) -> tuple[Pair, WarmStart]:
        """Prepare the next test with other vectors."""
        pair, starts = self._finished(basis, 3)
        vectors = self._packed(starts, self._hessian.gradient)
        del starts
        return self._prepared(pair, vectors, age)

    def _finished(self, basis: RitzBasis, count: int) -> tuple[Pair, Tensor]:
        """Return the leading pair, and unit vectors (count, p) near to the leading ones to begin the next test with."""
        values, coefficients = basis.pairs()
        vector = basis.vector(coefficients[:, 0])
        vector.div_(norms(vector))
        starts = basis.steps(values[:count], coefficients[:, :count])
        starts.div_(norms(starts)[:, None])
        pair = Pair(values[0], vector, self._residual, self._small, self._used, basis.asymmetry, basis.scale)
        basis.release()
        return pair, starts

    # -- Lanczos ------------------------------------------------------------------------------------------------------

    def _long(self, starts: list[Tensor], at_least: int) -> tuple[Pair, WarmStart]:
        """Iterate from a mixed start, and prepare the next test.

        The start is taken out of the list, so that nobody else keeps it.
        """
        hessian = self._hessian
        gradient = hessian.gradient.to(FIRST)
        hessian.forget_gradient()
        pair = lanczos(
            hessian.unchecked,
            starts.pop,
            which="algebraic",
            tol=self._tol,
            basis=min(basis_for(self._tol), hessian.vectors),
            max_products=self._max_hvps,
            at_least=at_least,
            starts=3,
        )
        self._used += pair.products
        assert pair.starts is not None
        pair.starts.div_(norms(pair.starts)[:, None])
        vectors = self._packed(pair.starts, gradient)
        pair = pair._replace(starts=None)  # before the next product
        return self._prepared(pair, vectors, 0)

    def _prepared(self, pair: Pair, vectors: dict[str, Tensor], age: int) -> tuple[Pair, WarmStart]:
        left = WarmStart(vectors, None, self._last.seed + 1)
        # An asymmetry shows in a long iteration only, so none but these may follow. The test takes a product.
        testable = pair.converged and not is_asymmetric(pair) and self._used < self._max_hvps
        seen = self._look(left) if testable else None
        if seen is not None:
            give_back(seen.y, seen.image, seen.rest)
            gaps = [(pair.value - curvature) / max(abs(pair.value), _TINY) for curvature in seen.curvatures]
            left = left._replace(check=Check(pair.value, gaps, seen.projection, 0.0, pair.scale, age))
        return pair._replace(products=self._used), left

    def _mixed(self, first: Tensor) -> Tensor:
        """Mix all that is known, and noise. The memory of the vector is given back."""
        mixed = mixed_start(self._hessian.gradient, first, self._noise)
        others = OtherVectors.read(self._last.vectors, self._hessian.space)
        if others is not None:
            others.add_to(mixed, (_OTHERS, _OTHERS))
        give_back(first)
        return mixed

    def _look(self, start: WarmStart) -> _Seen | None:
        """Multiply H with the test vector; None if there is none."""
        space = self._hessian.space
        others = OtherVectors.read(start.vectors, space)
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
        y.div_(norms(y))
        along = others.dots(y)
        image = self._product(y)
        parts = others.dots(image)
        rest = empty(space.size, dtype=space.dtype, device=space.device).copy_(image)
        others.add_to(rest, [-part for part in parts])
        curvatures = [part / each for part, each in zip(parts, along)]
        return _Seen(curvatures, _projected(rest, signs), y, image, rest)

    def _packed(self, starts: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """Return the bytes of v₁, v₂ and s, from unit vectors whose memory is given back."""
        if len(starts) == 3:  # the basis may have fewer
            self._add_rest(starts, gradient)
        found = packed(starts, self._hessian.space)
        give_back(starts)
        return found

    def _add_rest(self, starts: Tensor, gradient: Tensor) -> None:
        """Mix the third vector with what the gradient has across all three, in equal parts."""
        rest = empty(len(gradient), dtype=starts.dtype, device=starts.device).copy_(gradient)
        rest.addmv_(starts.t(), starts @ rest, alpha=-1)
        size = float(norms(rest))
        starts[2].add_(rest, alpha=1 / size if size > 0 else 0.0)
        give_back(rest)


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
