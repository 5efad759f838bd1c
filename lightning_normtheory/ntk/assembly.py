"""The tangent kernel, block by block, within a given memory, each process some of the rows."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.measuring.processes import SINGLE_PROCESS, Processes
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.ntk.factors import LeafFactors, Part, add_parts
from lightning_normtheory.ntk.gradients import Source
from lightning_normtheory.ntk.network import Leaf
from lightning_normtheory.ntk.verification import SIGNALS

__all__ = ["PARTS", "Blocks", "assemble", "row_shares"]

PARTS: tuple[Part, ...] = ("direction", "length", "rest")
# What the gradients of the samples that are handled at once may take, where fewer outputs can be handled at once; and
# half of what they may take together with what autograd keeps of the forward pass.
_BYTES = 2**29
# layer -> part -> matrix; one layer with the name None where they are not kept apart
Blocks = dict[str | None, dict[Part, Tensor]]


def assemble(
    source: Source,
    cotangents: Tensor,
    *,
    folded: bool,
    layers: bool,
    processes: Processes = SINGLE_PROCESS,
    divisor: int = 1,
) -> Blocks:
    """Σ_leaf ⟨∇_i, ∇_j⟩ by part, and by layer if asked for: (n, n) if the outputs are folded (added up), otherwise with
    a row for each output of each sample.

    Args:
        processes: each computes some of the rows; in the end all have all of them.
        divisor: take so many times less at once than usual.
    """
    per_sample = 1 if folded else len(cotangents)
    blocks = processes.run_on_all(lambda: _empty_blocks(source, per_sample, cotangents.device, layers))
    outputs, portions = _portions(source, len(cotangents), folded, cotangents.element_size(), divisor)
    for some in outputs:
        for number, rows in enumerate(portions):
            first = source.gradients(rows.group, rows.which, cotangents[some], folded)
            for cols in portions[number:]:
                same = cols is rows
                second = first if same else source.gradients(cols.group, cols.which, cotangents[some], folded)
                where = rows.rows(per_sample), cols.rows(per_sample)
                share = row_shares(rows.samples, processes.count, upper=same)[processes.rank]
                pair = _Pair(first, second, where, share, per_sample)
                processes.run_on_all(partial(_add_block, blocks, source.leaves, pair, layers), SIGNALS)
    for parts in blocks.values():
        for part, matrix in parts.items():
            parts[part] = processes.sum(matrix)
            _mirror(parts[part])
    return blocks


def _empty_blocks(source: Source, per_sample: int, device: torch.device, layers: bool) -> Blocks:
    size = sum(source.sizes) * per_sample
    present = {leaf.layer for leaf in source.leaves}
    ordered = [leaf.layer for leaf in source.network.parameters if leaf.layer in present]
    names: dict[str | None, None] = dict.fromkeys(ordered if layers else [None])
    device = device if device.type != "mps" else torch.device("cpu")  # which has no float64
    return {
        name: {part: torch.zeros(size, size, dtype=torch.float64, device=device) for part in PARTS} for name in names
    }


def row_shares(rows: int, count: int, *, upper: bool) -> list[slice]:
    """Rows of a block for each of so many processes, with about the same number of entries; with ``upper``, of those
    on and above the diagonal.

    Example:
        >>> row_shares(128, 2, upper=True), row_shares(3, 2, upper=False)
        ([slice(0, 37, None), slice(37, 128, None)], [slice(0, 2, None), slice(2, 3, None)])
    """
    parts = [part / count for part in range(count + 1)]
    ends = [round(rows * (1 - math.sqrt(1 - part) if upper else part)) for part in parts]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


class _Portion(NamedTuple):
    """Samples of one group, of which the first is number ``first`` of all."""

    group: int
    which: slice
    first: int

    @property
    def samples(self) -> int:
        return self.which.stop - self.which.start

    def rows(self, per_sample: int) -> slice:
        return slice(self.first * per_sample, (self.first + self.samples) * per_sample)


def _portions(
    source: Source, outputs: int, folded: bool, itemsize: int, divisor: int
) -> tuple[list[slice], list[_Portion]]:
    """Which outputs and which samples to handle at once. Fewer outputs cost next to nothing where they are only added
    up; fewer samples cost a pass for every pair of portions."""
    at_once = outputs
    if folded:
        at_once = min(outputs, _BYTES // max(1, max(source.sizes) * source.entries * itemsize))
        at_once = max(1, at_once // divisor)
    count = 2 * _BYTES // max(1, (at_once * source.entries + source.entries_besides) * itemsize)
    count = max(1, min(count, max(source.sizes)) // divisor)
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


class _Pair(NamedTuple):
    """The factors of two portions, where their block is in the matrix, and this process's share of its samples."""

    first: Mapping[Leaf, LeafFactors]
    second: Mapping[Leaf, LeafFactors]
    where: tuple[slice, slice]
    share: slice
    per_sample: int

    def shares(self, leaf: Leaf) -> Iterator[tuple[tuple[slice, slice], LeafFactors, LeafFactors]]:
        """Where in the block, and the factors of its rows and columns: the same object in a block on the diagonal."""
        mine, same = self.first[leaf], self.second is self.first
        begin, end, q = self.share.start, self.share.stop, self.per_sample
        rows = slice(begin * q, end * q)
        whole = end - begin == (self.where[0].stop - self.where[0].start) // q
        if end == begin:
            return
        some = mine if whole else mine.some(self.share)
        if not same:
            yield (rows, slice(None)), some, self.second[leaf]
            return
        yield (rows, rows), some, some
        if (self.where[1].stop - self.where[1].start) // q > end:
            yield (rows, slice(end * q, None)), some, mine.some(slice(end, None))


@torch.no_grad()
def _add_block(blocks: Blocks, leaves: Sequence[Leaf], pair: _Pair, layers: bool) -> None:
    for leaf in leaves:
        tick("block")
        for share, first, second in pair.shares(leaf):
            parts = blocks[leaf.layer if layers else None].items()
            out = {part: matrix[pair.where][share] for part, matrix in parts}
            add_parts(out, leaf.part, first, second, weight_norm=leaf.weight_norm)


def _mirror(matrix: Tensor, tile: int = 128) -> None:
    """Fill in what lies below the diagonal."""
    for begin in range(0, len(matrix), tile):
        rows, behind = slice(begin, begin + tile), slice(begin + tile, None)
        diagonal = matrix[rows, rows].triu()
        matrix[rows, rows] = diagonal + diagonal.triu(1).t()
        matrix[behind, rows] = matrix[rows, behind].t()
