"""Compute the gradients of samples: from the structure of the layers, in a sample loop, or through the whole batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.processes import SINGLE_PROCESS, Processes, Refusal
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.model.checks import some_samples
from lightning_normtheory.ntk.directions import Cotangents, mixing_weights
from lightning_normtheory.ntk.factors import Gradients, LeafFactors
from lightning_normtheory.ntk.network import Leaf, Network
from lightning_normtheory.ntk.parameter_uses import Outer, Use
from lightning_normtheory.ntk.plan import Plan, backward, leaf_factors, make_plan
from lightning_normtheory.ntk.verification import SAMPLES_INTERACT, STRUCTURE_DIFFERS, Evidence, at_use

__all__ = ["CoupledSamples", "FactorsOf", "GradientSource", "IndependentSamples"]

# The number of samples on which the structure of a network is tried.
_FEW = 8
# Makes the factors of a leaf when called, not before: the patches of images are larger than the images.
FactorsOf = Callable[[Leaf], LeafFactors | Refusal]


class GradientSource(Protocol):
    """Computes the gradients of samples.

    Attributes:
        network: the network that is differentiated.
        sizes: the number of samples in each group; the samples of a group can be run together.
        leaves: the tensors with respect to which gradients are taken.
        one_by_one: those of them whose gradients are computed sample by sample although samples are independent.
        outputs: k.
        entries: the number of entries to be kept per sample and output.
        saved_entries: the number of entries to be kept per sample.
        scratch_entries: the number of entries of the factors of a leaf, per sample.
        parameters: p.
    """

    network: Network
    sizes: list[int]
    leaves: list[Leaf]
    one_by_one: list[Leaf]
    outputs: int
    entries: int
    saved_entries: int
    scratch_entries: int
    parameters: int

    def gradients(
        self, group: int, which: slice, cotangents: Tensor, folded: bool, before: int = 0
    ) -> FactorsOf | Refusal:
        """The gradients of Σ_h cotangent_h f_h for some samples of a group; ``before`` others came before these."""

    def release(self) -> None:
        """Free what is kept for further gradients."""


class IndependentSamples:
    """Samples that do not interact: any of them can be run together, and the structure of the layers is used.

    Args:
        groups: inputs with their numbers of samples.
        plans: one for each group.
        processes: share the samples of the sample loop.
    """

    def __init__(
        self,
        network: Network,
        groups: Sequence[tuple[Any, int]],
        plans: Sequence[Plan],
        processes: Processes = SINGLE_PROCESS,
    ) -> None:
        self.network, self._groups, self._plans, self._processes = network, groups, plans, processes
        self.sizes = [samples for _, samples in groups]
        self.outputs = plans[0].outputs
        one_by_one = [leaf for plan in plans for leaf in plan.one_by_one]
        # A leaf without structure in one group is left to the sample loop in all.
        everywhere = set.intersection(*(set(plan.structured) for plan in plans))
        elsewhere = (leaf for plan in plans for leaf in plan.structured if leaf not in everywhere)
        one_by_one += network.parameters_of(elsewhere)
        self._structured = [leaf for leaf in plans[0].structured if leaf in everywhere]
        self.one_by_one = list(dict.fromkeys(one_by_one))
        self.leaves = [*self._structured, *self.one_by_one]
        self.entries = max(plan.entries for plan in plans)
        self.entries += sum(leaf.tensor.numel() for leaf in self.one_by_one)
        self.saved_entries = max(plan.saved_entries for plan in plans)
        self.scratch_entries = max(plan.scratch_entries for plan in plans)
        self.parameters = sum(leaf.tensor.numel() for leaf in network.parameters)
        self._kept: tuple[tuple[int, slice], Tensor] | None = None
        # For each group, first sample and use: the sum over the first outputs, and how many these are.
        self._seen: dict[tuple[int, int, int], tuple[int, Tensor]] = {}

    @classmethod
    def prepare(
        cls,
        network: Network,
        groups: Sequence[tuple[Any, int]],
        cotangents_of: Callable[[int], Cotangents],
        *,
        structured: bool,
        batch: int,
        processes: Processes = SINGLE_PROCESS,
        divisor: int = 1,
    ) -> "IndependentSamples | Refusal":
        """Plan each group from a few samples, spread over it.

        Args:
            cotangents_of: makes the cotangents for k outputs.
            structured: whether to use the structure at all.
            batch: the number of samples of a training step; no more are tried.
            divisor: try this many times fewer samples.
        """
        plans = []
        for group in groups:
            few = _few_samples(*group, max(2, min(_FEW, batch) // divisor))
            plan = make_plan(network, *few, cotangents_of, structured=structured)
            if isinstance(plan, Refusal):
                return plan
            plans.append(plan)
        return cls(network, groups, plans, processes)

    def release(self) -> None:
        """Free the graph that is kept."""
        self._kept = None

    @property
    def plan(self) -> Plan:
        """The plan of the first group."""
        return self._plans[0]

    def interacts(self, batch: int) -> bool:
        """Whether the outputs of the few samples are other ones in a batch of this size."""
        x, total = self._groups[0]
        count = min(batch, total)
        together = self.network.with_leaves(some_samples(x, total, slice(count)), count)
        return not self.plan.evidence.same_outputs(together.detach(), 0)

    def gradients(
        self, group: int, which: slice, cotangents: Tensor, folded: bool, before: int = 0
    ) -> FactorsOf | Refusal:
        """
        Returns:
            A refusal if the few samples of the plan have other outputs or gradients here than by themselves, or if the
            graph is another one.
        """
        (x, total), plan = self._groups[group], self._plans[group]
        x = some_samples(x, total, which)
        found = self._processes.run_on_all(lambda: self._run(plan, x, (group, which), cotangents, folded, before))
        if isinstance(found, Refusal):
            return found
        structured, values = found
        looped = {leaf: Gradients.of(self._processes.sum(value), folded=folded) for leaf, value in values.items()}
        return lambda leaf: looped[leaf] if leaf in looped else structured(leaf)

    def _run(
        self, plan: Plan, x: Any, place: tuple[int, slice], cotangents: Tensor, folded: bool, before: int
    ) -> tuple[FactorsOf, dict[Leaf, Tensor]] | Refusal:
        """The factors of structured leaves, and this process's part of the sample loop."""
        _, which = place
        samples = which.stop - which.start
        output = self._forward(x, place)
        if not plan.evidence.same_outputs(output.detach(), which.start):
            return SAMPLES_INTERACT
        uses = plan.uses(self.network, output) if self._structured else []
        if uses is None:
            return STRUCTURE_DIFFERS
        by_output: list[list[Tensor]] = []
        if self._structured:
            for cotangent in cotangents:
                at_uses = backward(self.network, output, uses, cotangent.expand(samples, -1))
                if at_uses is None:
                    return STRUCTURE_DIFFERS
                by_output.append(at_uses)
            if not self._structure_holds(plan, uses, by_output, place, before):
                return STRUCTURE_DIFFERS
        values = self._loop(x, output.detach(), cotangents) if self.one_by_one else {}
        if isinstance(values, Refusal):
            return values

        def structured(leaf: Leaf) -> LeafFactors | Refusal:
            mine = [(uses[i], plan.axes[i], [g[i] for g in by_output]) for i in plan.structured[leaf]]
            factors = leaf_factors(self.network.weights, leaf, mine, samples, folded=folded)
            return STRUCTURE_DIFFERS if factors is None else factors

        return structured, values

    def _forward(self, x: Any, place: tuple[int, slice]) -> Tensor:
        """The outputs with their graph, which is kept for other outputs of the same samples."""
        if self.one_by_one:  # the samples that are run one by one meanwhile may invalidate it
            return self.network.with_leaves(x, place[1].stop - place[1].start)
        if self._kept is None or self._kept[0] != place:
            self._kept = None  # not two graphs at a time
            self._kept = place, self.network.with_leaves(x, place[1].stop - place[1].start)
        return self._kept[1]

    @torch.no_grad()
    def _structure_holds(
        self,
        plan: Plan,
        uses: Sequence[Use],
        by_output: Sequence[Sequence[Tensor]],
        place: tuple[int, slice],
        before: int,
    ) -> bool:
        """Check the axes of the samples and, for the samples of the plan among these, the gradients at all uses.

        Gradients are compared when those of the last outputs have come.
        """
        group, which = place
        samples = which.stop - which.start
        mine, theirs = plan.evidence.common(which.start, samples)
        weights = mixing_weights(plan.cotangents, by_output[0][0])[before : before + len(by_output)]
        compared = set()
        indices = [index for leaf in self._structured for index in plan.structured[leaf]]
        for index in sorted(indices, key=lambda index: not isinstance(uses[index].site, Outer)):
            gradients, axis = [each[index] for each in by_output], plan.axes[index]
            if axis is None or not axis.fits(gradients[0], samples):
                return False
            key = group, which.start, index
            so_far, earlier = self._seen.get(key, (0, None))
            if len(mine) == 0 or before not in (0, so_far):
                continue  # nothing to compare, or these outputs are in the sum
            if (uses[index].edge, axis) in compared and not isinstance(uses[index].site, Outer):
                continue  # a shift, for example, has the gradient of the scale
            compared.add((uses[index].edge, axis))
            with self.network.weights.in_backward():
                mixed, *entering = at_use(uses[index], axis, gradients, weights, samples, theirs)
            mixed = mixed if before == 0 or earlier is None else earlier + mixed
            after = before + len(by_output)
            if after < plan.cotangents:
                self._seen[key] = after, mixed
            elif not plan.evidence.same_at_use(index, mine, (mixed, *entering)):
                return False
            else:
                self._seen.pop(key, None)
        return True

    def _loop(self, x: Any, together: Tensor, cotangents: Tensor) -> dict[Leaf, Tensor] | Refusal:
        """Run the samples of this process one by one; the others stay zero."""
        samples = len(together)
        values = _empty(self.one_by_one, samples, len(cotangents))
        for i, counts in _turns(range(samples), self._processes):
            try:
                alone = self.network(some_samples(x, samples, slice(i, i + 1)), 1)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                return SAMPLES_INTERACT
            if not Evidence(torch.tensor([i], device="cpu"), alone.detach(), []).same_outputs(together, 0):
                return SAMPLES_INTERACT
            if counts:
                _fill(values, i, alone, cotangents[:, None])
        return values


