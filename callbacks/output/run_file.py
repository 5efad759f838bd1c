"""Locate a run's JSON Lines file, and append rows to it."""

import os
import platform
import shutil
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from pytorch_lightning import Trainer

import lightning_normtheory
from lightning_normtheory.callbacks.output.messages import is_trial_run
from lightning_normtheory.record import jsonl

__all__ = ["folder", "versions", "write"]

# Callbacks of one trainer write into one folder, also without a logger that names it.
_unnamed: "WeakKeyDictionary[Trainer, Path]" = WeakKeyDictionary()
# A fast_dev_run leaves no files: its table at the end is read from a folder that disappears with the trainer.
_temporary: "WeakKeyDictionary[Trainer, Path]" = WeakKeyDictionary()


def folder(trainer: Trainer) -> Path:
    """Return the folder of a run's files, next to its checkpoints: ``<save_dir>/<name>/<version>`` of the logger."""
    if is_trial_run(trainer):
        if trainer not in _temporary:
            _temporary[trainer] = Path(mkdtemp(prefix="normtheory"))
            # Not a TemporaryDirectory, which warns when it is collected.
            finalize(trainer, shutil.rmtree, _temporary[trainer], ignore_errors=True)
        return _temporary[trainer]
    if trainer.loggers:
        logger = trainer.loggers[0]
        save_dir = str(logger.save_dir or trainer.default_root_dir)
        if "://" in save_dir:  # remote stores cannot append to a file
            save_dir = os.getcwd()
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        return Path(save_dir, str(logger.name), version)
    if trainer not in _unnamed:
        parent = Path(trainer.default_root_dir, "normtheory_logs")
        taken = [int(path.name[8:]) for path in parent.glob("version_*") if path.name[8:].isdecimal()]
        _unnamed[trainer] = parent / f"version_{max(taken, default=-1) + 1}"
    return _unnamed[trainer]


def write(
    trainer: Trainer,
    about: Mapping[str, Any],
    metrics: Mapping[str, float],
    user_metrics: Mapping[str, float],
    reasons: Mapping[str, str],
    *,
    epoch: int,
    step: int,
    first: bool,
) -> None:
    """Add the row of a measurement to the run's file.

    Args:
        about: what the header holds besides the run and the versions; ``axis``: whether the callback measures after an
            ``"epoch"`` or a ``"step"``.
        reasons: why metrics are NaN or missing, by their names: all that hold now, not only new ones, since a file
            mixes the rows of several callbacks and of resumed runs.
        epoch: the epoch that was measured.
        step: the number of optimizer steps before the measurement, ``trainer.global_step``.
        first: whether this is the callback's first row in this fit, or the header has changed: then the header is
            written before it, unless the file has the same one already, as in a resumed run.

    Raises:
        OSError: if the file cannot be written.
    """
    path = folder(trainer)
    row = {
        "epoch": epoch,
        "step": step,
        "time": time.time(),
        "metrics": metrics,
        "user_metrics": user_metrics,
    }
    if reasons:
        row["reasons"] = reasons
    run = f"{path.parent.name}/{path.name}"
    limits = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps if trainer.max_steps != -1 else None}
    header = {"run": run, "versions": versions(), **limits, **about}
    jsonl.append(path / "normtheory.jsonl", header, row, first)


@cache  # the versions imported, even if a package is upgraded or removed during the run
def versions() -> Mapping[str, str]:
    """Return the versions of the packages that the numbers depend on."""
    return {
        "lightning_normtheory": lightning_normtheory.__version__,
        "torch": torch.__version__,
        "lightning": version("pytorch-lightning"),
        "python": platform.python_version(),
    }
