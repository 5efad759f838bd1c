"""Everything that a callback must not change in a training, and the rows that it writes."""

import pickle
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import DummyLogger

from lightning_normtheory.record import jsonl
from lightning_normtheory.record.metrics import find_metric

from support.neutral_cases import PREFIXES, Recorder, generators, state


class Witness(Recorder):
    """Also the loops, the random generators, the gradient scaler and the metrics in progress, after every batch.

    The values of the metrics are not computed here, which could hide that someone else has computed them before: they
    are compared where a logger gets them.
    """

    def __init__(self, logger):
        super().__init__()
        self.logger, self.steps, self.places = logger, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(trainer.global_step)
        self.places.append(trainer.fit_loop.epoch_loop._batches_that_stepped)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        loops = trainer.fit_loop.state_dict()
        self.note(outputs, quiet_state(trainer, pl_module), generators(), loops, scaler and scaler.state_dict())

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(quiet_state(trainer, pl_module), generators())

    def on_fit_end(self, trainer, pl_module):
        self.note(state(trainer, pl_module), generators())
        left = (self.seen, self.logger.users(), self.logger.ours(), self.steps, self.places)
        Path(self.logger.folder, f"{trainer.global_rank}.pickle").write_bytes(pickle.dumps(left))


def quiet_state(trainer, module):
    results = {key: each for key, each in trainer._results.items() if not each.meta.name.startswith(PREFIXES)}
    progress = {
        key: (each.metric_state, each._computed, each._forward_cache, each.value) for key, each in results.items()
    }
    return {**state(trainer, module, logged=False), "results": progress}


class Written(DummyLogger):
    """Keeps what it gets."""

    save_dir = property(lambda self: self.folder)
    name, version = "log", 0

    def __init__(self, folder):
        super().__init__()
        self.folder, self.calls = str(folder), []

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, dict(metrics)))

    def users(self):
        """The user's metrics, in order."""
        kept = [(step, {k: v for k, v in row.items() if not k.startswith(PREFIXES)}) for step, row in self.calls]
        return [repr((step, row)) for step, row in kept if row.keys() - {"epoch"}]

    def ours(self):
        """The step that each of our rows was logged at."""
        return [step for step, row in self.calls if any(name.startswith(PREFIXES) for name in row)]


def read(folder: Any) -> tuple[dict[str, dict[int, dict[str, float]]], dict[str, dict[int, int]]]:
    """Read the rows of the only file below a folder: metrics and epochs, by prefix and step."""
    rows: dict[str, dict[int, dict[str, float]]] = {}
    epochs: dict[str, dict[int, int]] = {}
    for path in Path(folder).rglob("normtheory.jsonl"):
        for line in jsonl.read(path):
            if "metrics" in line:
                (prefix,) = {name.split("/")[0].removesuffix("_layers") for name in line["metrics"]}
                metrics = {name: value for name, value in line["metrics"].items() if "seconds" not in name}
                rows.setdefault(prefix, {})[line["step"]] = metrics
                epochs.setdefault(prefix, {})[line["step"]] = line["epoch"]
    return rows, epochs


def different(expected: dict[str, float], found: dict[str, float]) -> list[str]:
    """Compare as text, where what is not a number equals itself and every digit counts. What only every n-th
    measurement has is at other steps in another schedule."""
    names = sorted(name for name in expected.keys() | found.keys() if find_metric(name.partition("/")[2]).every == 1)
    return [
        f"{name}: {expected.get(name)!r} became {found.get(name)!r}"
        for name in names
        if repr(expected.get(name)) != repr(found.get(name))
    ]


def first_difference(expected: list, found: list) -> str:
    """Say where two lists of records differ first."""
    for position, (a, b) in enumerate(zip(expected, found)):
        if a != b:
            return f"record {position} of {len(expected)}: {where(a, b)}"
    return "" if len(expected) == len(found) else f"{len(found)} records instead of {len(expected)}"


def where(a: Any, b: Any) -> str:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return " ".join(f"{key}/{where(a[key], b[key])}" for key in a if a[key] != b[key])
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return " ".join(f"[{i}]{where(x, y)}" for i, (x, y) in enumerate(zip(a, b)) if x != y)
    return f": {str(a)[:80]} became {str(b)[:80]}"
