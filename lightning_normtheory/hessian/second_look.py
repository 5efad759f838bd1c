"""Multiply the Hessian with a test vector, which tells whether another eigenvector has taken the lead."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.hessian.warm_start import Check, OtherVectors, WarmStart
from lightning_normtheory.linalg.eigensolvers import Product
from lightning_normtheory.linalg.inner_products import norms
from lightning_normtheory.linalg.noise import Noise
from lightning_normtheory.measuring.workspace import empty, give_back
from lightning_normtheory.model.parameters import FlatParameters

__all__ = ["OTHER_SEED", "Seen", "look"]

# The weight of noise in the test vector y, relative to that of each of the two vectors.
_NOISE = 2.0
# The numbers that stand for the image of y: enough for the length of a difference to 10 %.
_BUCKETS = 256
# Between the seeds of noise that must not be the same.
OTHER_SEED = 2**32


class Seen(NamedTuple):
    """How H acts on y.

    Attributes:
        curvatures: the ρ_i.
        projection: of H y without its part along the other vectors.
        y, image: y and H y.
        parts: the inner products of H y with the other vectors.
        others: the other vectors.
        known: the fields of `Check` that are about y itself.
    """

    curvatures: list[float]
    projection: Tensor
    y: Tensor
    image: Tensor
    parts: list[float]
    others: OtherVectors
    known: dict[str, Any]

    def rest(self) -> Tensor:
        """H y without its part along the other vectors, in memory that can be given back."""
        image = self.image
        rest = empty(len(image), dtype=image.dtype, device=image.device).copy_(image)
        self.others.add_to(rest, [-part for part in self.parts])
        return rest


def look(space: FlatParameters, start: WarmStart, product: Product, check: Check | None = None) -> Seen | None:
    """Multiply H with the test vector; None if there is none.

    Args:
        product: v ↦ Hv.
        check: of the last measurement with the same test vector; it spares passes over the vectors.
    """
    others = OtherVectors.read(start.others, space, None if check is None else check.rows)
    if others is None:
        return None
    # On other random numbers than those of y, the projection of H y is independent of it.
    noise, signs = (
        Noise(space.size, seed, device=space.device, dtype=space.dtype)
        for seed in (start.seed, start.seed + OTHER_SEED)
    )
    scale = 1.0 if check is None else 1 / check.size
    y = empty(space.size, dtype=space.dtype, device=space.device).zero_()
    others.add_to(y, (scale, scale))
    noise.add_to(y, _NOISE * scale / noise.norm)
    if check is None:
        size = float(norms(y))
        along = others.dots(y.div_(size))
        sides = torch.stack([_side(space, others, weights, signs) for weights in ((1.0, 0.0), (0.0, 1.0))])
    else:
        size, along, sides = check.size, check.along, check.sides
    image = product(y)
    parts = others.dots(image)
    curvatures = [part / each for part, each in zip(parts, along)]
    projection = _projected(image, signs) - torch.tensor(parts, dtype=sides.dtype, device="cpu") @ sides
    projection, sides = torch.cat([projection[None], sides]).split([1, 2])  # of one storage, for the checkpoint
    known = {"size": size, "along": along, "rows": others.rows, "sides": sides}
    return Seen(curvatures, projection[0], y, image, parts, others, known)


def _side(space: FlatParameters, others: OtherVectors, weights: tuple[float, float], signs: Noise) -> Tensor:
    """Project one of the other vectors."""
    vector = empty(space.size, dtype=space.dtype, device=space.device).zero_()
    others.add_to(vector, weights)
    found = _projected(vector, signs)
    give_back(vector)
    return found


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
