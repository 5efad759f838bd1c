"""The base of every callback: schedule, probe, errors and state."""

import math
import re
import time
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn

from lightning_normtheory.callbacks.engine.budget import TimeBudget
from lightning_normtheory.callbacks.engine.checks import (
    check_arguments,
    check_strategy,
    check_synchronized,
)
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic, NotApplicable
from lightning_normtheory.callbacks.engine.lifecycle import FitState, Phase
from lightning_normtheory.callbacks.engine.planning import PlanningCallback
from lightning_normtheory.callbacks.engine.schedule import UNKNOWN_INTERVAL, Schedule, schedule_by_steps
from lightning_normtheory.callbacks.engine.state import changed_settings, stored_once
from lightning_normtheory.callbacks.engine.stop import SIGTERMException, stopped_by_sigterm
from lightning_normtheory.callbacks.measurement.epoch import EpochMeasurement
from lightning_normtheory.callbacks.measurement.function import BatchFunction, MeasuredFunction
from lightning_normtheory.callbacks.measurement.theory import KnownFacts
from lightning_normtheory.callbacks.measurement.trial import example_of, explore
from lightning_normtheory.callbacks.output.messages import hide_own_warnings
from lightning_normtheory.callbacks.samples.batch_contents import count_samples, describe
from lightning_normtheory.callbacks.samples.probe import Probe
from lightning_normtheory.callbacks.samples.validation_probe import ValidationProbe
from lightning_normtheory.callbacks.step.findings import Findings
from lightning_normtheory.callbacks.step.theta import ParameterChoice, check_choice, choose_parameters, describe_choice
from lightning_normtheory.measuring.watched import shared_copies
from lightning_normtheory.model.layers import batch_norm_layers, refuse_uninitialized
from lightning_normtheory.record.history import Axis
from lightning_normtheory.record.wording import join_names

__all__ = ["DiagnosticCallback"]

# A `BatchFunction` as an argument: if the type said Tensor, LightningCLI would refuse a function without annotations.
UserFunction = Callable[[Any, Any], Any]