def _turns(samples: range, processes: Processes) -> Iterator[tuple[int, bool]]:
    """The samples of this process, each with whether it counts.

    All processes run equally many, since a user's forward pass may wait for the other processes: a process that has no
    sample left repeats the last one, which does not count.
    """
    for first in range(0, len(samples), processes.count):
        turn = first + processes.rank
        yield samples[min(turn, len(samples) - 1)], turn < len(samples)


def _few_samples(x: Any, samples: int, few: int) -> tuple[Any, Tensor]:
    """A few samples, spread over all, with their indices; at least two, if there are two, to tell samples apart."""
    which = torch.linspace(0, samples - 1, min(samples, few), device="cpu").round().long()
    return some_samples(x, samples, which), which


class CoupledSamples:
    """Samples that interact, as through the statistics of a batch.

    The derivative goes through the whole batch, one output after the other. (Several at once, batched by torch, take
    three times as long.)
    """

    def __init__(self, network: Network, batches: Sequence[SampleBatch], processes: Processes = SINGLE_PROCESS) -> None:
        self.network, self._batches, self._processes = network, batches, processes
        self.sizes = [batch.asked for batch in batches]
        self.leaves = network.parameters
        self.one_by_one: list[Leaf] = []
        self.parameters = self.entries = sum(leaf.tensor.numel() for leaf in self.leaves)
        self.saved_entries = self.scratch_entries = 0
        self.outputs = network(batches[0].x, batches[0].samples).shape[1]

    def gradients(
        self, group: int, which: slice, cotangents: Tensor, folded: bool, before: int = 0
    ) -> FactorsOf | Refusal:
        values = self._processes.run_on_all(lambda: self._run(self._batches[group], which, cotangents))
        return {
            leaf: Gradients.of(self._processes.sum(value), folded=folded) for leaf, value in values.items()
        }.__getitem__

    def release(self) -> None:
        """Nothing is kept."""

    def _run(self, batch: SampleBatch, which: slice, cotangents: Tensor) -> dict[Leaf, Tensor]:
        """The gradients of this process's samples; the others stay zero."""
        output = self.network(batch.x, batch.samples)
        values = _empty(self.leaves, which.stop - which.start, len(cotangents))
        for i in range(which.start, which.stop)[self._processes.rank :: self._processes.count]:
            _fill(values, i - which.start, output, (_at_sample(i, row, len(output)) for row in cotangents))
        return values


def _empty(leaves: Sequence[Leaf], samples: int, outputs: int) -> dict[Leaf, Tensor]:
    return {leaf: leaf.tensor.new_zeros(samples, outputs, leaf.tensor.numel()) for leaf in leaves}


def _at_sample(sample: int, cotangent: Tensor, samples: int) -> Tensor:
    """The cotangent (k,) of one sample, and zero for the others of the batch."""
    whole = cotangent.new_zeros(samples, len(cotangent))
    whole[sample] = cotangent
    return whole


def _fill(values: dict[Leaf, Tensor], sample: int, output: Tensor, cotangents: Iterable[Tensor]) -> None:
    """Compute the gradients of one sample with plain autograd, one pass for each cotangent."""
    tensors = [leaf.tensor for leaf in values]
    for h, cotangent in enumerate(cotangents):
        tick("pass")
        gradients = torch.autograd.grad(output, tensors, cotangent, retain_graph=True, allow_unused=True)
        for leaf, gradient in zip(values, gradients):
            if gradient is not None:
                values[leaf][sample, h] = gradient.detach().to_dense().reshape(-1)
