"""Random vectors as large as a model, from few random numbers."""

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["Noise"]

# Random numbers of a block: to draw them for each entry of a large vector takes longer than a product with the Hessian
# of a small network.
_BLOCK = 2**18


class Noise:
    """A random vector z (p,) with E z zᵀ = I, the same on every device: blocks of one normal vector with random signs.

    Up to 2¹⁸ entries it is a normal vector.

    Attributes:
        norm: ‖z‖.

    Example:
        >>> total = torch.zeros(3)
        >>> Noise(3, seed=0).add_to(total, 2.0)
        >>> torch.equal(total, 2 * torch.randn(3, generator=torch.Generator().manual_seed(0)))
        True
    """

    def __init__(self, size: int, seed: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        generator = torch.Generator(device="cpu").manual_seed(seed)
        numbers = torch.randn(min(size, _BLOCK), generator=generator, device="cpu")
        blocks = -(-size // _BLOCK)
        signs = torch.randint(0, 2, (blocks,), generator=generator, device="cpu") if blocks > 1 else None
        self._signs = [1.0] * blocks if signs is None else (2.0 * signs - 1).tolist()
        squares = numbers.double().square()
        last = size - (blocks - 1) * _BLOCK
        self.norm = ((blocks - 1) * float(squares.sum()) + float(squares[:last].sum())) ** 0.5
        self._numbers = numbers.to(device, dtype)

    def add_to(self, total: Tensor, weight: float) -> None:
        """Add weight·z in place."""
        for numbers, sign, into in self._pieces(total):
            into.add_(numbers, alpha=sign * weight)

    def times(self, x: Tensor, out: Tensor) -> Tensor:
        """Write the products z_i x_i to ``out``, and return it."""
        for (numbers, sign, piece), into in zip(self._pieces(x), out.split(_BLOCK)):
            torch.mul(piece, numbers, out=into).mul_(sign)
        return out

    def _pieces(self, x: Tensor) -> Iterator[tuple[Tensor, float, Tensor]]:
        for sign, piece in zip(self._signs, x.split(_BLOCK)):
            yield self._numbers[: len(piece)], sign, piece
