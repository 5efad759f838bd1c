"""Add up the tangent kernel block by block, within the memory limit, each process some of the rows."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.linalg.precision import device_for_float64
from lightning_normtheory.measuring.processes import SINGLE_PROCESS, Processes, Refusal
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.ntk.directions import Cotangents
from lightning_normtheory.ntk.factors import LeafFactors, Part, add_parts
from lightning_normtheory.ntk.gradients import FactorsOf, GradientSource
from lightning_normtheory.ntk.memory import portions_within_limit
from lightning_normtheory.ntk.network import Leaf

__all__ = ["PARTS", "Assembled", "Blocks", "assemble", "row_shares"]

PARTS: tuple[Part, ...] = ("direction", "length", "rest")
# layer -> part -> matrix; one layer with the name None if layers are not kept apart
Blocks = dict[str | None, dict[Part, Tensor]]


class Assembled(NamedTuple):
    """The kernel in blocks.

    Attributes:
        by_direction: for random directions, the kernel of each direction (m, n, n).
        full: the parts of the kernel of all outputs of the first samples, if it was asked for and came along.
    """

    blocks: Blocks
    by_direction: Tensor | None
    full: dict[Part, Tensor] | None = None


def assemble(
    source: GradientSource,
    cotangents: Cotangents,
    *,
    folded: bool,
    layers: bool,
    batch: int,
    full: int = 0,
    processes: Processes = SINGLE_PROCESS,
    divisor: int = 1,
) -> Assembled | Refusal:
    """Compute Σ_leaf ⟨∇_i, ∇_j⟩ by part, and by layer if asked for.

    Args:
        folded: whether outputs are added up: (n, n); otherwise there is a row for each output of each sample.
        batch: the number of samples of a training step, for the memory limit.
        full: the number of first samples of which the kernel of all outputs is to come along, if all of them and all
            outputs are handled at once.
        processes: each computes some of the rows; in the end all have the whole kernel.
        divisor: of the memory limit.

    Returns:
        A refusal if the source cannot give the gradients of some samples.
    """
    per_sample = 1 if folded else len(cotangents)
    like = cotangents.like
    blocks = processes.run_on_all(lambda: _empty_blocks(source, per_sample, like.device, layers))
    singles: Tensor | None = None
    if cotangents.random:
        matrix = next(iter(blocks.values()))["rest"]
        singles = matrix.new_zeros(len(cotangents), *matrix.shape)
    outputs, portions = portions_within_limit(
        source, len(cotangents), folded, like.element_size(), batch=batch, divisor=divisor
    )
    along: _Full | None = None
    if full and folded and not cotangents.random and len(outputs) == 1 and full <= portions[0].samples:
        along = _Full(full, _zeros(full * len(cotangents), like.device))
    for some in outputs:
        chosen = cotangents[some]
        for index, rows in enumerate(portions):
            first = source.gradients(rows.group, rows.which, chosen, folded, some.start)
            if isinstance(first, Refusal):
                return first
            for cols in portions[index:]:
                same = cols is rows
                second = first if same else source.gradients(cols.group, cols.which, chosen, folded, some.start)
                if isinstance(second, Refusal):
                    return second
                where = rows.rows(per_sample), cols.rows(per_sample)
                share = row_shares(rows.samples, processes.count, upper=same)[processes.rank]
                pair = _Pair(first, second, where, share, per_sample)
                mine = None if singles is None else singles[some]
                here = along if same and index == 0 and processes.rank == 0 else None
                refusal = processes.run_on_all(partial(_add_block, blocks, source.leaves, pair, layers, mine, here))
                if refusal is not None:
                    return refusal
                del second, pair  # at most two portions at a time
            del first
    for parts in blocks.values():
        for part, matrix in parts.items():
            parts[part] = processes.sum(matrix)
            _mirror(parts[part])
    if singles is not None:
        singles = processes.sum(singles)
        for single in singles:
            _mirror(single)
    if along is None:
        return Assembled(blocks, singles)
    found = {part: processes.sum(matrix) for part, matrix in along.parts.items()}
    for matrix in found.values():
        _mirror(matrix)
    return Assembled(blocks, singles, found)


def _zeros(size: int, device: torch.device) -> dict[Part, Tensor]:
    device = device_for_float64(device)
    return {part: torch.zeros(size, size, dtype=torch.float64, device=device) for part in PARTS}


def _empty_blocks(source: GradientSource, per_sample: int, device: torch.device, layers: bool) -> Blocks:
    size = sum(source.sizes) * per_sample
    present = {leaf.layer for leaf in source.leaves}
    ordered = [leaf.layer for leaf in source.network.parameters if leaf.layer in present]
    names: dict[str | None, None] = dict.fromkeys(ordered if layers else [None])
    return {name: _zeros(size, device) for name in names}


def row_shares(rows: int, count: int, *, upper: bool) -> list[slice]:
    """Split the rows of a block between ``count`` processes so that each has about the same number of entries.

    With ``upper``, only entries on and above the diagonal count.

    Example:
        >>> row_shares(128, 2, upper=True), row_shares(3, 2, upper=False)
        ([slice(0, 37, None), slice(37, 128, None)], [slice(0, 2, None), slice(2, 3, None)])
    """
    parts = [part / count for part in range(count + 1)]
    ends = [round(rows * (1 - math.sqrt(1 - part) if upper else part)) for part in parts]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


class _Full(NamedTuple):
    """The kernel of all outputs of the first samples, and their number."""

    samples: int
    parts: dict[Part, Tensor]


class _Pair(NamedTuple):
    """The factors of two portions, the place of their block in the matrix, and this process's share of its rows."""

    first: FactorsOf
    second: FactorsOf
    where: tuple[slice, slice]
    share: slice
    per_sample: int

    def shares(
        self, mine: LeafFactors, theirs: LeafFactors
    ) -> Iterator[tuple[tuple[slice, slice], LeafFactors, LeafFactors]]:
        """Places in the block with the factors of their rows and columns: one object for a block on the diagonal."""
        begin, end, q = self.share.start, self.share.stop, self.per_sample
        rows = slice(begin * q, end * q)
        whole = end - begin == (self.where[0].stop - self.where[0].start) // q
        some = mine if whole else mine.some(self.share)
        if theirs is not mine:
            yield (rows, slice(None)), some, theirs
            return
        yield (rows, rows), some, some
        if (self.where[1].stop - self.where[1].start) // q > end:
            yield (rows, slice(end * q, None)), some, mine.some(slice(end, None))


