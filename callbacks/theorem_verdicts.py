"""`TheoremVerdictsDiagnostic`: which theorems apply to the network, printed at fit start and stored in the run's file."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from lightning_normtheory.callbacks.engine.cost import FORWARD, SHARED, Sizes
from lightning_normtheory.callbacks.engine.diagnostic import SAMPLE_SETTINGS, Diagnostic
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.output.messages import say
from lightning_normtheory.record.theorem_status import TheoremStatus, theorem_summary
from lightning_normtheory.theorems.applicability import check_theorems, why_not_batchnorm

__all__ = ["TheoremVerdictsDiagnostic"]


class TheoremVerdictsDiagnostic(Diagnostic):
    """The verdict on each theorem. Belongs after the certificate, whose quantities it reads.

    Args:
        samples: the number of samples of the probe on which the forms of DGM and BN are examined.
    """

    title = "theorems"
    key = "theorems"
    metrics = ()
    shared = ("problem",)

    def __init__(self, samples: int = 128) -> None:
        self._samples = samples
        self._theorems: tuple[TheoremStatus, ...] = ()
        self._examined = False

    def start_cost(self, sizes: Sizes) -> float:
        known = SHARED["problem"](sizes) + FORWARD * (1 + sizes.share(self._samples))
        return known if sizes.outputs else 0.0

    def start(self, measurement: Measurement) -> None:
        if not measurement.function.findings.outputs_problem:
            self._examine(measurement)

    def measure(self, measurement: Measurement) -> dict[str, float]:
        if not self._examined and not measurement.function.findings.outputs_problem:
            self._examine(measurement)  # an iterable dataset, or no finite loss at the start
        return {}

    def _examine(self, measurement: Measurement) -> None:
        theory = measurement.theory
        dgm = theory.dgm_form(self._samples)
        self._theorems = check_theorems(
            theory.problem,
            dgm=dgm if isinstance(dgm, str) else "",
            batchnorm=why_not_batchnorm(theory.batchnorm_form(self._samples), theory.targets(self._samples)),
        )
        # If the loss is not finite, it was not recognized: look again.
        self._examined = math.isfinite(measurement.mean_loss)
        if self._examined:
            say(measurement.trainer, theorem_summary(self._theorems))

    def notes(self) -> dict[str, Any]:
        return {"theorems": [row._asdict() for row in self._theorems]}

    def state_dict(self) -> dict[str, Any]:
        return {"theorems": [tuple(row) for row in self._theorems], "examined": self._examined}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._theorems = tuple(TheoremStatus(*row) for row in state.get("theorems", []))
        self._examined = state.get("examined", False)

    def forget(self, changed: Collection[str]) -> str:
        if (SAMPLE_SETTINGS | {"loss", "predict", "parameters", "ntk_samples"}) & set(changed):
            self._examined = False  # check the theorems again
        return ""