class DiagnosticCallback(PlanningCallback):
    """Measures `diagnostics` after epochs or optimizer steps of the training, without changing the run.

    Args:
        probe: the number of training samples to measure on, or a `Probe` that several callbacks share.
        every_n_epochs: measure after every n-th epoch.
        every_n_steps: measure after every n-th optimizer step, as ``max_steps`` counts them, instead. If neither is
            given, measure after every epoch; but if ``max_steps`` ends the run before an epoch is known to end, at
            about 20 evenly spaced steps.
        loss: ``loss(module, batch)``, the mean loss of a batch, instead of the module's `training_step`.
        predict: ``predict(module, batch)``, the outputs of a batch, instead of what `training_step` computes: the
            output of the module's `forward`, or else of the submodule, from which the loss is computed.
        batch_stats: which statistics BatchNorm uses: ``True``: of the batch; ``False``: running; ``None``: of the batch
            for loss and gradient, of the whole probe, held constant, where samples must be independent, running for
            the generalization gap.
        prefix: the prefix of the metric names, ``normtheory/…`` and ``normtheory_layers/…``.
        on_error: ``"warn"``: report a diagnostic that fails once, log NaN, and continue training; ``"raise"``: stop.
        max_overhead: the largest fraction of the training time that measuring may take, such as 0.1. A measurement that
            is due is skipped if it would exceed it, and ``normtheory/skipped`` is 1 for it, else 0. The first one is
            expected to take what the trial of the step predicts, later ones as long as the last. Diagnostics that the
            whole run, if its length is known, cannot pay for once are left out with a warning, the most expensive
            first; so are values at fit start, and what compares with them begins with the first measurement. ``None``:
            no limit, and no such metric. Training time is that of the epochs from start to end, including validation
            and other callbacks, without the time that this callback takes.
        parameters: the parameters θ in which loss and outputs are differentiated: the index of an optimizer, name
            patterns (``"generator"`` is that whole submodule), or a function that returns parameters of the module;
            ``None``: all that are trained. Where several optimizers train different losses, as in a GAN, add one
            callback for each, with its own ``prefix``. With manual optimization, the loss is the one that θ's optimizer
            steps on.
    """

    diagnostics: ClassVar[tuple[type[Diagnostic], ...]] = ()

    def __init__(
        self,
        probe: int | Probe = 512,
        every_n_epochs: int | None = None,
        loss: UserFunction | None = None,
        predict: UserFunction | None = None,
        batch_stats: bool | None = None,
        prefix: str = "normtheory",
        on_error: Literal["warn", "raise"] = "warn",
        *,
        every_n_steps: int | None = None,
        max_overhead: float | None = None,
        parameters: ParameterChoice | None = None,
    ) -> None:
        super().__init__()
        check_arguments(batch_stats, prefix, on_error, loss=loss, predict=predict)
        check_choice(parameters)
        self.probe = probe if isinstance(probe, Probe) else Probe(probe)
        self.every_n_epochs, self.every_n_steps = every_n_epochs, every_n_steps
        self._schedule = self._asked_schedule = Schedule.of_arguments(every_n_epochs, every_n_steps)
        self.loss = loss
        self.predict = predict
        self.batch_stats = batch_stats
        self.prefix = prefix
        self.on_error = on_error
        self.max_overhead = max_overhead
        self.parameters = parameters
        self._budget = TimeBudget(max_overhead)
        self._diagnostics = self.make_diagnostics()
        self._validation_probe: ValidationProbe | None = None
        self._facts = KnownFacts()
        self._findings = Findings()
        self._explored: tuple[str, ...] = ()  # the names of θ when loss and predictor were found

    def make_diagnostics(self) -> list[Diagnostic]:
        """Create the diagnostics for a new fit."""
        return [diagnostic() for diagnostic in self.diagnostics]

    # -- fit start: check the setup ------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return  # a checkpoint saved after `validate` must hold the state of the fit
        check_strategy(trainer, type(self).__name__)
        hide_own_warnings(bool(getattr(trainer, "fast_dev_run", False)))  # the table at the end has the reasons
        # Keep nothing of an earlier fit; a checkpoint is loaded after this hook.
        self._fit = FitState()
        self._facts = KnownFacts()
        self._findings, self._explored = Findings(), ()
        self._diagnostics = self.make_diagnostics()
        self._validation_probe = ValidationProbe(self.probe.samples, self.probe.seed)
        self._budget = TimeBudget(self.max_overhead)
        self._plan = None
        self._schedule = self._asked_schedule

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
            check_synchronized(trainer, pl_module, self._uses_batch_statistics(pl_module), type(self).__name__)
            refuse_uninitialized(pl_module)
        self._warn_of_namesakes(trainer)
        if trainer.world_size > 1:  # every process logs the same number already; there is nothing to sync
            warnings.filterwarnings("ignore", message=rf".*self\.log\('{re.escape(self.prefix)}[/_].*sync_dist")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        choose_parameters(pl_module, trainer.optimizers, self.parameters)  # raises an error if the choice is wrong
        self._choose_schedule(trainer)
        if self._needs_probe:
            with self._budget.spending():
                self.probe.prepare(trainer)
        if self._lacks_samples:
            message = f"the {self.probe.samples} samples of the probe are copied from the first batches"
            self._inform(trainer, f"{self.prefix}: {message}; measuring begins when they are complete.")
        self._find_validation_data(trainer)

    def _choose_schedule(self, trainer: Trainer) -> None:
        """Measure by steps where no epoch is known to end, unless the user has said what to do."""
        found = schedule_by_steps(trainer) if self.every_n_epochs is None and self.every_n_steps is None else None
        if found is not None:
            self._schedule, reason = found
            message = f"{self.prefix}: measuring {self._schedule.text}, since {reason}. every_n_steps= sets it."
            self._inform(trainer, message)

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
    def _begin(self, measurement: EpochMeasurement, first: bool, samples: int) -> None:
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
            self._inform(function.trainer, f"{self.prefix}: the predictor f is {found.predictor}.{beside}")
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
        # Resumed at the end of an epoch, or layers were unfrozen: the inputs of the predictor may depend on them.
        if self._needs_probe and not self.probe.collecting and self._explored != tuple(measurement.function.theta):
            try:
                self._explore(measurement.function)
            except Exception as error:  # noqa: BLE001  # of the user's functions, which have worked before
                self._warn_of("Loss and predictor could not be found again", error)
        metrics = self._measure_all(measurement)
        self._fit.start_measured = True  # what is measured now is what later measurements compare with
        metrics["seconds"] = time.perf_counter() - begin
        # A running statistic or a time may differ between processes, and callbacks that monitor it must decide alike.
        return trainer.strategy.broadcast(metrics) if trainer.world_size > 1 else metrics

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        # Two callbacks of one class can be in one trainer only if their metrics have different names.
        return self._generate_state_key(prefix=self.prefix)

    def state_dict(self) -> dict[str, Any]:
        state = {
            "settings": self._asked_settings(),
            "begun": self._fit.start_measured,
            "ended": self._fit.done.get("epoch"),
            "steps": self._fit.done.get("step"),
            **self._facts.state_dict(),
            "probe": self.probe.state_dict() if self._needs_probe else None,
            "validation_probe": self._validation_probe.state_dict() if self._validation_probe is not None else None,
            "diagnostics": {each.key: self._collect(each, each.state_dict) for each in self._diagnostics},
            "budget": self._budget.state_dict(),
            "too_expensive": self._fit.too_expensive,
            "reasons": self._fit.reasons,
        }
        return stored_once(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        changed = changed_settings(state_dict["settings"], self._asked_settings())
        for name, (before, now) in changed.items():
            if name.startswith("every_n_") and now is None:
                continue  # the other one is named
            rank_zero_warn(f"{type(self).__name__}: {name} was {before!r} in the checkpoint and is {now!r} now.")
        if state_dict["probe"] is not None:
            self.probe.load_state_dict(state_dict["probe"])
        if self._validation_probe is not None and state_dict.get("validation_probe") is not None:
            self._validation_probe.load_state_dict(state_dict["validation_probe"])
        for diagnostic in self._diagnostics:
            diagnostic.load_state_dict(state_dict["diagnostics"].get(diagnostic.key, {}))
            dropped = diagnostic.forget(changed.keys())
            if dropped:
                name = type(self).__name__
                rank_zero_warn(f"{name}: discarding {dropped} from the checkpoint, measured with different settings.")
        if not changed.keys() & {"loss", "predict", "parameters", "probe", "seed"}:
            self._facts = KnownFacts.from_state(state_dict)
        self._budget.load_state_dict(state_dict.get("budget", {}))
        if "max_overhead" not in changed:
            self._fit.too_expensive = state_dict.get("too_expensive", {})
        self._fit.reasons = state_dict.get("reasons", {})
        done: dict[Axis, int | None] = {"epoch": state_dict.get("ended"), "step": state_dict.get("steps")}
        self._fit.done = {axis: position for axis, position in done.items() if position is not None}
        self._fit.start_measured, self._fit.phase = state_dict.get("begun", True), Phase.RESUMED

    def settings(self) -> dict[str, Any]:
        """Return the settings that the numbers depend on, for the file and the checkpoint."""
        return {
            "callback": type(self).__name__,
            "probe": self.probe.samples,
            "seed": self.probe.seed,
            **self._schedule.settings(),
            "loss": _function_name(self.loss, "training_step"),
            "predict": _function_name(self.predict, "training_step"),
            "parameters": describe_choice(self.parameters),
            "batch_stats": {None: "as trained", True: "batch", False: "running"}[self.batch_stats],
            "prefix": self.prefix,
            "on_error": self.on_error,
            "max_overhead": self.max_overhead,
        }

    def _asked_settings(self) -> dict[str, Any]:
        """Return the settings with the schedule that the user asked for: a checkpoint is loaded before the run's own
        schedule is known."""
        return {**self.settings(), **self._asked_schedule.settings()}

    def _notes(self) -> dict[str, Any]:
        if not self._needs_probe:
            return super()._notes()
        measured = {
            "loss": _function_name(self.loss, "training_step"),
            "predictor": self._findings.predictor or _function_name(self.predict, "unknown"),
            "parameters": describe_choice(self.parameters),
        }
        return {**super()._notes(), "samples": self.probe.used, "measured": measured}

    def _uses_batch_statistics(self, pl_module: LightningModule) -> bool:
        """Return whether a BatchNorm uses batch statistics: for the loss, or because it keeps no running ones."""
        return self.batch_stats is not False and (
            bool(self.batch_stats)
            or any(each.needs_loss for each in self._active)
            or any(layer.running_mean is None for layer in batch_norm_layers(pl_module).values())
        )

    @property
    def _needs_probe(self) -> bool:
        return any(diagnostic.needs_probe for diagnostic in self._diagnostics)

    def _measurement(self, trainer: Trainer, pl_module: LightningModule) -> EpochMeasurement:
        requests = {each.key: each.hessian_request() for each in self._active}
        return EpochMeasurement(
            MeasuredFunction(
                trainer,
                pl_module,
                self.probe,
                self.loss,
                self.predict,
                self.batch_stats,
                self.parameters,
                self._findings,
            ),
            validation=self._validation_probe,
            facts=self._facts,
            hessian_requests={key: request for key, request in requests.items() if request is not None},
            strict=self.on_error == "raise",
        )


def _function_name(function: BatchFunction | None, default: str) -> str:
    if function is None:
        return default
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
