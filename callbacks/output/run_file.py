"""Where a run's JSON Lines file is, and how a row gets into it."""

import os
import platform
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from pytorch_lightning import Trainer

import lightning_normtheory
from lightning_normtheory.record import jsonl

__all__ = ["folder", "versions", "write"]

# Callbacks of one trainer write into one folder, also where there is no logger to name it.
_unnamed: "WeakKeyDictionary[Trainer, Path]" = WeakKeyDictionary()


def folder(trainer: Trainer) -> Path:
    """Where a run's files belong: beside its checkpoints, ``<save_dir>/<name>/<version>`` of the first logger."""
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
    *,
    epoch: int,
    first: bool,
) -> None:
    """Add the row of an epoch to the run's file.

    Args:
        about: goes into the header, with the run and the versions.
        epoch: the one that was measured.
        first: whether it is the first row that this callback writes in this fit, or after something in the header has
            changed: then the header comes before it, unless the file has the same one already, as of a resumed run.

    Raises:
        OSError: if it cannot be written.
    """
    path = folder(trainer)
    row = {
        "epoch": epoch,
        "step": trainer.global_step,
        "time": time.time(),
        "metrics": metrics,
        "user_metrics": user_metrics,
    }
    run = f"{path.parent.name}/{path.name}"
    header = {"run": run, "versions": versions(), "max_epochs": trainer.max_epochs, **about}
    jsonl.append(path / "normtheory.jsonl", header, row, first)


@cache  # of what was imported, also if it is upgraded or removed while the run goes on
def versions() -> Mapping[str, str]:
    """Of what the numbers depend on."""
    return {
        "lightning_normtheory": lightning_normtheory.__version__,
        "torch": torch.__version__,
        "lightning": version("pytorch-lightning"),
        "python": platform.python_version(),
    }
