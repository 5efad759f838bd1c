"""Report metrics to the loggers and the run's file, and failures as warnings."""

import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn

from lightning_normtheory.callbacks.engine.checks import refuse_unknown_arguments
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.engine.host import HostCallback
from lightning_normtheory.callbacks.engine.lifecycle import FitState
from lightning_normtheory.callbacks.engine.schedule import Schedule
from lightning_normtheory.callbacks.output import run_file, wandb
from lightning_normtheory.callbacks.output.fit_end import conclude
from lightning_normtheory.measuring.processes import FailedElsewhereError, Processes
from lightning_normtheory.measuring.snapshot import Snapshot
from lightning_normtheory.record.metrics import find_metric
from lightning_normtheory.record.wording import first_lines

__all__ = ["ReportingCallback"]


# What CUDA and ROCm say from then on.
_LOST_DEVICE = "device-side assert"


class ReportingCallback(HostCallback):
    """A callback that reports metrics and failures.

    Attributes:
        prefix: the prefix of the metric names.
        on_error: whether a failure is reported once, or raised.
    """

    prefix: str
    on_error: Literal["warn", "raise"]
    _schedule: Schedule
    _diagnostics: list[Diagnostic]
    # Metrics without a warning where they are missing: the file and the report have the reason.
    _silent: ClassVar[frozenset[str]] = frozenset()

    # Here, not in the class whose __init__ has the arguments: jsonargparse would read them from __new__ instead.
    def __new__(cls, *args: Any, **kwargs: Any) -> "ReportingCallback":
        refuse_unknown_arguments(cls, kwargs)
        return super().__new__(cls)

    def __init__(self) -> None:
        super().__init__()
        self._active: list[Diagnostic] = []
        self._fit = FitState()

    def settings(self) -> dict[str, Any]:
        """Return the settings that the numbers depend on, for the file and the checkpoint."""
        raise NotImplementedError

    def _conclude(self, trainer: Trainer) -> None:
        """Print the table at the end; the last callback does it for all."""
        if self is self._all_of(trainer)[-1]:
            conclude(trainer, self._warn_of)

    @staticmethod
    def _all_of(trainer: Trainer) -> list["ReportingCallback"]:
        """Return the callbacks of this kind, in the trainer's order."""
        return [each for each in trainer.callbacks if isinstance(each, ReportingCallback)]  # type: ignore[attr-defined]

    def _warn_of(self, what: str, error: Exception) -> None:
        """Warn once that something failed; raise the error if ``on_error="raise"``."""
        if self.on_error == "raise":
            raise error
        reason = first_lines(f"{type(error).__name__}: {error}")
        self._warn_once(what, f"{what}; training continues without it: {reason}")

    def _report(self, trainer: Trainer, pl_module: LightningModule, metrics: Mapping[str, float]) -> None:
        """Send metrics to the loggers and into the file."""
        named = {self._metric_name(name): value for name, value in metrics.items()}
        self._fit.announced = dict.fromkeys(self._fit.announced, False) | dict.fromkeys(metrics, True)
        self._announce(trainer, {self._metric_name(name): name for name in self._fit.announced})
        by_step = self._schedule.axis == "step"
        for name, value in named.items():
            # Two callbacks log `seconds` under one name: their total cost is the sum.
            reduce = "sum" if name.endswith("/seconds") else "mean"
            logger = False if by_step else None  # Lightning warns of True in a run without loggers
            # Lightning would put a number on the device, which may be full, and wait for it when it is read.
            pl_module.log(
                name,
                torch.tensor(value, device="cpu"),
                on_step=by_step,
                on_epoch=not by_step,
                logger=logger,
                batch_size=1,
                reduce_fx=reduce,
            )
        if by_step:  # to the loggers at once: Lightning logs only every `log_every_n_steps`-th step
            values: dict[str, Any] = dict(named)
            trainer._logger_connector.log_metrics(values)
        self._write(trainer, named)

    def _announce(self, trainer: Trainer, names: Mapping[str, str]) -> None:
        """Define the metrics in W&B before they are logged."""
        try:
            wandb.define(trainer, names, self._schedule.axis)
            used = {name: note for name, note in self._notes().items() if name == "samples"}
            wandb.describe(trainer, {**self.settings(), **used})
        except Exception as error:  # noqa: BLE001  # of W&B's client
            self._warn_of(f"Could not send the metric definitions or settings of {self.prefix} to W&B", error)

    def _warn_once(self, key: str, message: str, warn: Callable[[str], None] = rank_zero_warn) -> None:
        if key not in self._fit.warned:
            self._fit.warned.add(key)
            warn(message)

    def _explain(self, diagnostic: Diagnostic, measured: Iterable[str], reasons: Mapping[str, str]) -> None:
        """Replace the reasons of a diagnostic's metrics, of which it has just measured some."""
        replaced = {diagnostic.key, *diagnostic.metrics, *self._fit.logged.get(diagnostic.key, ()), *measured}
        kept = {name: why for name, why in self._fit.reasons.items() if name not in replaced}
        self._fit.reasons = kept | dict(reasons)

    def _report_failure(self, diagnostic: Diagnostic, error: Exception, processes: Processes) -> None:
        """Report the failure of a diagnostic once, in the process that knows the reason; or raise it."""
        if self.on_error == "raise":
            raise error
        name, reason = diagnostic.key, first_lines(f"{type(error).__name__}: {error}")
        # A reason counts for all metrics of the same callback in the catalog.
        own = find_metric(name).callback
        others = [each for each in self._fit.logged.get(name, ()) if find_metric(each).callback != own]
        self._explain(diagnostic, (), dict.fromkeys((name, *others), reason))
        message = f"{self.prefix}/{name} failed and is logged as NaN: {reason}"
        if _LOST_DEVICE in reason:
            message += (
                ". The device cannot be used any more, and training will fail: while measuring, an index or a label of"
                " a probe or validation sample was out of bounds. Run on the CPU to see which one"
            )
        if isinstance(error, FailedElsewhereError):
            self._warn_once(name, message)
            return
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        where = f"{frame.f_globals.get('__name__', frame.f_code.co_filename)}, line {line}"
        if processes.count > 1:
            where += f", process {processes.rank}"
        # Not rank_zero_warn: the process that knows the reason may be another one.
        self._warn_once(name, f"{message} ({where}; on_error='raise' stops there)", warnings.warn)

    def _metric_name(self, name: str) -> str:
        layer = name.removeprefix("layers/")
        return f"{self.prefix}_layers/{layer}" if layer != name else f"{self.prefix}/{name}"

    def _write(self, trainer: Trainer, metrics: dict[str, float], epoch: int | None = None) -> None:
        # In every process: a user's metric may be summed over them. It must not cache its value, since the module may
        # still update it in its own on_train_epoch_end.
        ours = tuple(f"{each.prefix}{end}" for each in self._all_of(trainer) for end in ("/", "_layers/"))
        logged = [each for each in (trainer._results or {}).values() if not each.meta.name.startswith(ours)]
        before = Snapshot(trainer.lightning_module, logged, arrays=False)
        everything: dict[str, Any] = {}
        try:
            everything.update(trainer.callback_metrics)
        except Exception as error:  # noqa: BLE001  # a metric that the module completes in its own hook, later
            self._warn_of("The module's metrics could not be read for normtheory.jsonl", error)
        finally:
            before.restore()
        if not trainer.is_global_zero:
            return
        users = {k: float(v) for k, v in everything.items() if not k.startswith((f"{self.prefix}/", f"{self.prefix}_"))}
        notes = self._notes()
        try:
            about = {"axis": self._schedule.axis, "settings": self.settings(), **notes}
            epoch = trainer.current_epoch if epoch is None else epoch
            # As clauses, which a reading can end with.
            reasons = {self._metric_name(k): " ".join(why.split()).rstrip(".") for k, why in self._fit.reasons.items()}
            first = notes != self._fit.header_notes
            step = trainer.global_step
            run_file.write(trainer, about, metrics, users, reasons, epoch=epoch, step=step, first=first)
            self._fit.header_notes = notes
        except Exception as error:  # noqa: BLE001  # such as a full disk
            self._warn_once("file", f"normtheory.jsonl could not be written: {error}. Training continues without it.")

    def _notes(self) -> dict[str, Any]:
        """Return facts for the header of the file. They may become known in the course of a run."""
        return {name: note for each in self._active for name, note in self._collect(each, each.notes).items()}

    def _collect(self, diagnostic: Diagnostic, method: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what a diagnostic has for the file or the checkpoint; empty if it fails, since neither may be lost."""
        try:
            return method()
        except Exception as error:  # noqa: BLE001  # reported, or raised
            self._warn_of(f"The state or the notes of {self.prefix}/{diagnostic.key} could not be collected", error)
            return {}

    def _warn_of_namesakes(self, trainer: Trainer) -> None:
        """Warn of callbacks that log different values under one name: Lightning logs their mean."""
        names = {name for diagnostic in self._diagnostics for name in diagnostic.metrics}
        for other in self._all_of(trainer):
            if other is not self and other.prefix == self.prefix:
                shared = names & {name for diagnostic in other._diagnostics for name in diagnostic.metrics}
                ours, theirs = self.settings(), other.settings()
                if shared and any(ours[key] != theirs[key] for key in (ours.keys() & theirs.keys()) - {"callback"}):
                    rank_zero_warn(
                        f"{type(self).__name__} and {type(other).__name__} measure {self.prefix}/{min(shared)} with "
                        "different arguments, and their mean is logged. Give one of them another prefix=."
                    )
