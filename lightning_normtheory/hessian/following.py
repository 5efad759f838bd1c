"""Follow λ_max of the loss's Hessian from one measurement to the next."""

import math
from typing import Any

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
from lightning_normtheory.hessian.second_look import OTHER_SEED, look
from lightning_normtheory.hessian.warm_start import (
    FIRST,
    Check,
    OtherVectors,
    WarmStart,
    first_vector,
    fits,
    one_byte,
    with_drift,
    without_drift,
)
from lightning_normtheory.linalg.eigensolvers import AT_LEAST_LANCZOS, Pair, is_small, lanczos
from lightning_normtheory.linalg.inner_products import norms
from lightning_normtheory.linalg.ritz import RitzBasis
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.measuring.workspace import empty, give_back

__all__ = ["follow_top_eigenvalue"]

# After so many measurements, Lanczos begins anew, with more products than in a cold start: it has more to find.
_PERIOD, _LONG_PRODUCTS = 16, COLD_PRODUCTS + 2
# The most and the fewest vectors of the basis, each with its image. When it is full, the two leading Ritz vectors stay.
_BASIS, _LEAST_BASIS = 6, 4
# A residual of u, relative to λ, above which the Hessian is another one.
_TURNED = 0.15
# After a sign of another leading eigenvector, the products beyond those with u and y; and when the second Ritz pair is
# known well enough: its residual, relative to the distance of the two values, or to the first.
_LEAST_SEARCH, _SEARCH = 3, 6
_CLEAR, _PRECISE = 0.5, 0.05
# ‖ΔH y‖ relative to the change that u shows, up to which it is no sign of another eigenvector: in general, relative to
# what it was in the last measurement, and at most. It is a third on the constructed spectra of the tests, up to 0.8 on
# networks that change little.
_USUAL, _MARGIN, _MOST = 0.5, 1.5, 0.9
# The distance from the first to the second Ritz value after a search, relative to that before, below which what was
# found is worth another test vector.
_CLOSER = 0.9
# The weights of v₂ and s in the start of a long iteration.
_OTHERS = 0.3
_TINY = torch.finfo(torch.float64).tiny
# With fewer products there is none to spare.
_LEAST_BUDGET = 20


