"""`TheoremVerdictsDiagnostic`: which theorems the network fits, and at every measurement whether the run does."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lightning_normtheory.callbacks.engine.cost import FORWARD, SHARED, Sizes
from lightning_normtheory.callbacks.engine.diagnostic import SAMPLE_SETTINGS, Diagnostic
from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.gradient_steps import gradient_steps
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.output.messages import say
from lightning_normtheory.record.theorem_status import TheoremStatus, theorem_summary
from lightning_normtheory.theorems.verdicts import Facts, Run, judge_run, judge_theorems
from lightning_normtheory.theorems.verdicts.facts import dropout_layers

__all__ = ["TheoremVerdictsDiagnostic"]


class TheoremVerdictsDiagnostic(Diagnostic):
    """The verdict on each theorem. Belongs after the certificate, whose metrics it reads.

    At fit start every assumption about the network and its data is checked. After each measurement the run is judged
    for those theorems whose network this is: ``theorem__…`` is 1 if it fits, too.

    Args:
        samples: the number of samples of the probe on which the forms of DGM and BN are examined.
        delta: δ of DGM's theorems, as in `WeightNormTheory`.
    """

    title = "theorems"
    key = "theorems"
    metrics = ()
    shared = ("problem",)

    def __init__(self, samples: int = 128, delta: float = 0.05) -> None:
        self._samples, self._delta = samples, delta
        self._theorems: tuple[TheoremStatus, ...] = ()
        self._asked_rate: float | None = None
        self._examined = False

    def start_cost(self, sizes: Sizes) -> float:
        known = SHARED["problem"](sizes) + FORWARD * (1 + sizes.share(self._samples))
        return known if sizes.outputs else 0.0

    def start(self, measurement: Measurement) -> None:
        if not measurement.function.findings.outputs_problem:
            self._examine(measurement)

    def _examine(self, measurement: Measurement) -> None:
        theory = measurement.theory
        facts = Facts(
            replace(theory.problem, loss=theory.loss),
            theory.dgm_form(self._samples),
            theory.batchnorm_form(self._samples),
            theory.targets(self._samples),
            dropout_layers(measurement.model),
            measurement.training_samples,
            _examined(measurement.function),
            theory.is_random(),
            self._delta,
        )
        theorem = facts.batchnorm_theorem
        self._asked_rate = None if theorem is None else theorem.learning_rate
        self._theorems = judge_theorems(facts, self._run(measurement, {}))
        # If the loss is not finite, it was not recognized: look again.
        self._examined = math.isfinite(measurement.mean_loss)
        if self._examined:
            say(measurement.trainer, theorem_summary(self._theorems))

    def measure(self, measurement: Measurement) -> dict[str, float]:
        self.reasons = {}
        if measurement.function.findings.outputs_problem:
            return {}
        if not self._examined:
            self._examine(measurement)  # an iterable dataset, or no finite loss at the start
        fitting = [row for row in self._theorems if row.verdict in ("fits", "applies")]
        if not fitting:
            return {}
        run = self._run(measurement, measurement.metrics)
        judged = {f"theorem__{row.key}": judge_run(row, run) for row in fitting}
        self.reasons = {name: why for name, row in judged.items() if (why := _why(row))}
        return {name: float(row.verdict == "applies") for name, row in judged.items()}

    def _run(self, measurement: Measurement, values: Mapping[str, float]) -> Run:
        """Collect what the theorems ask about the run; with the metrics of this measurement, if it has any."""
        function, n = measurement.function, measurement.training_samples
        steps = gradient_steps(function)
        used = _examined(function)
        kernel = None
        if values and any(row.key.startswith("dgm") and row.verdict == "fits" for row in self._theorems):
            kernel = measurement.kernels.tangent_kernel(self._samples, "trace")
        return Run(
            optimizer=steps.other,
            batches=steps.batches,
            rate=steps.rate,
            probe="" if used == n else f"measured on {used} of {n or 'an unknown number of'} samples",
            batch=steps.batch,
            epoch=measurement.trainer.current_epoch + 1,
            values=values,
            lambda_max=None if kernel is None else kernel.lambda_max,
            kernel_samples=0 if kernel is None else len(kernel.over_samples),
            samples=n,
            loss=measurement.theory.problem.loss,
            asked_rate=self._asked_rate,
        )

    def notes(self) -> dict[str, Any]:
        return {"theorems": [row.as_dict() for row in self._theorems]}

    def state_dict(self) -> dict[str, Any]:
        return {
            "theorems": [row.as_dict() for row in self._theorems],
            "asked_rate": self._asked_rate,
            "examined": self._examined,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._theorems = tuple(map(TheoremStatus.from_dict, state.get("theorems", [])))
        self._asked_rate = state.get("asked_rate")
        self._examined = state.get("examined", False)

    def forget(self, changed: Collection[str]) -> str:
        if (SAMPLE_SETTINGS | {"loss", "predict", "parameters", "ntk_samples", "delta"}) & set(changed):
            self._examined = False  # check the theorems again
        return ""


def _examined(function: MeasuredFunction) -> int:
    """Return the number of samples of the probe."""
    return sum(batch.samples for batch in function.all_batches)


def _why(row: TheoremStatus) -> str:
    """Return what fails in the run, and what of it cannot be checked."""
    unchecked = [f"not checked: {each.name} ({each.found})" for each in row.unchecked if each.part == "run"]
    return "; ".join([*(each.found for each in row.failing("run")), *unchecked])
