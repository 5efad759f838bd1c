"""Follow a fit through Lightning's hooks: find the loss, measure the start, measure when it is due."""

import math
import re
import time
import warnings
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn

from lightning_normtheory.callbacks.engine.budget import TimeBudget
from lightning_normtheory.callbacks.engine.checks import check_strategy, synchronized_layers
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic, NotApplicable
from lightning_normtheory.callbacks.engine.lifecycle import FitState, Phase
from lightning_normtheory.callbacks.engine.planning import PlanningCallback
from lightning_normtheory.callbacks.engine.schedule import UNKNOWN_INTERVAL, Schedule, schedule_by_steps, steps_of_run
from lightning_normtheory.callbacks.engine.stop import SIGTERMException, stopped_by_sigterm
from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.measurement.theory import KnownFacts
from lightning_normtheory.callbacks.measurement.trial import example_of, explore
from lightning_normtheory.callbacks.output.messages import hide_own_warnings, is_trial_run, note
from lightning_normtheory.callbacks.samples.batch_contents import count_samples, describe
from lightning_normtheory.callbacks.samples.validation_probe import ValidationProbe
from lightning_normtheory.callbacks.step.findings import Findings
from lightning_normtheory.callbacks.step.theta import ParameterChoice, choose_parameters
from lightning_normtheory.measuring.watched import shared_copies
from lightning_normtheory.model.layers import refuse_uninitialized
from lightning_normtheory.record.wording import join_names

__all__ = ["FitCallback"]


