"""The tangent kernel, block by block, within a given memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.kernel_factors import LeafFactors, Part, add_parts
from lightning_normtheory.kernel_network import Leaf
from lightning_normtheory.kernel_sources import Source
from lightning_normtheory.ticks import tick

__all__ = ["PARTS", "Blocks", "assemble"]

PARTS: tuple[Part, ...] = ("direction", "length", "rest")
# What the gradients of the samples that are handled at once may take, where fewer outputs can be handled at once; and
# half of what they may take together with what autograd keeps of the forward pass.
_BYTES = 2**29
# layer -> part -> matrix; one layer with the name None where they are not kept apart
Blocks = dict[str | None, dict[Part, Tensor]]


def assemble(source: Source, cotangents: Tensor, *, folded: bool, layers: bool) -> Blocks:
    """Σ_leaf ⟨∇_i, ∇_j⟩ by part, and by layer if asked for: (n, n) if the outputs are folded (added up), otherwise with
    a row for each output of each sample."""
    per_sample = 1 if folded else len(cotangents)
    size = sum(source.sizes) * per_sample
    device = cotangents.device if cotangents.device.type != "mps" else torch.device("cpu")  # which has no float64
    present = {leaf.layer for leaf in source.leaves}
    ordered = [leaf.layer for leaf in source.network.parameters if leaf.layer in present]
    names: dict[str | None, None] = dict.fromkeys(ordered if layers else [None])
    blocks: Blocks = {
        name: {part: torch.zeros(size, size, dtype=torch.float64, device=device) for part in PARTS} for name in names
    }
    outputs, portions = _portions(source, len(cotangents), folded, cotangents.element_size())
    for some in outputs:
        for number, rows in enumerate(portions):
            first = source.gradients(rows.group, rows.which, cotangents[some], folded)
            for cols in portions[number:]:
                same = cols is rows
                second = first if same else source.gradients(cols.group, cols.which, cotangents[some], folded)
                where = rows.rows(per_sample), cols.rows(per_sample)
                _add_block(blocks, source.leaves, first, second, where, layers)
    for parts in blocks.values():
        for matrix in parts.values():
            _mirror(matrix)
    return blocks


class _Portion(NamedTuple):
    """Samples of one group, of which the first is number ``first`` of all."""

    group: int
    which: slice
    first: int

    def rows(self, per_sample: int) -> slice:
        count = self.which.stop - self.which.start
        return slice(self.first * per_sample, (self.first + count) * per_sample)


def _portions(source: Source, outputs: int, folded: bool, itemsize: int) -> tuple[list[slice], list[_Portion]]:
    """Which outputs and which samples to handle at once. Fewer outputs cost next to nothing where they are only added
    up; fewer samples cost a pass for every pair of portions."""
    at_once = outputs
    if folded:
        at_once = max(1, min(outputs, _BYTES // max(1, max(source.sizes) * source.entries * itemsize)))
    count = max(1, 2 * _BYTES // max(1, (at_once * source.entries + source.entries_besides) * itemsize))
    portions = []
    first = 0
    for group, size in enumerate(source.sizes):
        for which in _slices(size, -(-size // -(-size // count))):  # of about the same size
            portions.append(_Portion(group, which, first + which.start))
        first += size
    return list(_slices(outputs, at_once)), portions


def _slices(total: int, size: int) -> Iterator[slice]:
    for begin in range(0, total, size):
        yield slice(begin, min(begin + size, total))


@torch.no_grad()
def _add_block(
    blocks: Blocks,
    leaves: Sequence[Leaf],
    first: Mapping[Leaf, LeafFactors],
    second: Mapping[Leaf, LeafFactors],
    where: tuple[slice, slice],
    layers: bool,
) -> None:
    for leaf in leaves:
        tick("block")
        mine = first[leaf]
        others = mine if second is first else second[leaf]
        out = {part: matrix[where] for part, matrix in blocks[leaf.layer if layers else None].items()}
        add_parts(out, leaf.part, mine, others, weight_norm=leaf.weight_norm)


def _mirror(matrix: Tensor, tile: int = 128) -> None:
    """Fill in what lies below the diagonal."""
    for begin in range(0, len(matrix), tile):
        rows, behind = slice(begin, begin + tile), slice(begin + tile, None)
        diagonal = matrix[rows, rows].triu()
        matrix[rows, rows] = diagonal + diagonal.triu(1).t()
        matrix[behind, rows] = matrix[rows, behind].t()
