"""Messages for the terminal that no progress bar overwrites."""

from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

from lightning_normtheory.callbacks.output.progress_bar import bar_kind

__all__ = ["say", "warn"]


def say(trainer: Trainer, text: str) -> None:
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
