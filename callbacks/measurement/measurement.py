"""One measurement, of an epoch or a step: a diagnostic asks it for a quantity, which is computed once."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_normtheory.callbacks.measurement.curvature import Curvature, HessianRequest
from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.generalization_gap import Gap, measure_gap
from lightning_normtheory.callbacks.measurement.kernels import Kernels
from lightning_normtheory.callbacks.measurement.rsc_metric import RSCMetric
from lightning_normtheory.callbacks.measurement.smaller_batches import cut_into_units, retry_smaller
from lightning_normtheory.callbacks.measurement.theory import KnownFacts, TheoryInputs
from lightning_normtheory.callbacks.samples.probe import ProbeBatch
from lightning_normtheory.callbacks.samples.validation_probe import ValidationProbe
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.record.wording import first_lines
from lightning_normtheory.rsc import RSC, gradients_of, rsc_of_one_batch
from lightning_normtheory.rsc_train import MOST_GROUPS, RSCTrain, rsc_of_set, spread_table, why_no_estimate

__all__ = ["Measurement"]


# Why a probe tells nothing about the training set.
_WEIGHTED = "the sampler draws samples with different probabilities, and the estimate is one of equal ones"


class _Found(NamedTuple):
    """R, cos(∇L, ḡ), the estimates for the training set, and why there are none."""

    rsc: RSC
    cosine: float
    train: RSCTrain | None
    why_not: str


class Measurement:
    """All quantities of one measurement. Each one is computed on first use, and leaves the run unchanged.

    Args:
        function: the trained function on the probe.
        validation: the samples for the generalization gap, if any.
        facts: what earlier measurements found out about the samples, the loss and the model; this one adds to it.
        hessian_requests: what the diagnostics need of the loss's Hessian, by their keys.
        strict: whether outputs that fail also fail `rsc`, whose loss and gradient need none.

    Attributes:
        trainer: the run's trainer.
        model: the module that is trained.
        processes: the processes that measure together.
        curvature: answers to the requests about the loss's Hessian, and the predictor's Hessian.
        kernels: tangent kernels.
        theory: what the theorems ask: structure, inputs, targets, recognized loss, step size.
        metrics: what the diagnostics before this one have measured, by name.
        outputs_failure: why the outputs could not be computed for `rsc`.
    """

    def __init__(
        self,
        function: MeasuredFunction,
        *,
        validation: ValidationProbe | None,
        facts: KnownFacts,
        hessian_requests: Mapping[str, HessianRequest],
        strict: bool = False,
    ) -> None:
        self.function = function
        self.trainer, self.model, self.processes = function.trainer, function.model, function.processes
        self.curvature = Curvature(function, hessian_requests)
        self.kernels = Kernels(function, facts)
        self.theory = TheoryInputs(function, facts)
        self._validation = validation
        self.metrics: dict[str, float] = {}
        self.outputs_failure = ""
        self._strict = strict

    @cached_property
    def loss(self) -> float:
        """The mean loss of the probe, computed without a gradient."""
        return retry_smaller(self.function, self._measure_loss)

    def _measure_loss(self) -> float:
        sums = torch.zeros(2, dtype=torch.float64, device="cpu")
        with self.function.measuring(), self.function.without_graph():
            for batch in self.function.batches:
                tick("batch")
                loss = float(self.function.loss_of(batch).detach())
                if batch.counts:
                    sums += batch.samples * torch.tensor([loss, 1.0], dtype=torch.float64, device="cpu")
        total, samples = self.processes.sum(sums).tolist()
        return total / samples

    @property
    def rsc(self) -> RSC:
        """R = ‖∇L‖²/L and ‖ḡ‖² of the probe."""
        return self._gradients.rsc

    @property
    def gradient_cosine(self) -> float:
        """cos(∇L, ḡ), κ of RSC for a step of gradient descent."""
        return self._gradients.cosine

    @property
    def rsc_train(self) -> RSCTrain | None:
        """Estimates of R, ‖∇L‖² and ‖ḡ‖² of the training set; ``None`` if `why_no_rsc_train` says why."""
        return self._gradients.train

    @property
    def why_no_rsc_train(self) -> str:
        """Why the training set cannot be estimated from the probe; empty if it can."""
        return self._gradients.why_not

    @property
    def mean_loss(self) -> float:
        """The mean loss of the probe, taken from `rsc` if that is known."""
        return self.rsc.loss if "_gradients" in vars(self) else self.loss

    @cached_property
    def _gradients(self) -> _Found:
        return retry_smaller(self.function, self._measure_rsc)

    def _measure_rsc(self) -> _Found:
        function = self.function
        whole, wanted = function.batches, function.left_out > 0 and not function.weighted
        units = cut_into_units(function) if wanted else 1
        groups = min(units, MOST_GROUPS) if units > 1 else 0
        sizes = [p.numel() for p in function.theta.values()]
        metric = RSCMetric(sizes, groups, **function.summing).to(function.sum_device)
        try:
            rsc, cosine = self._add_up_rsc(metric, units, groups)
            table = spread_table(1) if metric.spread is None else metric.spread
            why_not = _WEIGHTED if function.weighted else why_no_estimate(table, function.left_out)
            train = None if why_not else rsc_of_set(rsc, table, function.left_out)
            return _Found(rsc, cosine, train, why_not)
        finally:
            function.batches = whole
            metric.reset()  # frees the sums: a metric is in reference cycles

    def _add_up_rsc(self, metric: RSCMetric, units: int, groups: int) -> tuple[RSC, float]:
        function = self.function
        parameters = function.theta
        alone = len(function.batches) == 1 and self.processes.count == 1
        # Of a regular batch: only the last one is larger or smaller.
        size = max([1, *(batch.samples for batch in function.batches[:1])])
        with function.measuring():
            for batch in function.batches:
                tick("batch")
                group = min(batch.first // size, units - 1) * groups // units
                loss = function.loss_of(batch)
                loss_gradients = gradients_of(loss, parameters)
                if not alone:  # add them up now: both gradients at once would take more memory
                    if batch.counts:
                        metric.update(batch.samples, loss, loss_gradients, 0, [], group)
                    loss_gradients = []
                outputs, predictor_gradients = self._predictor_gradients(batch, parameters)
                if alone:
                    value = float(loss.detach())
                    result = rsc_of_one_batch(value, loss_gradients, outputs, predictor_gradients)
                elif batch.counts:
                    metric.update(0, torch.zeros((), device="cpu"), [], outputs, predictor_gradients, group)
                del predictor_gradients
        if alone:
            return result
        failures = self.processes.sum(torch.tensor([float(bool(self.outputs_failure))], device="cpu"))
        if float(failures) > 0:
            self.outputs_failure = self.outputs_failure or "the outputs failed in another process"
        if not any(batch.counts for batch in function.batches):  # fewer batches than processes: add zeros
            metric.update(0, torch.zeros((), device="cpu"), [], 0, [])
        return metric.compute(), metric.cosine

    def _predictor_gradients(
        self, batch: ProbeBatch, parameters: dict[str, nn.Parameter]
    ) -> tuple[float, Sequence[Tensor | None]]:
        """Return the number of outputs and the gradients of their sum; NaN if they are unknown or fail."""
        if self.function.findings.outputs_problem:
            return math.nan, []
        try:
            output = self.function.outputs_of(batch)
            return output.numel(), gradients_of(output.sum(), parameters)
        except Exception as error:
            if self._strict or is_out_of_memory(error):
                raise
            self.outputs_failure = self.outputs_failure or first_lines(f"{type(error).__name__}: {error}")
            return math.nan, []

    @cached_property
    def generalization_gap(self) -> Gap | None:
        """The mean loss of the validation probe minus that of the training probe; ``None`` without validation data.

        Raises:
            ValueError: that names the remedy, if the loss cannot be computed on a validation batch.
        """
        return measure_gap(self.function, self._validation)

    @property
    def training_samples(self) -> int | None:
        """n, the number of samples that are trained on; ``None`` if unknown, as for an iterable dataset."""
        return self.function.training_samples
