"""Where the gradients of samples come from: the structure of the layers, or backward passes through the batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.processes import SINGLE_PROCESS, Processes
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.model.checks import some_samples
from lightning_normtheory.ntk.factors import Gradients, LeafFactors
from lightning_normtheory.ntk.network import Leaf, Network, RecordingWeights
from lightning_normtheory.ntk.parameter_uses import Use
from lightning_normtheory.ntk.plan import Plan, backward, leaf_factors, make_plan, weights_of
from lightning_normtheory.ntk.sample_axis import StructureChanged
from lightning_normtheory.ntk.verification import SIGNALS, Evidence, SamplesCoupled, at_use

__all__ = ["Coupled", "Independent", "Source"]

# How many samples the structure of a network is tried on.
_FEW = 8


class Source(Protocol):
    """Where the gradients of samples come from.

    Attributes:
        network: whose gradients they are.
        sizes: the number of samples in each group of those that can be run together.
        leaves: in which gradients are taken.
        one_by_one: those of them whose gradients are taken sample by sample though samples are independent.
        outputs: k.
        entries: numbers to be kept for each sample and output.
        entries_besides: numbers to be kept for each sample.
    """

    network: Network
    sizes: list[int]
    leaves: list[Leaf]
    one_by_one: list[Leaf]
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
        processes: between which the samples are shared out that are run one by one.
        divisor: try it on so many times fewer samples than usual.
    """

    def __init__(
        self,
        network: Network,
        groups: Sequence[tuple[Any, int]],
        cotangents_of: Callable[[int], Tensor],
        *,
        structured: bool,
        processes: Processes = SINGLE_PROCESS,
        divisor: int = 1,
    ) -> None:
        self.network, self._groups, self._processes = network, groups, processes
        self.sizes = [samples for _, samples in groups]
        self._plans = [
            make_plan(network, *_few_samples(*group, divisor), cotangents_of, structured=structured) for group in groups
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
        x = some_samples(x, total, which)
        found, values = self._processes.run_on_all(lambda: self._run(plan, x, which, cotangents, folded), SIGNALS)
        for leaf, value in values.items():
            found[leaf] = Gradients.of(self._processes.sum(value), folded=folded)
        return found

    def _run(
        self, plan: Plan, x: Any, which: slice, cotangents: Tensor, folded: bool
    ) -> tuple["_Lazy", dict[Leaf, Tensor]]:
        """What the structure gives of all these samples, and this process's part of what is had one by one."""
        samples = which.stop - which.start
        output = self.network.with_leaves(x, samples)
        plan.evidence.compare_outputs(output.detach(), which.start)
        found = _Lazy(plan, samples, folded)
        if self._structured:
            found.weights = self.network.weights
            found.uses = plan.uses(self.network, output)
            found.by_output = [backward(self.network, output, found.uses, c.expand(samples, -1)) for c in cotangents]
            if len(cotangents) == plan.cotangents:
                self._compare_uses(plan, found, which.start)
        return found, self._one_by_one(x, output.detach(), cotangents) if self.one_by_one else {}

    @torch.no_grad()
    def _compare_uses(self, plan: Plan, found: "_Lazy", first: int) -> None:
        """The few samples that are among these; a portion of the outputs is not enough to compare."""
        mine, theirs = plan.evidence.common(first, found.samples)
        weights = weights_of(found.by_output[0][0].new_empty(plan.cotangents))
        for index in (index for leaf in self._structured for index in plan.structured[leaf]):
            gradients = [each[index] for each in found.by_output]
            with self.network.weights.in_backward():
                seen = at_use(found.uses[index], plan.axes[index], gradients, weights, found.samples, theirs)
            plan.evidence.compare_use(index, mine, seen)

    def _one_by_one(self, x: Any, together: Tensor, cotangents: Tensor) -> dict[Leaf, Tensor]:
        samples = len(together)
        values = _empty(self.one_by_one, samples, len(cotangents))
        for i, counts in _turns(range(samples), self._processes):
            try:
                alone = self.network(some_samples(x, samples, slice(i, i + 1)), 1)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise SamplesCoupled from error
            Evidence(torch.tensor([i]), alone.detach(), []).compare_outputs(together, 0)
            if counts:
                _fill(values, i, alone, cotangents[:, None])
        return values


def _turns(samples: range, processes: Processes) -> Iterator[tuple[int, bool]]:
    """The samples of this process, and whether it has not run out of them: a forward pass of the user's may wait for
    the other processes, so that all make the same number."""
    for first in range(0, len(samples), processes.count):
        turn = first + processes.rank
        yield samples[min(turn, len(samples) - 1)], turn < len(samples)


def _few_samples(x: Any, samples: int, divisor: int) -> tuple[Any, Tensor]:
    """Some samples, spread over all, and their numbers; two at least, where there are two, to tell them apart."""
    which = torch.linspace(0, samples - 1, min(samples, max(2, _FEW // divisor))).round().long()
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
        factors = leaf_factors(self.weights, leaf, mine, self.samples, folded=self._folded)
        if factors is None:
            raise StructureChanged
        return factors


class Coupled:
    """Samples that see each other, as through the statistics of a batch: the derivative goes through the whole batch,
    one output after the other. (Several at once, batched by torch, take three times as long.)"""

    def __init__(self, network: Network, batches: Sequence[SampleBatch], processes: Processes = SINGLE_PROCESS) -> None:
        self.network, self._batches, self._processes = network, batches, processes
        self.sizes = [batch.asked for batch in batches]
        self.leaves = network.parameters
        self.one_by_one: list[Leaf] = []
        self.entries, self.entries_besides = sum(leaf.tensor.numel() for leaf in self.leaves), 0
        self.outputs = network(batches[0].x, batches[0].samples).shape[1]

    def gradients(self, group: int, which: slice, cotangents: Tensor, folded: bool) -> dict[Leaf, LeafFactors]:
        values = self._processes.run_on_all(lambda: self._run(self._batches[group], which, cotangents))
        return {leaf: Gradients.of(self._processes.sum(value), folded=folded) for leaf, value in values.items()}

    def _run(self, batch: SampleBatch, which: slice, cotangents: Tensor) -> dict[Leaf, Tensor]:
        """This process's part of the gradients; the others are zero."""
        output = self.network(batch.x, batch.samples)
        values = _empty(self.leaves, which.stop - which.start, len(cotangents))
        for i in range(which.start, which.stop)[self._processes.rank :: self._processes.count]:
            cotangent = cotangents.new_zeros(len(cotangents), *output.shape)
            cotangent[:, i] = cotangents
            _fill(values, i - which.start, output, cotangent)
        return values


def _empty(leaves: Sequence[Leaf], samples: int, outputs: int) -> dict[Leaf, Tensor]:
    return {leaf: leaf.tensor.new_zeros(samples, outputs, leaf.tensor.numel()) for leaf in leaves}


def _fill(values: dict[Leaf, Tensor], sample: int, output: Tensor, cotangents: Tensor) -> None:
    """Plain autograd, once for each cotangent."""
    tensors = [leaf.tensor for leaf in values]
    for h, cotangent in enumerate(cotangents):
        tick("pass")
        gradients = torch.autograd.grad(output, tensors, cotangent, retain_graph=True, allow_unused=True)
        for leaf, gradient in zip(values, gradients):
            if gradient is not None:
                values[leaf][sample, h] = gradient.detach().to_dense().reshape(-1)