class FitCallback(PlanningCallback):
    """A callback that follows a fit. `DiagnosticCallback` has its arguments and its state.

    Attributes:
        every_n_epochs: as given; ``None`` if not.
        every_n_steps: as given; ``None`` if not.
        batch_stats: which statistics BatchNorm uses.
        parameters: the choice of θ.
    """

    every_n_epochs: int | None
    every_n_steps: int | None
    batch_stats: bool | None
    parameters: ParameterChoice | None
    _asked_schedule: Schedule
    _facts: KnownFacts
    _findings: Findings
    _explored: tuple[str, ...]

    def make_diagnostics(self) -> list[Diagnostic]:
        """Create the diagnostics for a new fit."""
        raise NotImplementedError

    def _measurement(self, trainer: Trainer, pl_module: LightningModule) -> Measurement:
        """Create a measurement of the function that is trained."""
        raise NotImplementedError

    # -- fit start: check the setup ------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return  # a checkpoint saved after `validate` must hold the state of the fit
        check_strategy(trainer, type(self).__name__)
        hide_own_warnings(is_trial_run(trainer))  # the table at the end has the reasons
        # Keep nothing of an earlier fit; a checkpoint is loaded after this hook.
        self._fit = FitState()
        self._facts = KnownFacts()
        self._findings, self._explored = Findings(), ()
        self._diagnostics = self.make_diagnostics()
        self._validation_probe = ValidationProbe(self.probe.samples, self.probe.seed)
        self._budget = TimeBudget(self.max_overhead)
        self._plan = None
        self._schedule = self._asked_schedule

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        hide_own_warnings(False)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._active = []
        for diagnostic in self._diagnostics:
            try:
                diagnostic.check(pl_module)
            except NotApplicable as reason:
                if not diagnostic.optional or len(self._diagnostics) == 1:
                    self._leave_out([diagnostic], str(reason))
            else:
                self._active.append(diagnostic)
        for diagnostic in [each for each in self._active if each.key in self._fit.too_expensive]:  # of the checkpoint
            self._leave_out([diagnostic], self._fit.too_expensive[diagnostic.key])
        if not any(diagnostic.needs_validation for diagnostic in self._active):
            self._validation_probe = None
        if self._needs_probe:
            refuse_uninitialized(pl_module)
            self._warn_of_synchronized(synchronized_layers(trainer, pl_module))
        self._warn_of_namesakes(trainer)
        if trainer.world_size > 1:  # every process logs the same number already; there is nothing to sync
            warnings.filterwarnings("ignore", message=rf".*self\.log\('{re.escape(self.prefix)}[/_].*sync_dist")

    def _warn_of_synchronized(self, layers: list[str]) -> None:
        """Say that these layers are measured with their running statistics, where batch statistics are expected."""
        self._fit.synchronized = bool(layers)
        if layers and self.batch_stats is not False:
            rank_zero_warn(
                f"{type(self).__name__} measures {join_names(layers, most=2)} (SyncBatchNorm) with running statistics:"
                " torch cannot differentiate the statistics of all processes twice. To measure with batch statistics,"
                " train without sync_batchnorm; batch_stats=False accepts the running ones."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        choose_parameters(pl_module, trainer.optimizers, self.parameters)  # raises an error if the choice is wrong
        self._choose_schedule(trainer)
        if self._needs_probe:
            with self._budget.spending():
                self.probe.prepare(trainer)
        if self._lacks_samples:
            message = f"the {self.probe.samples} samples of the probe are copied from the first batches"
            note(trainer, f"{self.prefix}: {message}; measuring begins when they are complete.")
        self._find_validation_data(trainer)

    def _choose_schedule(self, trainer: Trainer) -> None:
        """Measure by steps where no epoch is known to end, unless the user has said what to do."""
        if is_trial_run(trainer):  # try everything once
            self._schedule = Schedule(1, self._schedule.axis)
        elif self.every_n_steps is not None and self.every_n_steps > steps_of_run(trainer):
            rank_zero_warn(
                f"{type(self).__name__} measures nothing: every_n_steps={self.every_n_steps} is more than the"
                f" {steps_of_run(trainer)} steps of this run."
            )
        found = schedule_by_steps(trainer) if self.every_n_epochs is None and self.every_n_steps is None else None
        if found is not None:
            self._schedule, reason = found
            message = f"{self.prefix}: measuring {self._schedule.text}, since {reason}. every_n_steps= sets it."
            note(trainer, message)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._budget.train()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._budget.train()  # a fit resumed in the middle of an epoch has no on_train_epoch_start
        first, resumed = self._fit.phase is not Phase.RUNNING, self._fit.phase is Phase.RESUMED
        self._fit.phase = Phase.RUNNING
        if first and not resumed:  # a trainer may fit twice, and continues to count
            self._fit.done = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        missed = resumed and self._missed(trainer, batch_idx)
        if missed and self._schedule.axis == "epoch":
            self.probe.complete(trainer.world_size)
        if self._needs_probe and self.probe.collecting:
            with self._budget.spending():
                self.probe.collect(batch, batch_idx, trainer)
        # Not earlier: a training_step may need what the module prepares in its own start hooks.
        if self._needs_probe and (first or not (self._fit.start_measured or self.probe.collecting)):
            with self._budget.spending(), stopped_by_sigterm(trainer):
                self._begin(self._measurement(trainer, pl_module), first, count_samples(batch))
        if missed:
            with self._budget.spending(), stopped_by_sigterm(trainer):
                self._catch_up(trainer, pl_module, batch_idx)

    @shared_copies()
    def _begin(self, measurement: Measurement, first: bool, samples: int) -> None:
        """Find loss and predictor in the first batch; as soon as the probe is complete, measure the start."""
        if first:
            self._explore(measurement.function)
            self._forecast(measurement, samples)
        if not self._fit.start_measured and not self.probe.collecting:
            self._start_all(measurement)
            self._fit.start_measured = True

    def _explore(self, function: MeasuredFunction) -> None:
        """Find loss and predictor. Leave out the diagnostics that need an unknown one, with one warning."""
        loss = any(diagnostic.needs_loss for diagnostic in self._active)
        self._explored = tuple(function.theta) if function.batches else ()
        self._findings = found = function.findings = explore(function, loss=loss)
        no_loss, no_outputs = bool(found.loss_problem), bool(found.outputs_problem)
        missing = [
            each for each in self._active if (each.needs_loss and no_loss) or (each.needs_outputs and no_outputs)
        ]
        if found.predictor:
            beside = f" The loss also uses {join_names(found.beside)}, which f does not." if found.beside else ""
            note(function.trainer, f"{self.prefix}: the predictor f is {found.predictor}.{beside}")
        if missing:
            data = function.batches[0].data
            example = example_of(function.model, data, loss=no_loss, predict=no_outputs)
            remedy = found.remedy or f"Pass {example}"
            reason = f"In {type(function.model).__name__}, {found.loss_problem or found.outputs_problem}."
            self._leave_out(missing, f"{reason} {remedy}. A batch is {describe(data)}.")

    def _missed(self, trainer: Trainer, batch_idx: int = 0) -> bool:
        """Whether the checkpoint is from the end of an epoch or step but older than its measurement: saved just before,
        or when the measurement was interrupted. Lightning does not end that epoch or step again."""
        axis = self._schedule.axis
        between = axis == "step" or batch_idx == 0
        return between and self._schedule.position(trainer) > self._fit.done.get(axis, math.inf)

    def _catch_up(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        """Measure the epoch or step before, for the file only: the loggers are further already."""
        now = self._schedule.position(trainer)
        if self._schedule.is_due(self._fit.done[self._schedule.axis], now) and not self._lacks_samples:
            metrics = self._measure(trainer, pl_module)
            named = {self._metric_name(name): value for name, value in metrics.items()}
            self._write(trainer, named, trainer.current_epoch - (batch_idx == 0))
        self._fit.done[self._schedule.axis] = now

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.probe.release()
        self._fit.workspace.clear()
        if self._validation_probe is not None:
            self._validation_probe.release()
        self._conclude(trainer)
        self._warn_of_missed_end(trainer)
        # Lightning skips a fit without batches, and with it every hook between on_fit_start and this one.
        if self._needs_probe and trainer.num_training_batches == 0 and trainer.limit_train_batches != 0:
            raise ValueError(
                "Expected a training loader with at least one batch, but it is empty: nothing was trained and nothing"
                " measured. Check the dataset's length and drop_last."
            )

    def _warn_of_missed_end(self, trainer: Trainer) -> None:
        axis, now = self._schedule.axis, self._schedule.position(trainer)
        missed = self._fit.phase is Phase.RESUMED and self._missed(trainer)
        if missed and self._schedule.is_due(self._fit.done[axis], now):
            which, saved = (now, "at it") if axis == "step" else (now - 1, "at its last step")
            rank_zero_warn(
                f"{type(self).__name__} has not measured {axis} {which}: the checkpoint was saved {saved}, before the"
                f" measurement, and this fit has no {axis} left in which to measure it. Raise max_{axis}s."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._fit.workspace.clear()
        if isinstance(exception, KeyboardInterrupt) or trainer.received_sigterm:  # show how far the run came
            self._conclude(trainer)

    # -- validation: its loaders exist from here on, and the batches of an iterable one pass ---------------------------

    def _find_validation_data(self, trainer: Trainer) -> None:
        if self._validation_probe is not None and not trainer.sanity_checking:
            with self._budget.spending():
                self._validation_probe.prepare(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._find_validation_data(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        probe = self._validation_probe
        if probe is not None and probe.collecting and dataloader_idx == 0:
            with self._budget.spending():
                probe.collect(batch, batch_idx, trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validation_probe is not None:
            with self._budget.spending():
                self._validation_probe.complete(trainer.world_size)

    # -- every n-th step or epoch --------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._observe(trainer, outputs, batch_idx)
        now = trainer.global_step
        # A checkpoint without the number of steps: begin to count here.
        due = self._schedule.axis == "step" and self._schedule.is_due(self._fit.done.get("step", now), now)
        if due and not self._lacks_samples and not self._measure_or_skip(trainer, pl_module):
            return
        self._fit.done["step"] = now
        default = self.every_n_epochs is None and self._schedule.axis == "epoch"
        if default and batch_idx + 1 == UNKNOWN_INTERVAL and math.isinf(trainer.num_training_batches):
            message = f"{self.prefix} measures after each epoch, and this one goes on after {UNKNOWN_INTERVAL} batches."
            self._warn_once("endless epoch", f"{message} Pass every_n_steps= to measure within it.")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._budget.pause()
        if self._needs_probe:
            with self._budget.spending():
                self.probe.complete(trainer.world_size)
        now = trainer.current_epoch + 1
        due = self._schedule.axis == "epoch" and self._schedule.is_due(now - 1, now)
        if due and not self._measure_or_skip(trainer, pl_module):
            return
        self._fit.done["epoch"] = now

    @property
    def _lacks_samples(self) -> bool:
        """Whether there is nothing to measure on at this step: the batches of an iterable dataset are collected."""
        return self._schedule.axis == "step" and self._needs_probe and self.probe.collecting

    @shared_copies()
    def _measure_or_skip(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Return whether it is done. If SIGTERM stops it, Lightning ends the fit after this hook, and a resumed fit
        measures it."""
        if not self._affordable(trainer):
            self._report(trainer, pl_module, {"skipped": 1.0})
            return True
        try:
            with self._budget.measuring():
                with stopped_by_sigterm(trainer):
                    metrics = self._measure(trainer, pl_module)
                if self.max_overhead is not None:
                    metrics["skipped"] = 0.0
                self._report(trainer, pl_module, metrics)
        except SIGTERMException:
            return False
        self._hint_of_cost(trainer)
        return True

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        begin = time.perf_counter()
        measurement = self._measurement(trainer, pl_module)
        if self._needs_probe and not self.probe.collecting:
            try:
                # Resumed at the end of an epoch, or layers were unfrozen: the predictor's inputs may depend on them.
                if self._explored != tuple(measurement.function.theta):
                    self._explore(measurement.function)
            except Exception as error:  # noqa: BLE001  # of the user's functions, or no chosen parameter is trained now
                self._warn_of("Loss and predictor could not be found again", error)
        metrics = self._measure_all(measurement)
        self._fit.start_measured = True  # what is measured now is what later measurements compare with
        metrics["seconds"] = time.perf_counter() - begin
        # A running statistic or a time may differ between processes, and callbacks that monitor it must decide alike.
        return trainer.strategy.broadcast(metrics) if trainer.world_size > 1 else metrics

    @property
    def _needs_probe(self) -> bool:
        return any(diagnostic.needs_probe for diagnostic in self._diagnostics)
