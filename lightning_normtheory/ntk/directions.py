"""The combinations of outputs that are differentiated: single outputs, their sum, or random directions."""

import torch
from torch import Tensor

from lightning_normtheory.ntk.result import Outputs

__all__ = ["Cotangents", "mixing_weights"]


class Cotangents:
    """Combinations (c, k) of k outputs, made when they are asked for, since k may be in the millions.

    Args:
        outputs: the kind of the kernel. For ``"full"`` and ``"trace"`` each output by itself, or random directions.
        k: the number of outputs.
        directions: the number of random directions; ``None``, or k and more: each output by itself.
        seed: of the directions. Direction r depends on the seed, r and k alone.
        like: has the dtype and device.

    Attributes:
        random: whether they are random directions: independent signs ±1, so that E zzᵀ = I.

    Example:
        >>> Cotangents("trace", 3, None, 0, torch.zeros(()))[1:3]
        tensor([[0., 1., 0.],
                [0., 0., 1.]])
        >>> Cotangents("trace", 3, 2, 0, torch.zeros(()))[:].abs()
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """

    def __init__(self, outputs: Outputs, k: int, directions: int | None, seed: int, like: Tensor) -> None:
        self.random = directions is not None and directions < k
        self._k, self._seed, self.like = k, seed, like
        self._sum = outputs == "sum"
        self._count = 1 if self._sum else k
        if self.random and directions is not None:
            self._count = directions

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, some: slice) -> Tensor:
        chosen = range(self._count)[some]
        if self._sum:
            return self.like.new_ones(len(chosen), self._k)
        if self.random:
            return torch.stack([self._signs(index) for index in chosen])
        rows = self.like.new_zeros(len(chosen), self._k)
        rows.diagonal(chosen.start).fill_(1)
        return rows

    def _signs(self, index: int) -> Tensor:
        # A generator of its own: those of the user stay as they are.
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + index)
        signs = torch.randint(0, 2, (self._k,), dtype=torch.int8, generator=generator, device="cpu")
        return (2 * signs - 1).to(self.like)

    def mixed(self) -> Tensor:
        """One combination (k,) in which each of these has another weight, that of `mixing_weights`."""
        weights = mixing_weights(self._count, self.like)
        if not self.random and not self._sum:
            return weights
        total = self.like.new_zeros(self._k)
        for index, weight in enumerate(weights):
            total += weight * self[index : index + 1][0]
        return total


def mixing_weights(count: int, like: Tensor) -> Tensor:
    """(count,), to mix outputs so that one backward pass stands for all: all different, none zero."""
    return torch.linspace(1, 2, count, dtype=like.dtype, device=like.device)
