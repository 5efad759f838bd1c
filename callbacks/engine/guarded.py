"""Run diagnostics one after the other, so that none of them can stop the run or another one."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities import rank_zero_warn

from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.engine.reporting import ReportingCallback
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.measurement.theory import KnownFacts
from lightning_normtheory.callbacks.output.messages import say
from lightning_normtheory.callbacks.output.progress_bar import MeasurementProgress
from lightning_normtheory.callbacks.samples.probe import Probe
from lightning_normtheory.measuring.processes import FailedElsewhereError
from lightning_normtheory.measuring.progress import listening

__all__ = ["GuardedCallback"]

_NOT_FINITE = "a loss, gradient or weight is not finite"


class GuardedCallback(ReportingCallback):
    """A callback whose diagnostics may fail: each failure is reported once, with NaN and the reason.

    Attributes:
        probe: the samples.
    """

    probe: Probe
    _facts: KnownFacts

    def _leave_out(self, diagnostics: list[Diagnostic], reason: str) -> None:
        names = ", ".join(each.key for each in diagnostics)
        rank_zero_warn(f"{type(self).__name__} leaves out {names}. {reason}")
        self._active = [each for each in self._active if each not in diagnostics]
        self._fit.reasons.update({each.key: reason for each in diagnostics})

    def _start_all(self, measurement: Measurement) -> None:
        """Let every diagnostic measure what it compares with later."""
        with self._memory(measurement), self._progress(measurement.trainer) as progress:
            for diagnostic in self._active:
                if diagnostic.key not in self._fit.unstarted:
                    progress.begin(diagnostic.title)
                    self._guarded(diagnostic, measurement, diagnostic.start)

    def _observe(self, trainer: Trainer, outputs: Any, batch_idx: int) -> None:
        """Let every diagnostic read what a training step returned."""
        for diagnostic in self._active:
            try:
                diagnostic.after_batch(trainer, outputs, batch_idx)
            except Exception as error:  # noqa: BLE001  # does not stop the training
                self._warn_of(f"{self.prefix}/{diagnostic.key} could not read a training step", error)

    def _measure_all(self, measurement: Measurement) -> dict[str, float]:
        """Return the metrics of all diagnostics."""
        metrics = measurement.metrics
        before = [(diagnostic, self._collect(diagnostic, diagnostic.state_dict)) for diagnostic in self._active]
        facts = self._facts.state_dict()
        try:
            passes = self._fit.passes = measurement.function.passes
            with self._memory(measurement), self._progress(measurement.trainer) as progress, listening(passes.step):
                for diagnostic in self._active:
                    progress.begin(diagnostic.title)
                    passes.begin(diagnostic.title)
                    metrics.update(self._measure_one(diagnostic, measurement))
        except BaseException:  # roll back: a checkpoint must not hold half a measurement
            for diagnostic, state in before:
                diagnostic.load_state_dict(state)
            self._facts = KnownFacts.from_state(facts)
            raise
        return dict(metrics)

    def _measure_one(self, diagnostic: Diagnostic, measurement: Measurement) -> dict[str, float]:
        """Return the metrics of a diagnostic; NaN for each of its names if it fails."""
        measured: dict[str, float] | None = None
        if diagnostic.needs_probe and self.probe.collecting:  # resumed with only the end of an epoch left to do
            self._warn_once("probe", f"{self.prefix} has no samples to measure on yet: this epoch is logged as NaN.")
            self._explain(diagnostic, (), {diagnostic.key: "there are no samples to measure on yet"})
        else:
            measured = self._guarded(diagnostic, measurement, diagnostic.measure)
        if measured is None:
            return dict.fromkeys((*diagnostic.metrics, *self._fit.logged.get(diagnostic.key, ())), math.nan)
        self._fit.logged[diagnostic.key] = tuple(measured)
        return measured

    def _memory(self, measurement: Measurement) -> AbstractContextManager[None]:
        """Keep the memory of large vectors for the next measurement, unless the user asks for little memory."""
        return nullcontext() if measurement.curvature.saves_memory else self._fit.workspace.use()

    def _progress(self, trainer: Trainer) -> MeasurementProgress:
        report = partial(self._warn_once, "progress")
        notify = partial(self._warn_once, "long measurement", warn=partial(say, trainer))
        return MeasurementProgress(trainer, self.prefix, report, notify)

    def _guarded(self, diagnostic: Diagnostic, measurement: Measurement, action: Callable[[Measurement], Any]) -> Any:
        """Return ``action(measurement)``; ``None`` if it fails, which is reported once per diagnostic and fit."""
        error: Exception | None = None
        result: Any = None
        begin = time.perf_counter()
        try:
            result = action(measurement)
        except Exception as caught:  # noqa: BLE001  # reported or raised below, when all processes know
            error = caught
        taken = self._fit.seconds
        taken[diagnostic.key] = taken.get(diagnostic.key, 0.0) + time.perf_counter() - begin
        if measurement.processes.end(failed=error is not None):
            error = error or FailedElsewhereError()
        if error is not None:
            try:
                self._report_failure(diagnostic, error, measurement.processes)
            finally:
                error = None  # the error holds this frame: without this, both would keep all tensors of the measurement
            return None
        measured: dict[str, float] = result or {}
        reasons = dict.fromkeys((name for name, value in measured.items() if math.isnan(value)), _NOT_FINITE)
        late = self._fit.unstarted.get(diagnostic.key)
        reasons |= {name: late for name in diagnostic.since_start if late and name not in measured}
        reasons |= diagnostic.reasons
        self._explain(diagnostic, measured, reasons)
        # A reason may also say why a flag is 0: that is no fault.
        lacking = {name: why for name, why in reasons.items() if math.isnan(measured.get(name, math.nan))}
        lacking = {name: why for name, why in lacking.items() if name not in self._silent}
        for reason in dict.fromkeys(lacking.values()):
            name = next(name for name, why in lacking.items() if why == reason)
            message = f"{self.prefix}/{name} {'is NaN' if name in measured else 'is not logged'}: {reason}."
            self._warn_once(f"{name}, NaN or missing", message)
        return result
