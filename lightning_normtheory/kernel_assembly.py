"""The tangent kernel, block by block, within a given memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_normtheory.inputs import some_samples
from lightning_normtheory.kernel_factors import Gradients, LeafFactors, Part, add_parts
from lightning_normtheory.kernel_network import Leaf, Network, RecordingWeights
from lightning_normtheory.kernel_plan import (
    Evidence,
    Plan,
    SamplesCoupled,
    StructureChanged,
    at_use,
    backward,
    leaf_factors,
    make_plan,
    weights_of,
)
from lightning_normtheory.parameter_uses import Use

__all__ = ["PARTS", "Blocks", "Coupled", "Independent", "Source", "assemble", "few_samples"]

PARTS: tuple[Part, ...] = ("direction", "length", "rest")
# What the gradients of the samples that are handled at once may take, where fewer outputs can be handled at once; and
# half of what they may take together with what autograd keeps of the forward pass.
_BYTES = 2**29
# How many samples the structure of a network is tried on.
_FEW = 8
# layer -> part -> matrix; one layer with the name None where they are not kept apart
Blocks = dict[str | None, dict[Part, Tensor]]


class Source(Protocol):
    """Where the gradients of samples come from.

    Attributes:
        sizes: the number of samples in each group of those that can be run together.
        leaves: in which gradients are taken.
        outputs: k.
        entries: numbers to be kept for each sample and output.
        entries_besides: numbers to be kept for each sample.
    """

    network: Network
    sizes: list[int]
    leaves: list[Leaf]
    outputs: int
    entries: int
    entries_besides: int

    def gradients(self, group: int, which: slice, cotangents: Tensor, folded: bool) -> dict[Leaf, LeafFactors]:
        """Of some samples of a group, for the outputs Σ_h cotangent_h f_h."""


class Independent:
    """Samples that do not see each other: any of them can be run together, and the structure of the layers is used.

    A few of them, spread over each group, are run by themselves first. If they have other outputs or gradients among
    the others than by themselves, that ends it.

    Args:
        groups: inputs with the number of samples in them.
        cotangents_of: makes the cotangents (c, k) of a number k of outputs.
        structured: whether to use the structure at all.
    """

    def __init__(
        self,
        network: Network,
        groups: Sequence[tuple[Any, int]],
        cotangents_of: Callable[[int], Tensor],
        *,
        structured: bool,
    ) -> None:
        self.network, self._groups = network, groups
        self.sizes = [samples for _, samples in groups]
        self._plans = [
            make_plan(network, *few_samples(*group), cotangents_of, structured=structured) for group in groups
        ]
        self.outputs = self._plans[0].outputs
        one_by_one = [leaf for plan in self._plans for leaf in plan.one_by_one]
        # What one group lacks the structure for is taken one by one in all.
        everywhere = set.intersection(*(set(plan.structured) for plan in self._plans))
        one_by_one += network.raw(leaf for plan in self._plans for leaf in plan.structured if leaf not in everywhere)
        self._structured = [leaf for leaf in self._plans[0].structured if leaf in everywhere]
        self.one_by_one = list(dict.fromkeys(one_by_one))
        self.leaves = [*self._structured, *self.one_by_one]
        self.entries = max(plan.entries for plan in self._plans)
        self.entries += sum(leaf.tensor.numel() for leaf in self.one_by_one)
        self.entries_besides = max(plan.saved_entries for plan in self._plans)

    def gradients(self, group: int, which: slice, cotangents: Tensor, folded: bool) -> dict[Leaf, LeafFactors]:
        """
        Raises:
            SamplesCoupled: if the samples do see each other.
            StructureChanged: if these have another graph than the first ones, or other gradients.
        """
        (x, total), plan = self._groups[group], self._plans[group]
        samples, x = which.stop - which.start, some_samples(x, total, which)
        output = self.network.with_leaves(x, samples)
        assert plan.evidence is not None
        plan.evidence.compare_outputs(output.detach(), which.start)
        found = _Lazy(plan, samples, folded)
        if self._structured:
            found.weights = self.network.weights
            found.uses = plan.uses(self.network, output)
            found.by_output = [backward(self.network, output, found.uses, c.expand(samples, -1)) for c in cotangents]
            if len(cotangents) == plan.cotangents:
                self._compare_uses(plan, found, which.start)
        if self.one_by_one:
            found.update(self._one_by_one(x, output.detach(), cotangents, folded))
        return found

    @torch.no_grad()
    def _compare_uses(self, plan: Plan, found: "_Lazy", first: int) -> None:
        """The few samples that are among these; a portion of the outputs is not enough to compare."""
        assert plan.evidence is not None
        mine, theirs = plan.evidence.common(first, found.samples)
        weights = weights_of(found.by_output[0][0].new_empty(plan.cotangents))
        for index in (index for leaf in self._structured for index in plan.structured[leaf]):
            gradients = [each[index] for each in found.by_output]
            try:
                with self.network.weights.in_backward():
                    seen = at_use(found.uses[index], plan.axes[index], gradients, weights, found.samples, theirs)
            except ValueError as error:  # another number of entries
                raise StructureChanged from error
            plan.evidence.compare_use(index, mine, seen)

    def _one_by_one(self, x: Any, together: Tensor, cotangents: Tensor, folded: bool) -> dict[Leaf, LeafFactors]:
        samples = len(together)
        values = _empty(self.one_by_one, samples, len(cotangents))
        for i in range(samples):
            try:
                alone = self.network(some_samples(x, samples, slice(i, i + 1)), 1)
            except Exception as error:
                raise SamplesCoupled from error
            Evidence(torch.tensor([i]), alone.detach(), []).compare_outputs(together, 0)
            _fill(values, i, alone, cotangents[:, None])
        return {leaf: _listed(value, folded) for leaf, value in values.items()}


def few_samples(x: Any, samples: int) -> tuple[Any, Tensor]:
    """Some samples, spread over all, and their numbers."""
    which = torch.linspace(0, samples - 1, min(samples, _FEW)).round().long()
    return some_samples(x, samples, which), which


class _Lazy(dict[Leaf, LeafFactors]):
    """The factors of a leaf are made when they are asked for: patches of images are larger than images."""

    weights: RecordingWeights
    uses: Sequence[Use] = ()
    by_output: Sequence[Sequence[Tensor]] = ()

    def __init__(self, plan: Plan, samples: int, folded: bool) -> None:
        super().__init__()
        self._plan, self.samples, self._folded = plan, samples, folded

    def __missing__(self, leaf: Leaf) -> LeafFactors:
        mine = [(self.uses[i], self._plan.axes[i], [g[i] for g in self.by_output]) for i in self._plan.structured[leaf]]
        try:
            factors = leaf_factors(self.weights, leaf, mine, self.samples, folded=self._folded)
        except ValueError as error:  # another number of entries than the few samples had
            raise StructureChanged from error
        if factors is None:
            raise StructureChanged
        return factors


class Coupled:
    """Samples that see each other, as through the statistics of a batch: the derivative goes through the whole batch,
    one output after the other. (Several at once, batched by torch, take three times as long.)

    Args:
        batches: inputs with the number of samples in them, and how many of these, from the first on, are asked for.
    """

    entries_besides = 0

    def __init__(self, network: Network, batches: Sequence[tuple[Any, int, int]]) -> None:
        self.network, self._batches = network, batches
        self.sizes = [asked for _, _, asked in batches]
        self.leaves = network.parameters
        self.entries = sum(leaf.tensor.numel() for leaf in self.leaves)
        self.outputs = network(*batches[0][:2]).shape[1]

    def gradients(self, group: int, which: slice, cotangents: Tensor, folded: bool) -> dict[Leaf, LeafFactors]:
        x, samples, _ = self._batches[group]
        output = self.network(x, samples)
        values = _empty(self.leaves, which.stop - which.start, len(cotangents))
        for i in range(which.start, which.stop):
            cotangent = cotangents.new_zeros(len(cotangents), *output.shape)
            cotangent[:, i] = cotangents
            _fill(values, i - which.start, output, cotangent)
        return {leaf: _listed(value, folded) for leaf, value in values.items()}


def _listed(values: Tensor, folded: bool) -> Gradients:
    return Gradients([values[:, h : h + 1] for h in range(values.shape[1])] if folded else [values])


def _empty(leaves: Sequence[Leaf], samples: int, outputs: int) -> dict[Leaf, Tensor]:
    return {leaf: leaf.tensor.new_zeros(samples, outputs, leaf.tensor.numel()) for leaf in leaves}


def _fill(values: dict[Leaf, Tensor], sample: int, output: Tensor, cotangents: Tensor) -> None:
    """Plain autograd, once for each cotangent."""
    tensors = [leaf.tensor for leaf in values]
    for h, cotangent in enumerate(cotangents):
        gradients = torch.autograd.grad(output, tensors, cotangent, retain_graph=True, allow_unused=True)
        for leaf, gradient in zip(values, gradients):
            if gradient is not None:
                values[leaf][sample, h] = gradient.detach().to_dense().reshape(-1)


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
    first: dict[Leaf, LeafFactors],
    second: dict[Leaf, LeafFactors],
    where: tuple[slice, slice],
    layers: bool,
) -> None:
    for leaf in leaves:
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
