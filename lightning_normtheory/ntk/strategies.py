"""The strategies that compute a kernel, tried in order until one fits: the fastest first, the last fits always.

A strategy that does not fit returns a `Refusal` with the reason. All processes get the same refusal, so all of them try
the same strategy next.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lightning_normtheory.measuring.processes import Processes, Refusal
from lightning_normtheory.model.batches import SampleBatch, joined
from lightning_normtheory.model.layers import with_batch_statistics
from lightning_normtheory.ntk.assembly import Assembled, assemble
from lightning_normtheory.ntk.directions import Cotangents
from lightning_normtheory.ntk.gradients import CoupledSamples, GradientSource, IndependentSamples
from lightning_normtheory.ntk.memory import portions_within_limit
from lightning_normtheory.ntk.network import Network
from lightning_normtheory.ntk.result import Outputs
from lightning_normtheory.ntk.verification import SAMPLES_INTERACT, STRUCTURE_DIFFERS

__all__ = ["MOST_ROWS", "STRATEGIES", "Effort", "KernelTask", "Strategy", "choose_effort", "compute_kernel"]


@dataclass(frozen=True)
class KernelTask:
    """The kernel to compute.

    Attributes:
        directions: the number of random directions over the outputs; ``None``: all outputs.
        seed: of the directions.
        full: the number of first samples of which the kernel of all outputs is to come along.
        divisor: of the memory limit.
    """

    network: Network
    batches: Sequence[SampleBatch]
    outputs: Outputs
    layers: bool
    processes: Processes
    directions: int | None = None
    seed: int = 0
    full: int = 0
    divisor: int = 1

    @property
    def batch(self) -> int:
        """The number of samples of a training step."""
        return max(batch.samples for batch in self.batches)

    def cotangents(self, k: int) -> Cotangents:
        """The combinations of k outputs that are differentiated."""
        return Cotangents(self.outputs, k, self.directions, self.seed, self.network.parameters[0].tensor.detach())


class Strategy(NamedTuple):
    """A way to compute gradients of samples, and the refusals, its own or of earlier strategies, that rule it out."""

    prepare: Callable[[KernelTask], GradientSource | Refusal]
    ruled_out_by: frozenset[Refusal]


def _from_structure(task: KernelTask, *, structured: bool = True) -> GradientSource | Refusal:
    return IndependentSamples.prepare(
        task.network,
        joined(task.batches),
        task.cotangents,
        structured=structured,
        batch=task.batch,
        processes=task.processes,
        divisor=task.divisor,
    )


def _through_the_batch(task: KernelTask) -> GradientSource | Refusal:
    return CoupledSamples(task.network, task.batches, task.processes)


STRATEGIES = (
    Strategy(_from_structure, frozenset({STRUCTURE_DIFFERS, SAMPLES_INTERACT})),
    # Sample by sample.
    Strategy(partial(_from_structure, structured=False), frozenset({SAMPLES_INTERACT})),
    Strategy(_through_the_batch, frozenset()),
)


def compute_kernel(task: KernelTask) -> tuple[GradientSource, Assembled]:
    """Compute the kernel with the first strategy that fits; return it with the source of its gradients."""
    refusals: set[Refusal] = set()
    for source in _sources(task, refusals):
        assembled = assemble(
            source,
            task.cotangents(source.outputs),
            folded=task.outputs != "full",
            layers=task.layers,
            batch=task.batch,
            full=task.full,
            processes=task.processes,
            divisor=task.divisor,
        )
        source.release()
        if not isinstance(assembled, Refusal):
            return source, assembled
        refusals.add(assembled)
    raise AssertionError("unreachable: nothing rules out the last strategy")


def _sources(task: KernelTask, refusals: set[Refusal]) -> Iterator[GradientSource]:
    """The sources of gradients that fit, in their order. The caller adds reasons to ``refusals`` on the way."""
    if with_batch_statistics(task.network.model):
        refusals.add(SAMPLES_INTERACT)
    for strategy in STRATEGIES:
        if refusals.isdisjoint(strategy.ruled_out_by):
            source = task.processes.run_on_all(partial(strategy.prepare, task))
            if isinstance(source, Refusal):
                refusals.add(source)
            else:
                yield source


# -- how much to compute -----------------------------------------------------------------------------------------------

# Counts are in units of a forward pass of one sample. A backward pass to the uses of the parameters takes as much, one
# with the gradients of the parameters twice as much. A pass also reads every parameter once, which takes as long as
# this many multiplications by it.
_READING = 16
# What a pass takes beside its multiplications, in multiplications: a fraction of a millisecond.
_OVERHEAD = 5_000_000
# A gradient of fewer multiplications, about a tenth of a second, is no base for a cost: nobody waits for it.
_SHORT = 10**9
MOST_ROWS, _BY_DIRECTION_BYTES = 2**14, 2**28  # of a full kernel; of the kernels of single directions
_DIRECTIONS = (32, 16, 8, 4, 2, 1)


class Effort(NamedTuple):
    """What to compute, so that the kernel stays within a cost.

    Attributes:
        directions: the number of random directions; ``None``: all outputs.
        samples: the number of samples.
        cost: if it was reckoned, in gradients of the loss on the whole probe, with a repetition in float64.
        outputs: k, if it is known.
    """

    directions: int | None
    samples: int
    cost: float = math.nan
    outputs: int = 0


def choose_effort(task: KernelTask, probe: int, most: float) -> Effort:
    """Choose the most accurate kernel that costs at most ``most`` gradients of the probe, from counts alone.

    All outputs, or else random directions, as many as there is time for, or else fewer samples. The outputs ``"sum"``
    and ``"full"`` are kept; of the latter only the size of the matrix is limited.

    Args:
        probe: the number of samples of the probe.

    Raises:
        ValueError: if one sample has too many outputs for a full kernel.
    """
    refusals: set[Refusal] = set()
    for source in _sources(task, refusals):
        if isinstance(source, IndependentSamples) and source.interacts(max(2, task.batch // task.divisor)):
            refusals.add(SAMPLES_INTERACT)
            continue
        break
    k, n = source.outputs, sum(source.sizes)
    if task.outputs == "full":
        if k > MOST_ROWS:
            raise ValueError(
                f"The full kernel has a row for each of {k} outputs of a sample, but at most {MOST_ROWS} are computed."
                " Use outputs='trace'."
            )
        n = min(n, MOST_ROWS // k)
        return Effort(None, n, _cost(task, source, k, n, probe), k)
    choices: list[tuple[int | None, int]] = [(None, n)]
    if task.outputs == "trace":
        choices += [(m, n) for m in _DIRECTIONS if m < k and 8 * m * n * n <= _BY_DIRECTION_BYTES]
    directions = choices[-1][0]
    while n > 2:
        n = -(-n // 2)
        choices.append((directions, n))
    for directions, n in choices:
        cost = _cost(task, source, directions or (k if task.outputs == "trace" else 1), n, probe)
        if cost <= most:
            break
    return Effort(directions, n, cost, k)


def _cost(task: KernelTask, source: GradientSource, cotangents: int, samples: int, probe: int) -> float:
    """Reckon the cost of a kernel in gradients of the probe, with a repetition in float64 where that may come."""
    itemsize = source.leaves[0].tensor.element_size()
    slices, portions = portions_within_limit(
        source, cotangents, task.outputs != "full", itemsize, batch=task.batch, samples=samples
    )
    counted = source.plan.multiplications if isinstance(source, IndependentSamples) else 0
    forward = max(counted, source.parameters)
    fixed = (_READING * source.parameters + _OVERHEAD) / forward
    # Each portion is run for itself and again for every portion before it.
    runs = [(portion.samples, 1 + index) for index, portion in enumerate(portions)]
    total = 0.0
    if isinstance(source, IndependentSamples):
        passes = sum(times * (count + fixed) for count, times in runs)
        # A forward pass serves the next outputs of the same samples.
        total += passes * ((len(slices) if len(portions) > 1 else 1) + cotangents)
        repeated = sum(times * count for count, times in runs)
        total += cotangents * sum(each.of(samples, repeated) for each in source.plan.gram) / forward
        if source.one_by_one:
            total += repeated * (1 + fixed) * (len(slices) + 2 * cotangents)
    else:
        whole = task.batch + fixed
        total += sum(times * whole * (len(slices) + 2 * count * cotangents) for count, times in runs)
    gradient = max(3 * probe * (1 + fixed / task.batch), _SHORT / forward)
    return total * (1 if itemsize == 8 else 3) / gradient
