"""Messages for the terminal that no progress bar overwrites."""

import re
import warnings
from contextlib import suppress
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

from lightning_normtheory.callbacks.output.progress_bar import bar_kind

__all__ = ["hide_own_warnings", "is_trial_run", "note", "say", "show", "warn"]

_PACKAGE = r"lightning_normtheory\."


def is_trial_run(trainer: Trainer) -> bool:
    """Return whether it is a ``fast_dev_run``, where the table at the end says all."""
    return bool(getattr(trainer, "fast_dev_run", False))


def note(trainer: Trainer, text: str) -> None:
    """Write a text to Lightning's log, except in a trial run."""
    if not is_trial_run(trainer):
        rank_zero_info(text)


def say(trainer: Trainer, text: str) -> None:
    """Show a text, except in a trial run."""
    if not is_trial_run(trainer):
        show(trainer, text)


def show(trainer: Trainer, text: str) -> None:
    """Print a text above the bar; without a bar, write it to Lightning's log. Never fails."""
    bar: Any = trainer.progress_bar_callback
    try:
        kind = bar_kind(trainer)
        if kind == "tqdm":
            bar.train_progress_bar.write(text)  # also of a bar that is finished
        elif kind == "rich":
            print(text)  # rich redirects standard output, but not the log, to above its display
        else:
            rank_zero_info(text)
    except Exception:  # noqa: BLE001  # a user's own bar, or a terminal that cannot print ‖
        rank_zero_info(text)


def warn(text: str) -> None:
    """Warn, in the first process only."""
    rank_zero_warn(text)


def hide_own_warnings(hide: bool) -> None:
    """Hide the warnings of this package, as in a trial run, or show them again."""
    if hide:
        warnings.filterwarnings("ignore", module=_PACKAGE)
    else:
        with suppress(ValueError):  # not hidden
            warnings.filters.remove(("ignore", None, Warning, re.compile(_PACKAGE), 0))  # type: ignore[attr-defined]