@torch.no_grad()
def _add_block(
    blocks: Blocks,
    leaves: Sequence[Leaf],
    pair: _Pair,
    layers: bool,
    singles: Tensor | None,
    full: _Full | None,
) -> Refusal | None:
    """Add the Gram matrices of all leaves; those of single directions also to ``singles``, if they are wanted, and
    those of the first samples to ``full``."""
    for leaf in leaves:
        tick("block")
        if pair.share.start == pair.share.stop and full is None:  # more processes than rows
            continue
        first = pair.first(leaf)
        second = first if pair.second is pair.first else pair.second(leaf)
        if isinstance(first, Refusal):
            return first
        if isinstance(second, Refusal):
            return second
        if full is not None:
            few = first.some(slice(full.samples)).unfolded()
            add_parts(full.parts, leaf.part, few, few, weight_norm=leaf.weight_norm)
            if pair.share.start == pair.share.stop:
                continue
        parts = blocks[leaf.layer if layers else None]
        for share, rows, cols in pair.shares(first, second):
            out = {part: matrix[pair.where][share] for part, matrix in parts.items()}
            if singles is None:
                add_parts(out, leaf.part, rows, cols, weight_norm=leaf.weight_norm)
                continue
            touched: tuple[Part, ...] = (leaf.part,) if leaf.weight_norm is None else ("length", "direction")
            for number, single in enumerate(singles):
                mine = rows.only(number)
                found = {part: torch.zeros_like(out[part]) for part in touched}
                theirs = mine if cols is rows else cols.only(number)
                add_parts(found, leaf.part, mine, theirs, weight_norm=leaf.weight_norm)
                for part, matrix in found.items():
                    out[part] += matrix
                    single[pair.where][share] += matrix
    return None


def _mirror(matrix: Tensor, tile: int = 128) -> None:
    """Copy the entries above the diagonal below it."""
    upper = torch.ones(tile, tile, dtype=torch.bool, device=matrix.device).triu()
    for begin in range(0, len(matrix), tile):
        rows, behind = slice(begin, begin + tile), slice(begin + tile, None)
        diagonal = matrix[rows, rows]
        matrix[rows, rows] = torch.where(upper[: len(diagonal), : len(diagonal)], diagonal, diagonal.t())
        matrix[behind, rows] = matrix[rows, behind].t()
