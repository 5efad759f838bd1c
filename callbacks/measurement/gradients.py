"""Gradients of the loss and of the outputs on the probe, added up batch by batch for R and ‖ḡ‖²."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.passes import GRADIENT, TO_LAYERS
from lightning_normtheory.callbacks.measurement.rsc_metric import RSCMetric
from lightning_normtheory.callbacks.measurement.smaller_batches import SAME_LOSS, all_agree, cut_into_units
from lightning_normtheory.callbacks.samples.probe import ProbeBatch
from lightning_normtheory.linalg.inner_products import dot
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.ntk.batch_gram import BatchGram
from lightning_normtheory.ntk.network import RecordingWeights
from lightning_normtheory.record.wording import first_lines
from lightning_normtheory.rsc import RSC, gradients_of, rsc_of, rsc_of_one_batch
from lightning_normtheory.rsc_train import (
    MOST_GROUPS,
    RSCTrain,
    mean_squares,
    rsc_of_set,
    same_spread,
    spread_table,
    table_of_grams,
    why_no_estimate,
)

__all__ = [
    "GradientSums",
    "ProbeGradients",
    "StructuredSums",
    "measure_gradients",
    "same_gradients",
    "sums_of_whole_batches",
]

Gradients = Sequence[Tensor | None]
# Parameters from which on the gradients of parts of batches come from the structure of the layers, if they can.
_LARGE = 2**18
# ‖Σ∇_i‖² relative to Σ‖∇_i‖²: what rounding explains.
_SAME_SQUARE = 1e-4
# The same, below which a sum of inner products in float32 is too inexact.
_LEAST_SQUARE = 1e-6
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
        table: the spread of the probe that the estimates rest on (`spread_table`).
    """

    rsc: RSC
    cosine: float
    train: RSCTrain | None
    why_not: str
    outputs_failure: str
    table: Tensor


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
        group = _group(batch, self._size, self._units, self._groups)
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
        return _probe_gradients(function, rsc, cosine, table, self._failure)

    def _over_processes(self, metric: RSCMetric) -> tuple[RSC, float]:
        function = self._function
        failures = function.processes.sum(torch.tensor([float(bool(self._failure))], device="cpu"))
        if float(failures) > 0:
            self._failure = self._failure or "the outputs failed in another process"
        if not any(batch.counts for batch in function.batches):  # fewer batches than processes: add zeros
            metric.update(0, torch.zeros((), device="cpu"), [], 0, [])
        return metric.compute(), metric.cosine


def _probe_gradients(
    function: MeasuredFunction, rsc: RSC, cosine: float, table: Tensor, failure: str = ""
) -> ProbeGradients:
    why_not = _WEIGHTED if function.weighted else why_no_estimate(table, function.left_out)
    train = None if why_not else rsc_of_set(rsc, table, function.left_out)
    return ProbeGradients(rsc, cosine, train, why_not, failure, table)


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


def same_gradients(first: ProbeGradients, second: ProbeGradients) -> bool:
    """Whether two ways to compute the same gradients agree but for rounding."""
    squares = [(each.rsc.grad_norm_sq, each.rsc.mean_predictor_grad_norm_sq) for each in (first, second)]
    scales = mean_squares(second.table)
    close = all(
        (math.isnan(a) and math.isnan(b)) or abs(a - b) <= _SAME_SQUARE * scale for a, b, scale in zip(*squares, scales)
    )
    large = all(b > _SAME_SQUARE * scale for b, scale in zip(squares[1], scales))
    same_cosine = not large or abs(first.cosine - second.cosine) <= _SAME_SQUARE
    return close and same_cosine and same_spread(first.table, second.table)


def sums_of_whole_batches(function: MeasuredFunction, *, strict: bool) -> "GradientSums | StructuredSums | None":
    """Return empty sums for passes over whole batches; ``None`` if the estimates need passes over parts of batches."""
    whole = function.batches
    try:
        units = cut_into_units(function) if _estimates(function) else 1
        if function.batches is whole:
            return GradientSums(function, units, strict=strict)
        size = sum(p.numel() for p in function.theta.values())
        if function.processes.count > 1 or function.findings.structured is False or size < _LARGE:
            return None
        return StructuredSums(function, function.batches)
    finally:
        function.batches = whole


