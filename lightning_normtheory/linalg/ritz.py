"""Ritz pairs of a symmetric map in the span of a few vectors, to which better ones are added one by one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_normtheory.linalg.inner_products import add_combination, combine, dots, norms
from lightning_normtheory.measuring.workspace import empty, give_back

__all__ = ["RitzBasis"]

# The share of a vector beyond the basis from which on its image is precise enough.
_LEAST = 1e-2
# The share up to which a vector beyond the basis is rounding, in units of the precision.
_ROUNDING = 10
# The share of a residual along the basis up to which its length is the same without that.
_HARDLY = 1e-3


class RitzBasis:
    """Orthonormal vectors v_1, …, v_m (p,) with their images H v_i, and T = VᵀHV (m, m).

    Attributes:
        scale: a lower bound of ‖H‖, the largest ‖H v_i‖ so far; it can be set to a larger one that is known.
        asymmetry: the largest |v_1ᵀH v_i − v_iᵀH v_1| so far.

    Example:
        >>> H = torch.diag(torch.tensor([3.0, 1.0, 0.0]))
        >>> basis = RitzBasis()
        >>> for vector in torch.tensor([[0.6, 0.8, 0.0], [-0.8, 0.6, 0.0]]):
        ...     basis.add(vector, H @ vector)
        >>> values, coefficients = basis.pairs()
        >>> [round(value, 6) for value in values]
        [3.0, 1.0]
    """

    def __init__(self) -> None:
        self._vectors: list[Tensor] = []
        self._images: list[Tensor] = []
        self._T = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        self.scale, self.asymmetry = 0.0, 0.0

    def __len__(self) -> int:
        return len(self._vectors)

    def normalize(self, vector: Tensor) -> bool:
        """Make a vector orthogonal to the basis and of length one, in place.

        Returns:
            Whether more than rounding was left of it.
        """
        before = size = float(norms(vector))
        for _ in range(2):
            add_combination(self._vectors, [-c for c in dots(self._vectors, vector)], vector)
            size, last = float(norms(vector)), size
            if size > last / 2:
                break  # rounding is small beside what is left
        if not _ROUNDING * torch.finfo(vector.dtype).eps * before < size < math.inf:
            return False
        vector.mul_(1 / size)
        return True

    def normalize_residual(self, vector: Tensor, size: float) -> bool:
        """Do the same for the residual of a Ritz pair, whose length is known: it has hardly a part along the basis, but
        the next residuals would multiply that part."""
        along = dots(self._vectors, vector)
        if math.hypot(*along) > _HARDLY * size or size <= _ROUNDING * torch.finfo(vector.dtype).eps * self.scale:
            return self.normalize(vector)
        add_combination(self._vectors, [-c / size for c in along], vector, scale=1 / size)
        return True

    def add(self, vector: Tensor, image: Tensor) -> None:
        """Add a unit vector, orthogonal to the basis, with H times it; both are the basis' from now on."""
        mirrored = dots(self._images[:1], vector)
        self._vectors.append(vector)
        self._images.append(image)
        *column, square = dots([*self._vectors, image], image)
        m = len(self)
        T = torch.zeros(m, m, dtype=torch.float64, device="cpu")
        T[:-1, :-1] = self._T
        T[:, -1] = T[-1] = torch.tensor(column, dtype=torch.float64, device="cpu")
        if not bool(torch.isfinite(T).all()) or not math.isfinite(square):
            raise FloatingPointError("Expected a finite product with a vector, but it, or its norm, is not finite.")
        self._T = T
        self.scale = max(self.scale, square**0.5)
        self.asymmetry = max([self.asymmetry, *(abs(a - b) for a, b in zip(column, mirrored))])

    def add_with_image(self, vector: Tensor, image: Tensor) -> None:
        """Add what a unit vector and H times it have beyond the basis; both are the basis' from now on."""
        along = dots(self._vectors, vector)
        across = 1 - sum(c * c for c in along)
        if across <= _LEAST**2:  # mostly rounding
            give_back(vector, image)
            return
        scale = across**-0.5
        coefficients = [-c * scale for c in along]
        self.add(
            add_combination(self._vectors, coefficients, vector, scale=scale),
            add_combination(self._images, coefficients, image, scale=scale),
        )

    def last_image(self) -> Tensor:
        """Return H times the last vector that was added, in memory that can be given back."""
        last = self._images[-1]
        return empty(len(last), dtype=last.dtype, device=last.device).copy_(last)

    def pairs(self) -> tuple[list[float], Tensor]:
        """Return the Ritz values, the largest first, and the coefficients (m, m) of their vectors, one per column: none
        of them points away from v_1."""
        values, vectors = torch.linalg.eigh(self._T)
        vectors = vectors * torch.where(vectors[:1] < 0, -1.0, 1.0)
        return values.flip(0).tolist(), vectors.flip(1)

    def residual(self, value: float, coefficients: Tensor) -> Tensor:
        """Return Hv − λv of a combination v of the vectors, in memory that can be given back."""
        return self._combined([*self._images, *self._vectors], torch.cat([coefficients, -value * coefficients]))[0]

    def steps(self, values: Sequence[float], coefficients: Tensor) -> Tensor:
        """Return for each of some Ritz pairs v + (Hv − λv)/‖H‖ (k, p), a step of power iteration without a product, in
        memory that can be given back; v itself if H is zero."""
        like = self._vectors[0]
        step = 1 / self.scale if self.scale > torch.finfo(like.dtype).tiny else 0.0
        weights = [torch.cat([step * c, (1 - step * value) * c]) for value, c in zip(values, coefficients.t())]
        out = empty(len(weights), len(like), dtype=like.dtype, device=like.device)
        combine([*self._images, *self._vectors], [each.tolist() for each in weights], list(out))
        return out

    def vector(self, coefficients: Tensor) -> Tensor:
        """Return a combination of the vectors, in memory that can be given back."""
        return self._combined(self._vectors, coefficients)[0]

    def restart(self, count: int) -> None:
        """Keep only the leading Ritz vectors."""
        values, coefficients = self.pairs()
        vectors, images = (self._combined(each, *coefficients[:, :count].t()) for each in (self._vectors, self._images))
        self.release()
        self._vectors, self._images = vectors, images
        self._T = torch.diag(torch.tensor(values[:count], dtype=torch.float64, device="cpu"))

    def release(self) -> None:
        """Give the memory back."""
        give_back(*self._vectors, *self._images)
        self._vectors, self._images = [], []

    def _combined(self, vectors: list[Tensor], *coefficients: Tensor) -> list[Tensor]:
        like = vectors[0]
        outs = [empty(len(like), dtype=like.dtype, device=like.device) for _ in coefficients]
        combine(vectors, [each.tolist() for each in coefficients], outs)
        return outs
