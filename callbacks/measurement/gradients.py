"""Gradients of the loss and of the outputs on the probe, added up batch by batch for R and ‖ḡ‖²."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.passes import GRADIENT
from lightning_normtheory.callbacks.measurement.rsc_metric import RSCMetric
from lightning_normtheory.callbacks.measurement.smaller_batches import all_agree, cut_into_units
from lightning_normtheory.callbacks.samples.probe import ProbeBatch
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.record.wording import first_lines
from lightning_normtheory.rsc import RSC, gradients_of, rsc_of_one_batch
from lightning_normtheory.rsc_train import MOST_GROUPS, RSCTrain, rsc_of_set, spread_table, why_no_estimate

__all__ = ["GradientSums", "ProbeGradients", "measure_gradients", "sums_of_whole_batches"]

Gradients = Sequence[Tensor | None]
# Why a probe tells nothing about the training set.
_WEIGHTED = "the sampler draws samples with different probabilities, and the estimate is one of equal ones"


class ProbeGradients(NamedTuple):
    """What the gradients of the probe say.

    Attributes:
        rsc: R = ‖∇L‖²/L and ‖ḡ‖².
        cosine: cos(∇L, ḡ), κ of RSC for a step of gradient descent.
        train: estimates for the training set; ``None`` if ``why_not`` says why.
        why_not: why the training set cannot be estimated from the probe; empty if it can.
        outputs_failure: why the outputs could not be computed; empty if they could.
    """

    rsc: RSC
    cosine: float
    train: RSCTrain | None
    why_not: str
    outputs_failure: str


class GradientSums:
    """Adds up the gradients of the function's batches, and of other processes.

    Call `begin` before the first batch and `release` in the end.

    Args:
        units: the number of batches in all processes, from whose spread the training set is estimated; 1: it is not.
        strict: whether outputs that fail also fail the loss and its gradient, which need none.
    """

    def __init__(self, function: MeasuredFunction, units: int, *, strict: bool) -> None:
        self._function, self._units, self._strict = function, units, strict
        self._groups = min(units, MOST_GROUPS) if units > 1 else 0
        self._alone = len(function.batches) == 1 and function.processes.count == 1
        # Of a regular batch: only the last one is larger or smaller.
        self._size = max([1, *(batch.samples for batch in function.batches[:1])])
        self._metric: RSCMetric | None = None

    def begin(self) -> None:
        """Begin with the first batch, again if an attempt has failed."""
        self.release()
        function = self._function
        sizes = [p.numel() for p in function.theta.values()]
        self._metric = RSCMetric(sizes, self._groups, **function.summing).to(function.sum_device)
        self._failure = ""
        self._single: tuple[RSC, float] | None = None

    def release(self) -> None:
        """Free the sums."""
        if self._metric is not None:
            self._metric.release()
        self._metric = None

    def add(
        self,
        batch: ProbeBatch,
        loss: Tensor,
        outputs: Tensor | None,
        differentiate: Callable[[Tensor], Gradients],
        loss_gradients: Gradients | None = None,
    ) -> None:
        """Add a batch.

        Args:
            outputs: those of the pass that computed the loss; ``None``: they are computed in a pass of their own.
            differentiate: returns gradients of a scalar of that pass, by parameter. With outputs, it keeps the graph.
            loss_gradients: those of the loss, if they are known.
        """
        assert self._metric is not None
        group = min(batch.first // self._size, self._units - 1) * self._groups // self._units
        if loss_gradients is None:
            self._function.passes.add(GRADIENT, batch.samples)
        gradients = differentiate(loss) if loss_gradients is None else loss_gradients
        if not self._alone:  # add them up now: both gradients at once would take more memory
            if batch.counts:
                self._metric.update(batch.samples, loss, gradients, 0, [], group)
            gradients = loss_gradients = []
        count, predictor_gradients = self._predictor_gradients(batch, outputs, differentiate)
        if self._alone:
            self._single = rsc_of_one_batch(float(loss.detach()), gradients, count, predictor_gradients)
        elif batch.counts:
            self._metric.update(0, torch.zeros((), device="cpu"), [], count, predictor_gradients, group)

    def _predictor_gradients(
        self, batch: ProbeBatch, outputs: Tensor | None, differentiate: Callable[[Tensor], Gradients]
    ) -> tuple[float, Gradients]:
        """Return the number of outputs and the gradients of their sum; NaN if they are unknown or fail."""
        function = self._function
        if function.findings.outputs_problem:
            return math.nan, []
        function.passes.add(GRADIENT, batch.samples)
        # All processes or none: a pass of its own may wait for the other ones.
        shared = outputs is not None if function.processes.count == 1 else all_agree(function, outputs is not None)
        try:
            if outputs is not None and shared:
                return outputs.numel(), differentiate(outputs.sum())
            outputs = function.outputs_of(batch)
            return outputs.numel(), gradients_of(outputs.sum(), function.theta)
        except Exception as error:
            if self._strict or is_out_of_memory(error):
                raise
            self._failure = self._failure or first_lines(f"{type(error).__name__}: {error}")
            return math.nan, []

    def result(self) -> ProbeGradients:
        """Add up the sums of all processes."""
        function, metric = self._function, self._metric
        assert metric is not None
        rsc, cosine = self._single or self._over_processes(metric)
        table = spread_table(1) if metric.spread is None else metric.spread
        why_not = _WEIGHTED if function.weighted else why_no_estimate(table, function.left_out)
        train = None if why_not else rsc_of_set(rsc, table, function.left_out)
        return ProbeGradients(rsc, cosine, train, why_not, self._failure)

    def _over_processes(self, metric: RSCMetric) -> tuple[RSC, float]:
        function = self._function
        failures = function.processes.sum(torch.tensor([float(bool(self._failure))], device="cpu"))
        if float(failures) > 0:
            self._failure = self._failure or "the outputs failed in another process"
        if not any(batch.counts for batch in function.batches):  # fewer batches than processes: add zeros
            metric.update(0, torch.zeros((), device="cpu"), [], 0, [])
        return metric.compute(), metric.cosine


def _estimates(function: MeasuredFunction) -> bool:
    """Whether the training set is to be estimated from the spread of the probe."""
    return function.left_out > 0 and not function.weighted


def measure_gradients(function: MeasuredFunction, *, strict: bool) -> ProbeGradients:
    """Compute the gradients in passes of their own, in parts of batches where the estimates need them."""
    whole = function.batches
    units = cut_into_units(function) if _estimates(function) else 1
    sums = GradientSums(function, units, strict=strict)
    try:
        sums.begin()
        with function.measuring():
            parameters = function.theta
            for batch in function.batches:
                tick("batch")
                loss, outputs = function.loss_and_outputs(batch)
                differentiate = partial(gradients_of, parameters=parameters, retain_graph=outputs is not None)
                sums.add(batch, loss, outputs, differentiate)
                del loss, outputs  # before the next ones
        return sums.result()
    finally:
        function.batches = whole
        sums.release()


def sums_of_whole_batches(function: MeasuredFunction, *, strict: bool) -> GradientSums | None:
    """Return empty sums for passes over whole batches; ``None`` if the estimates need parts of batches."""
    whole = function.batches
    try:
        units = cut_into_units(function) if _estimates(function) else 1
        return GradientSums(function, units, strict=strict) if function.batches is whole else None
    finally:
        function.batches = whole
