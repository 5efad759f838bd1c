"""The table at the end of a fit, once for all callbacks of a trainer, read from the run's file."""

from collections.abc import Callable, Mapping

from pytorch_lightning import Trainer

from lightning_normtheory.callbacks.output import run_file, wandb
from lightning_normtheory.callbacks.output.messages import show
from lightning_normtheory.record.history import History, read_histories
from lightning_normtheory.view.terminal.fit_summary import end_table

__all__ = ["conclude", "layers"]


def conclude(trainer: Trainer, warn: Callable[[str, Exception], None]) -> None:
    """Print the table of the run, and log the table of its layers to W&B.

    Args:
        warn: called with what failed, and the error.
    """
    if not trainer.is_global_zero:
        return
    try:
        path = run_file.folder(trainer) / "normtheory.jsonl"
        histories = read_histories(path) if path.is_file() else []  # not a device, which may be endless
        for history in histories:
            if table := end_table(history):
                show(trainer, f"\n{table}")
    except Exception as error:  # noqa: BLE001  # the training is done: a table must not fail it
        warn("The table at the end could not be printed", error)
        return
    try:
        for history in histories:
            last = max((row.epoch for row in history.measurements), default=0)
            wandb.log_layer_table(trainer, layers(history), epoch=last, prefix=history.prefix)
    except Exception as error:  # noqa: BLE001  # an error of W&B's client
        warn("The table of the layers could not be logged to W&B", error)


def layers(history: History) -> Mapping[str, Mapping[str, float]]:
    """Return the last value of every quantity that is measured per layer.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> row = Row(0, 5, 0.0, {"layers/weight_norm__net_0": 0.5, "layers/ntk_share__net_0": 1.0}, {})
        >>> layers(History(Path(), "demo", "normtheory", rows=[row]))
        {'net_0': {'weight_norm': 0.5, 'ntk_share': 1.0}}
    """
    found: dict[str, dict[str, float]] = {}
    for name in history.names():
        quantity, _, layer = name.removeprefix("layers/").partition("__")
        if name.startswith("layers/"):
            found.setdefault(layer, {})[quantity] = history.last(name)
    return found
