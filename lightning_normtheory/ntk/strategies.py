"""The strategies that compute a kernel, tried in order until one fits: the fastest first, the last fits always.

A strategy that does not fit returns a `Refusal` with the reason. All processes get the same refusal, so all of them try
the same strategy next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lightning_normtheory.measuring.processes import Processes, Refusal
from lightning_normtheory.model.batches import SampleBatch, joined
from lightning_normtheory.model.layers import with_batch_statistics
from lightning_normtheory.ntk.assembly import Assembled, assemble
from lightning_normtheory.ntk.directions import Cotangents
from lightning_normtheory.ntk.gradients import CoupledSamples, GradientSource, IndependentSamples
from lightning_normtheory.ntk.network import Network
from lightning_normtheory.ntk.result import Outputs
from lightning_normtheory.ntk.verification import SAMPLES_INTERACT, STRUCTURE_DIFFERS

__all__ = ["STRATEGIES", "KernelTask", "Strategy", "compute_kernel"]


@dataclass(frozen=True)
class KernelTask:
    """The kernel to compute.

    Attributes:
        directions: the number of random directions over the outputs; ``None``: all outputs.
        seed: of the directions.
        divisor: of the memory limit.
    """

    network: Network
    batches: Sequence[SampleBatch]
    outputs: Outputs
    layers: bool
    processes: Processes
    directions: int | None = None
    seed: int = 0
    divisor: int = 1

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
    refusals = {SAMPLES_INTERACT} if with_batch_statistics(task.network.model) else set()
    for strategy in STRATEGIES:
        if not refusals.isdisjoint(strategy.ruled_out_by):
            continue
        source = task.processes.run_on_all(partial(strategy.prepare, task))
        if isinstance(source, Refusal):
            refusals.add(source)
            continue
        assembled = assemble(
            source,
            task.cotangents(source.outputs),
            folded=task.outputs != "full",
            layers=task.layers,
            processes=task.processes,
            divisor=task.divisor,
        )
        if not isinstance(assembled, Refusal):
            return source, assembled
        refusals.add(assembled)
    raise AssertionError("unreachable: nothing rules out the last strategy")
