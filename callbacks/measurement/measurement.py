"""One measurement, of an epoch or a step: a diagnostic asks it for a quantity, which is computed once."""

from collections.abc import Mapping
from functools import cached_property, partial

import torch

from lightning_normtheory.callbacks.measurement.curvature import Curvature, HessianRequest
from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.generalization_gap import Gap, measure_gap
from lightning_normtheory.callbacks.measurement.gradients import (
    ProbeGradients,
    measure_gradients,
    same_gradients,
    sums_of_whole_batches,
)
from lightning_normtheory.callbacks.measurement.kernels import Kernels
from lightning_normtheory.callbacks.measurement.smaller_batches import retry_smaller
from lightning_normtheory.callbacks.measurement.theory import KnownFacts, TheoryInputs
from lightning_normtheory.callbacks.samples.validation_probe import ValidationProbe
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.rsc import RSC
from lightning_normtheory.rsc_train import RSCTrain

__all__ = ["Measurement"]

# The structure of the layers is compared with passes over parts of batches at the first, and then after so many
# measurements.
_VERIFIED = 16


class Measurement:
    """All quantities of one measurement. Each one is computed on first use, and leaves the run unchanged.

    Args:
        function: the trained function on the probe.
        validation: the samples for the generalization gap, if any.
        facts: what earlier measurements found out about the samples, the loss and the model; this one adds to it.
        hessian_requests: what the diagnostics need of the loss's Hessian, by their keys.
        wants_gradients: whether a diagnostic asks for `rsc`: the pass of the Hessian then also gives it.
        strict: whether outputs that fail also fail `rsc`, whose loss and gradient need none.

    Attributes:
        trainer: the run's trainer.
        model: the module that is trained.
        processes: the processes that measure together.
        curvature: answers to the requests about the loss's Hessian, and the predictor's Hessian.
        kernels: tangent kernels.
        theory: what the theorems ask: structure, inputs, targets, recognized loss, step size.
        metrics: what the diagnostics before this one have measured, by name.
    """

    def __init__(
        self,
        function: MeasuredFunction,
        *,
        validation: ValidationProbe | None,
        facts: KnownFacts,
        hessian_requests: Mapping[str, HessianRequest],
        wants_gradients: bool = False,
        strict: bool = False,
    ) -> None:
        self.function = function
        self.trainer, self.model, self.processes = function.trainer, function.model, function.processes
        sums = partial(sums_of_whole_batches, function, strict=strict) if wants_gradients else None
        self.curvature = Curvature(function, hessian_requests, sums)
        self.kernels = Kernels(function, facts)
        self.theory = TheoryInputs(function, facts)
        self._validation = validation
        self.metrics: dict[str, float] = {}
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
        return self.rsc.loss if self._knows_gradients else self.loss

    @property
    def _knows_gradients(self) -> bool:
        """Whether `rsc` takes no pass. The same in all processes, whichever of them has asked for it."""
        return self._usable_gradients is not None or "_gradients" in vars(self)

    @property
    def _usable_gradients(self) -> ProbeGradients | None:
        """Those of the pass that the Hessian has made before, unless their spread has to be verified first."""
        verified = not self.curvature.uses_structure or bool(self.function.findings.structured)
        return self.curvature.gradients if verified else None

    @property
    def outputs_failure(self) -> str:
        """Why the outputs could not be computed for `rsc`; empty if they could."""
        return self._gradients.outputs_failure

    @cached_property
    def _gradients(self) -> ProbeGradients:
        """The gradients of the pass that the Hessian has made before, or of passes of their own."""
        found, findings = self._usable_gradients, self.function.findings
        if found is not None:
            findings.structured_uses += self.curvature.uses_structure
            if self.curvature.uses_structure and findings.structured_uses % _VERIFIED == 0:
                findings.structured = None  # compare again: a layer without gradients then may have some now
            return found
        own = retry_smaller(self.function, partial(measure_gradients, self.function, strict=self._strict))
        if self.curvature.uses_structure:
            found = self.curvature.gradients
            findings.structured = found is not None and same_gradients(found, own)
        return found if found is not None and findings.structured else own

    @cached_property
    def generalization_gap(self) -> Gap | None:
        """The mean loss of the validation probe minus that of the training probe; ``None`` without validation data.

        Raises:
            ValueError: that names the remedy, if the loss cannot be computed on a validation batch.
        """
        known = self._knows_gradients and self.function.predicts_as_trained
        return measure_gap(self.function, self._validation, train_loss=self.rsc.loss if known else None)

    @property
    def training_samples(self) -> int | None:
        """n, the number of samples that are trained on; ``None`` if unknown, as for an iterable dataset."""
        return self.function.training_samples
