"""Runs as files, and tables of figures, for the tests of both."""

import math

import yaml

from lightning_normtheory.recipes.figures import FIGURES
from lightning_normtheory.record import jsonl
from lightning_normtheory.record.history import read_history

NAN = math.nan
USERS = ("train_loss", "val_accuracy", "learning_rate")


def writer(tmp_path):
    """Writes the files of a run and reads them back: metrics are epoch → metrics, names without a / are the user's."""
    numbers = iter(range(1000))

    def write(model, epochs, data=None, seed=0, **trainer):
        folder = tmp_path / "runs" / str(next(numbers))
        folder.mkdir(parents=True)
        config = {
            "seed_everything": seed,
            "trainer": {
                "max_epochs": 5,
                "logger": {"class_path": "WandbLogger", "init_args": {"save_dir": str(folder)}},
                "callbacks": [{"class_path": "NormTheory", "init_args": {"probe": 512, "prefix": "normtheory"}}],
                **trainer,
            },
            "model": {"class_path": "my.Net", "init_args": model},
            "data": {"class_path": "my.Data", "init_args": data or {}},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        for epoch, metrics in dict(enumerate(epochs) if isinstance(epochs, list) else epochs).items():
            row = {
                "epoch": epoch,
                "step": 10 * (epoch + 1),
                "metrics": {k if "/" in k else f"normtheory/{k}": v for k, v in metrics.items() if k not in USERS},
                "user_metrics": {k: v for k, v in metrics.items() if k in USERS},
            }
            jsonl.append(folder / "normtheory.jsonl", {"run": "demo"}, row)
        return read_history(folder)

    return write


def table(figure, runs):
    """(panel, curve, x) → the row of the table, whose file `test_the_file_of_numbers` looks at."""
    rows = FIGURES[figure](runs).table
    found = {(row["panel"], row["curve"], row["x"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def y(row):
    return row["y"]


def two_errors(*values):
    mean = sum(values) / len(values)
    return 2 * math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
