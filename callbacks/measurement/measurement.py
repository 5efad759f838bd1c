"""One measurement, of an epoch or a step: a diagnostic asks it for a quantity, which is computed once."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_normtheory.callbacks.measurement.curvature import Curvature, HessianRequest
from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.generalization_gap import Gap, measure_gap
from lightning_normtheory.callbacks.measurement.kernels import Kernels
from lightning_normtheory.callbacks.measurement.rsc_metric import RSCMetric
from lightning_normtheory.callbacks.measurement.smaller_batches import retry_smaller
from lightning_normtheory.callbacks.measurement.theory import KnownFacts, TheoryInputs
from lightning_normtheory.callbacks.samples.probe import ProbeBatch
from lightning_normtheory.callbacks.samples.validation_probe import ValidationProbe
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.record.wording import first_lines
from lightning_normtheory.rsc import RSC, gradients_of, rsc_of_one_batch

__all__ = ["Measurement"]


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
        return self._rsc_and_cosine[0]

    @property
    def gradient_cosine(self) -> float:
        """cos(∇L, ḡ), κ of RSC for a step of gradient descent."""
        return self._rsc_and_cosine[1]

    @property
    def mean_loss(self) -> float:
        """The mean loss of the probe, taken from `rsc` if that is known."""
        return self.rsc.loss if "_rsc_and_cosine" in vars(self) else self.loss

    @cached_property
    def _rsc_and_cosine(self) -> tuple[RSC, float]:
        return retry_smaller(self.function, self._measure_rsc)

    def _measure_rsc(self) -> tuple[RSC, float]:
        function = self.function
        metric = RSCMetric([p.numel() for p in function.theta.values()], **function.summing).to(function.sum_device)
        try:
            return self._add_up_rsc(metric)
        finally:
            metric.reset()  # frees the sums: a metric is in reference cycles

    def _add_up_rsc(self, metric: RSCMetric) -> tuple[RSC, float]:
        function = self.function
        parameters = function.theta
        alone = len(function.batches) == 1 and self.processes.count == 1
        with function.measuring():
            for batch in function.batches:
                tick("batch")
                loss = function.loss_of(batch)
                loss_gradients = gradients_of(loss, parameters)
                if not alone:  # add them up now: both gradients at once would take more memory
                    if batch.counts:
                        metric.update(batch.samples, loss, loss_gradients, 0, [])
                    loss_gradients = []
                outputs, predictor_gradients = self._predictor_gradients(batch, parameters)
                if alone:
                    value = float(loss.detach())
                    result = rsc_of_one_batch(value, loss_gradients, outputs, predictor_gradients)
                elif batch.counts:
                    metric.update(0, torch.zeros((), device="cpu"), [], outputs, predictor_gradients)
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
