"""Runs in memory, and the readings of their panels."""

import math
from pathlib import Path

from lightning_normtheory.record.history import History, Row
from lightning_normtheory.view.panels import PANELS
from lightning_normtheory.view.readings import read_panel

BY_KEY = {panel.key: panel for panel in PANELS}


BELOW = "the loss is below zero"


def history(optimizers=(), settings=(), reasons=(), axis="epoch", **series):
    """A run whose metrics are given as lists over the epochs, 10 steps each; ``layers__`` stands for ``layers/``.

    Args:
        reasons: by name, the same in every epoch in which the metric is NaN or missing.
    """
    named = {name.replace("layers__", "layers/"): values for name, values in series.items()}
    epochs = range(max(map(len, named.values()), default=0))
    rows = []
    for epoch in epochs:
        values = {name: v[epoch] for name, v in named.items() if epoch < len(v)}
        why = {name: text for name, text in dict(reasons).items() if math.isnan(values.get(name, math.nan))}
        rows.append(Row(epoch, 10 * epoch, float(epoch), values, {}, reasons=why))
    return History(Path(), "demo", "normtheory", list(settings), optimizers=tuple(optimizers), rows=rows, axis=axis)


def read(key, **kwargs):
    return read_panel(BY_KEY[key], history(**kwargs))


EDGE = "sharpness"
