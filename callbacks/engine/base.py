"""The base of every callback: its arguments, settings and state."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn

from lightning_normtheory.callbacks.engine.budget import TimeBudget
from lightning_normtheory.callbacks.engine.checks import (
    check_arguments,
)
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.engine.fit import FitCallback
from lightning_normtheory.callbacks.engine.lifecycle import Phase
from lightning_normtheory.callbacks.engine.schedule import Schedule
from lightning_normtheory.callbacks.engine.state import changed_settings, stored_once
from lightning_normtheory.callbacks.measurement.function import BatchFunction, MeasuredFunction
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.measurement.passes import Passes
from lightning_normtheory.callbacks.measurement.theory import KnownFacts
from lightning_normtheory.callbacks.samples.probe import Probe
from lightning_normtheory.callbacks.samples.validation_probe import ValidationProbe
from lightning_normtheory.callbacks.step.findings import Findings
from lightning_normtheory.callbacks.step.theta import ParameterChoice, check_choice, describe_choice
from lightning_normtheory.record.history import Axis
from lightning_normtheory.record.metrics import find_metric

__all__ = ["DiagnosticCallback"]

# A `BatchFunction` as an argument: if the type said Tensor, LightningCLI would refuse a function without annotations.
UserFunction = Callable[[Any, Any], Any]


class DiagnosticCallback(FitCallback):
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

    @property
    def passes(self) -> Passes:
        """The passes through the network of the last measurement, in this process; ``print`` shows them as a table."""
        return self._fit.passes

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
            # Those that the next measurement may leave out.
            "announced": [n for n, now in self._fit.announced.items() if not now or find_metric(n).every > 1],
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
        self._fit.announced = dict.fromkeys(state_dict.get("announced", ()), False)
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
        if self._fit.synchronized:
            measured["batch_stats"] = "running (SyncBatchNorm)"
        known = {"outputs": self._findings.outputs or None}
        known["training_samples"] = self.probe.training_samples if self.probe.left_out < 1 else None
        return {**super()._notes(), "samples": self.probe.used, "measured": measured, **known}

    def _measurement(self, trainer: Trainer, pl_module: LightningModule) -> Measurement:
        requests = {each.key: each.hessian_request() for each in self._active}
        return Measurement(
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
            wants_gradients=any("rsc" in each.shared for each in self._active),
            strict=self.on_error == "raise",
        )


def _function_name(function: BatchFunction | None, default: str) -> str:
    if function is None:
        return default
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