class StructuredSums:
    """The same from passes over whole batches and the structure of the layers, in one process.

    Where a model has many parameters, forming the gradients of parts of batches and of the outputs takes most of the
    time. Call `begin` before the first batch and `release` in the end.

    Args:
        parts: the parts of all batches, in order.

    Attributes:
        weights: the context of the passes.
    """

    def __init__(self, function: MeasuredFunction, parts: Sequence[ProbeBatch]) -> None:
        self._function, self._parts = function, parts
        self.weights = RecordingWeights(light=True)
        self.release()

    def begin(self) -> None:
        """Begin with the first batch, again if an attempt has failed."""
        self.release()
        self.weights.recording = True

    def release(self) -> None:
        """Free everything."""
        self.weights.forget()
        self.weights.recording = False
        self._gram = BatchGram(self.weights, list(self._function.theta.values()), quantities=2)
        self._loss, self._outputs = 0.0, dict[int, Tensor]()

    def edges(self, loss: Tensor) -> Sequence[GradientEdge]:
        """Return the places in the graph of a batch's mean loss where gradients are needed."""
        return self._gram.edges(loss)

    def add(
        self,
        batch: ProbeBatch,
        loss: Tensor,
        outputs: Tensor | None,
        at_edges: Gradients,
        differentiate: Callable[[Tensor, Sequence[GradientEdge]], Gradients],
    ) -> None:
        """Add a batch.

        Args:
            outputs: those of the pass that computed the loss.
            at_edges: the gradients of the mean loss at the last edges.
            differentiate: returns those of another scalar of that pass, whose graph is kept.
        """
        if outputs is None:  # they are computed in a pass of their own, which has other edges
            self._gram.refused = True
        if self._gram.refused or outputs is None:
            return
        self._function.passes.add(TO_LAYERS, batch.samples)
        of_outputs = differentiate(outputs.sum(), self._gram.last_edges)
        self._gram.add([at_edges, of_outputs], batch.samples, [float(batch.samples), 1.0])
        self._outputs[batch.first] = outputs.detach()
        self._loss += batch.samples * float(loss.detach())

    def result(self, gradient: Tensor) -> ProbeGradients | None:
        """Return what the sums say; ``None`` if the structure does not give ∇L or a spread, or if gradients cancel."""
        gram, function = self._gram.gram(), self._function
        numbers = {each.numel() / batch.samples for batch, each in self._by_batch()}
        if gram is None or len(numbers) != 1:
            return None
        k, n = numbers.pop(), gram.shape[-1]
        of_loss, of_outputs = gram[0, 0], gram[1, 1]
        loss, square = self._loss / n, dot(gradient, gradient)
        if not abs(float(of_loss.sum()) / n**2 - square) <= _SAME_SQUARE * float(of_loss.diagonal().mean()):
            return None
        sums = n**2 * square, float(of_outputs.sum())
        if any(each < _LEAST_SQUARE * n * float(a.diagonal().sum()) for each, a in zip(sums, (of_loss, of_outputs))):
            return None
        with function.without_graph():
            losses = function.losses_of_outputs([(part, self._outputs_of(part)) for part in self._parts])
        samples = [part.samples for part in self._parts]
        mean = sum(count * each for count, each in zip(samples, losses)) / n
        if not abs(mean - loss) <= SAME_LOSS * abs(loss):
            return None
        norms = math.sqrt(sums[0] * sums[1])
        cosine = min(max(float(gram[0, 1].sum()) / norms, -1.0), 1.0) if norms > 0 else math.nan
        table = table_of_grams(self._groups(), samples, losses, of_loss, round(k), of_outputs)
        return _probe_gradients(function, rsc_of(loss, square, sums[1] / (n * k) ** 2), cosine, table)

    def _by_batch(self) -> Iterator[tuple[ProbeBatch, Tensor]]:
        return ((batch, self._outputs[batch.first]) for batch in self._function.batches if batch.first in self._outputs)

    def _outputs_of(self, part: ProbeBatch) -> Tensor | None:
        """The outputs of a part of a batch, if those of the whole batch have a row for each sample."""
        for batch, outputs in self._by_batch():
            begin = part.first - batch.first
            if len(outputs) == batch.samples and 0 <= begin <= batch.samples - part.samples:
                return outputs[begin : begin + part.samples]
        return None

    def _groups(self) -> list[int]:
        """The rows of the table, as in `GradientSums` for the parts."""
        units = len(self._parts)
        groups = min(units, MOST_GROUPS)
        return [_group(part, max(1, self._parts[0].samples), units, groups) for part in self._parts]


def _group(batch: ProbeBatch, size: int, units: int, groups: int) -> int:
    """The group of a batch, where regular ones have ``size`` samples: only the last one is larger or smaller."""
    return min(batch.first // size, units - 1) * groups // units
