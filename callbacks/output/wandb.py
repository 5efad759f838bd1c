"""Tell W&B the axis and the summary of each metric, the settings, and a table of the layers.

The numbers themselves reach W&B through `pl_module.log`, as they reach every logger. Nothing here imports wandb unless
the trainer has a `WandbLogger`. The functions raise what the client raises; the calling callback handles it.
"""

import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal
from weakref import WeakKeyDictionary

from pytorch_lightning import Trainer

from lightning_normtheory.callbacks.output import run_file
from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.record.metrics import find_metric

__all__ = ["define", "describe", "log_layer_table"]

_WANDB_LOGGERS = {"pytorch_lightning.loggers.wandb.WandbLogger", "lightning.pytorch.loggers.wandb.WandbLogger"}
_CONFIG_KEY = "normtheory"
# The names defined in each run, with their axes. Callbacks share names, and a trainer can continue the run of another.
_defined: "WeakKeyDictionary[Any, dict[str, str]]" = WeakKeyDictionary()


def define(trainer: Trainer, names: Mapping[str, str], axis: Literal["epoch", "step"] = "epoch") -> None:
    """Define the axis and the summary of new metrics in each W&B run, before their first row.

    `WandbLogger` has defined ``*`` with the axis ``trainer/global_step``. Between two patterns W&B's choice is not
    defined, but an exact name takes precedence over patterns.

    Args:
        names: the metrics as logged, each with its name without prefix: ``{"normtheory/loss": "loss"}``.
        axis: whether they are measured by epochs or by steps. A name that one callback measures by epochs and another
            by steps, such as ``normtheory/seconds``, has the steps: every row has both.
    """

    def define_in(logger: Any) -> None:
        known = _defined.setdefault(logger.experiment, {})
        # The logger puts its prefix before the epoch, but not before the step.
        step_metric = _as_logged(logger, "epoch") if axis == "epoch" else "trainer/global_step"
        for name, bare in names.items():
            logged = _as_logged(logger, name)
            if known.get(logged) in (axis, "step") or "*" in logged:  # a star in a layer's name would make a pattern
                continue
            logger.experiment.define_metric(logged, step_metric=step_metric, summary=find_metric(bare).summary)
            known[logged] = axis

    _for_each_run(trainer, define_in)


def describe(trainer: Trainer, settings: Mapping[str, Any]) -> None:
    """Write the settings of a callback and the versions into the config of each run, ``normtheory.<callback>``.

    Two callbacks of one class differ in their prefix, which is then part of the name. A resumed run gets the current
    settings.
    """
    name = settings["callback"]
    if settings["prefix"] != _CONFIG_KEY:
        name = f"{name} {settings['prefix']}"

    def describe_in(logger: Any) -> None:
        config = logger.experiment.config
        before = config.get(_CONFIG_KEY, {})
        if not isinstance(before, Mapping):
            raise ValueError(
                f"Expected the run's config to have nothing under {_CONFIG_KEY!r}, where the settings of the callbacks "
                f"belong, but got {before!r}. Give that hyperparameter another name."
            )
        after = {**before, name: dict(settings), "versions": dict(run_file.versions())}
        if after != before:
            config.update({_CONFIG_KEY: after}, allow_val_change=True)

    _for_each_run(trainer, describe_in)


def log_layer_table(
    trainer: Trainer, layers: Mapping[str, Mapping[str, float]], *, epoch: int, prefix: str = "normtheory"
) -> None:
    """Log ``<prefix>_layers/table`` at the last step: a row for each layer, a column for each quantity.

    Call it at the end of a fit: W&B creates an artifact for every table.

    Args:
        epoch: of the measurement, which need not be finished.
    """
    quantities = list(dict.fromkeys(quantity for values in layers.values() for quantity in values))
    rows = [[layer, *(values.get(quantity) for quantity in quantities)] for layer, values in layers.items()]

    def log_in(logger: Any) -> None:
        # Imported here: with this logger wandb is installed.
        table = import_module("wandb").Table(columns=["layer", *quantities], data=rows)
        # The last step of the fit, which Lightning counts from 0. It becomes a column of the row; as W&B's own `step=`
        # it would make W&B drop the row.
        step = max(trainer.fit_loop.epoch_loop._batches_that_stepped - 1, 0)
        logger.log_metrics({f"{prefix}_layers/table": table, "epoch": epoch}, step)

    if layers:
        _for_each_run(trainer, log_in)


def _for_each_run(trainer: Trainer, action: Callable[[Any], None]) -> None:
    """Apply ``action`` to each W&B logger, in the process that has a run; raise the first error at the end."""
    if not trainer.is_global_zero:
        return
    errors = []
    # A new seed each time: ids that the client may draw must differ between runs.
    with isolated_rng(secrets.randbits(32)):
        for logger in filter(_is_wandb, trainer.loggers):
            try:
                action(logger)
            except Exception as error:  # noqa: BLE001  # raised below
                errors.append(error)
    if errors:
        raise errors[0]


def _is_wandb(logger: object) -> bool:
    """Return whether it is a `WandbLogger`, or of a derived class."""
    return any(f"{base.__module__}.{base.__qualname__}" in _WANDB_LOGGERS for base in type(logger).__mro__)


def _as_logged(logger: Any, name: str) -> str:
    """Return the name with the logger's own prefix, which Lightning puts before every name."""
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{name}" if logger._prefix else name