def follow_top_eigenvalue(
    hessian: LossHessian, last: WarmStart, *, method: Method, tol: float, max_hvps: int
) -> tuple[Eigenpair, WarmStart]:
    """Compute λ_max from what the last measurement left: in two products, where the Hessian changes little.

    The first product is with u = v₁ + a d, where v₁ is the last vector, d the change that brought it there, and a
    between 0 and 1 what would have been best the last time: a vector that turns steadily is met where it will be. The
    second is with a test vector y = v₂ + s + 2z, normalized: v₂ is the second Ritz vector, s a mix of the third with
    the gradient, z noise. y stays the same until another eigenvector comes near or leads, so that H y can be compared
    with the last measurement, in which the Hessian was H − ΔH. The leading Ritz pair of span{u, y}, to which its
    residuals are added until it has converged, is the result, unless something speaks for another leading eigenvector:

    * (λ − ρ_i)/|λ| is less than half of what it was when y was chosen, for ρ_i = v_iᵀHy/v_iᵀy, the Rayleigh quotient of
      v₂ and of s if both are nearly eigenvectors: one of them approaches λ;
    * ‖ΔH y‖ > c max(‖Hu − λu‖, |Δλ|, a‖d‖|λ|), but for the parts along v₂ and s, where c is ½, or 1.5 times the ratio
      of the last measurement, but no more than 0.9: the Hessian may have got a direction of large curvature that is
      none of v₁, v₂, s. Of H y, a random projection to 256 numbers is kept.

    Then three to six products follow before the result is taken, with what is new in H y and what H makes of that, or
    with residuals of the second Ritz pair. If v₂ or s came near, if what was found is nearer to the first than v₂ was,
    or if the leading eigenvalue is another one, a further product prepares the next test with other vectors. If the
    residual of u is above 0.15 λ, the Hessian is another one: there is no test, and gradient and noise are added to the
    residual of u. Every 16th measurement is a long one, by Lanczos from a mix of all vectors, the gradient and new
    noise.

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
        known = [first for first in (first_vector(last.first, space),) if first is not None]
        options: dict[str, Any] = {"method": method, "which": "algebraic", "tol": tol, "max_hvps": max_hvps}
        (found,) = leading_eigenpairs(hessian, 1, start=known.pop if known else None, **options)
        return found, WarmStart({name: one_byte(part, space.size) for name, part in found.vector.items()})
    pair, left = _Measurement(hessian, last, tol, max_hvps).run()
    return judged(hessian, [pair])[0], left


class _Measurement:
    """The arguments are those of `follow_top_eigenvalue`."""

    def __init__(self, hessian: LossHessian, last: WarmStart, tol: float, max_hvps: int) -> None:
        self._hessian, self._last = hessian, last
        self._tol, self._max_hvps, self._used = tol, max_hvps, 0
        self._size = min(_BASIS, hessian.vectors // 2)
        # Other noise than that of y, and than in earlier measurements with it.
        age = 0 if last.check is None else last.check.age
        self._noise = last.seed + (age + 2) * OTHER_SEED

    def run(self) -> tuple[Pair, WarmStart]:
        hessian, last = self._hessian, self._last
        first = first_vector(last.first, hessian.space)
        if first is None:
            return self._long([mixed_start(hessian.gradient, None, self._noise)], COLD_PRODUCTS)
        follows = last.check is not None and last.check.age + 1 < _PERIOD and fits(last, hessian.space)
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

    # -- Rayleigh–Ritz in the span of u, y and residuals --------------------------------------------------------------

    def _short(self, basis: RitzBasis, check: Check) -> tuple[Pair, WarmStart]:
        """Continue from u, the only vector so far."""
        (value,), _ = basis.pairs()
        residual = math.sqrt(max(basis.scale**2 - value**2, 0.0))
        # H may have become smaller.
        basis.scale = max(basis.scale, check.scale * min(1.0, abs(value) / max(abs(check.value), _TINY)))
        if residual > _TURNED * abs(value):
            self._add_around(basis)
            return self._kept(basis, check._replace(image=None), self._converge(basis, AT_LEAST_LANCZOS))
        seen = look(self._hessian.space, self._last, self._product, check)
        assert seen is not None  # of the vectors that the check is about
        near = any(value - curvature < gap * abs(value) / 2 for curvature, gap in zip(seen.curvatures, check.gaps))
        changed, usual = True, check.usual
        if check.image is not None:
            ahead = self._last.ahead * self._last.drift * abs(value)
            moved = max(residual, abs(value - check.value), ahead)
            change = float((seen.projection - check.image).norm())
            changed = change > max(_USUAL, min(_MARGIN * usual, _MOST)) * moved
            usual = change / moved if moved > 0 else 0.0
        check, new = check._replace(image=seen.projection, usual=usual, **seen.known), list[Tensor]()
        if near or changed:
            new.append(seen.rest())
        basis.add_with_image(seen.y, seen.image)
        del seen  # from here on, only the basis keeps vectors
        searched = bool(new)
        if searched:
            self._search(basis, new, near=near)
        rest = self._converge(basis)
        values, _ = basis.pairs()
        # y may know little of what was found.
        near |= searched and values[0] - values[1] < _CLOSER * min(check.gaps) * abs(values[0])
        if near or abs(values[0] - value) > residual:
            if rest is not None:
                give_back(rest)
            return self._renewed(basis, check.age + 1)
        return self._kept(basis, check, rest)

    def _add_around(self, basis: RitzBasis) -> None:
        """Add the residual of u with some of the gradient and noise, as in a mixed start."""
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

    def _converge(self, basis: RitzBasis, at_least: int = 0) -> Tensor | None:
        """Add residuals of the leading pair until it is small enough, after a number of products at least.

        Returns:
            The last residual, in memory that can be given back; ``None`` if it could not be added.
        """
        while True:
            values, coefficients = basis.pairs()
            rest = basis.residual(values[0], coefficients[:, 0])
            self._residual = float(norms(rest))
            self._small = is_small(self._residual, values[0], basis.scale, self._tol, rest)
            if self._small and self._used >= at_least:
                return rest
            if not self._expand(basis, rest, self._residual):
                return None

    def _expand(self, basis: RitzBasis, vector: Tensor, residual: float | None = None) -> bool:
        """Add a vector, whose memory is the basis' from now on; return whether that was possible.

        Args:
            residual: its length, if it is the residual of the leading pair.
        """
        if len(basis) == self._size:
            basis.restart(2)
        fits = self._used < self._max_hvps and (
            basis.normalize(vector) if residual is None else basis.normalize_residual(vector, residual)
        )
        if not fits:
            give_back(vector)
            return False
        basis.add(vector, self._product(vector))
        return True

    def _kept(self, basis: RitzBasis, check: Check, rest: Tensor | None) -> tuple[Pair, WarmStart]:
        """Keep y, and what it is compared with. The memory of the residual is given back."""
        pair = self._pair(basis, *basis.pairs())
        space, start = self._hessian.space, pair.vector
        if rest is not None:
            step = 1 / basis.scale if basis.scale > torch.finfo(rest.dtype).tiny else 0.0
            start = torch.add(pair.vector, rest, alpha=step, out=rest)
        basis.release()
        left = with_drift(self._last, start, space)
        if rest is not None:
            give_back(rest)
        return pair, left._replace(check=check._replace(value=pair.value, scale=pair.scale, age=check.age + 1))

    def _renewed(self, basis: RitzBasis, age: int) -> tuple[Pair, WarmStart]:
        """Prepare the next test with other vectors."""
        values, coefficients = basis.pairs()
        pair = self._pair(basis, values, coefficients)
        starts = basis.steps(values[:3], coefficients[:, :3])
        starts.div_(norms(starts)[:, None])
        basis.release()
        left = self._packed(starts, self._hessian.gradient)
        del starts
        return self._prepared(pair, left, age)

    def _pair(self, basis: RitzBasis, values: list[float], coefficients: Tensor) -> Pair:
        """Return the leading pair. Its vector is in memory that can be given back."""
        vector = basis.vector(coefficients[:, 0])
        vector.div_(norms(vector))
        return Pair(values[0], vector, self._residual, self._small, self._used, basis.asymmetry, basis.scale)

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
        left = self._packed(pair.starts, gradient)
        pair = pair._replace(starts=None)  # before the next product
        return self._prepared(pair, left, 0)

    def _prepared(self, pair: Pair, left: WarmStart, age: int) -> tuple[Pair, WarmStart]:
        # An asymmetry shows in a long iteration only, so none but these may follow. The test takes a product.
        testable = pair.converged and not is_asymmetric(pair) and self._used < self._max_hvps
        seen = look(self._hessian.space, left, self._product) if testable else None
        if seen is not None:
            give_back(seen.y, seen.image)
            gaps = [(pair.value - curvature) / max(abs(pair.value), _TINY) for curvature in seen.curvatures]
            left = left._replace(check=Check(pair.value, gaps, seen.projection, 0.0, pair.scale, age, **seen.known))
        return pair._replace(products=self._used), left

    def _mixed(self, first: Tensor) -> Tensor:
        """Mix all that is known, and noise. The memory of the vector is given back."""
        mixed = mixed_start(self._hessian.gradient, first, self._noise)
        others = OtherVectors.read(self._last.others, self._hessian.space)
        if others is not None:
            others.add_to(mixed, (_OTHERS, _OTHERS))
        give_back(first)
        return mixed

    def _packed(self, starts: Tensor, gradient: Tensor) -> WarmStart:
        """Return the bytes of v₁, v₂ and s, from unit vectors whose memory is given back."""
        if len(starts) == 3:  # the basis may have fewer
            self._add_rest(starts, gradient)
        first, others = without_drift(starts, self._hessian.space)
        give_back(starts)
        return WarmStart(first, others, None, self._last.seed + 1)

    def _add_rest(self, starts: Tensor, gradient: Tensor) -> None:
        """Mix the third vector with what the gradient has across all three, in equal parts."""
        rest = empty(len(gradient), dtype=starts.dtype, device=starts.device).copy_(gradient)
        rest.addmv_(starts.t(), starts @ rest, alpha=-1)
        size = float(norms(rest))
        starts[2].add_(rest, alpha=1 / size if size > 0 else 0.0)
        give_back(rest)
