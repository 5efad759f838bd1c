"""Trainings of other packages with ``NormTheory()`` and without: does it start, is it neutral, what does it measure?"""

import hashlib
import json
import math
import os
import pickle
import random
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import QUIET
from benchmarks.packages import EPOCHS, TRAININGS
from benchmarks.peers import installed
from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.callbacks.engine.host import HostCallback
from lightning_normtheory.record.history import History, read_histories

__all__ = ["table"]

OURS = ("normtheory/", "normtheory_layers/")


class Recorder(HostCallback):
    """A digest of everything that must not differ, at every batch and at the end of every epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.note(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(trainer, pl_module, outputs)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, pl_module)

    def note(self, trainer: Any, module: Any, outputs: Any = None) -> None:
        logged = {**trainer.callback_metrics, **trainer.logged_metrics}
        parts = {
            "weights": dict(module.named_parameters()),
            "buffers": dict(module.named_buffers()),
            "gradients": {name: weight.grad for name, weight in module.named_parameters()},
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "modes": [(each.training, each.__class__.__name__) for each in module.modules()],
            "generators": (random.getstate(), np.random.get_state(), torch.random.get_rng_state()),
            "logged": {name: value for name, value in sorted(logged.items()) if not name.startswith(OURS)},
            "outputs": outputs,
        }
        self.seen.append({name: _digest(part) for name, part in parts.items()})


def _digest(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(_bits(value))).hexdigest()[:16]


def _bits(value: Any) -> Any:
    """The value with tensors replaced by their bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(str(name), _bits(each)) for name, each in value.items()]
    if isinstance(value, list | tuple):
        return [_bits(each) for each in value]
    return repr(value)


def train(name: str, measured: bool) -> dict[str, Any]:
    """Run one training in this process and folder."""
    recorder = Recorder()
    options = {
        "max_epochs": EPOCHS,
        "callbacks": [*([NormTheory()] if measured else []), recorder],
        "log_every_n_steps": 1,
        **QUIET,
    }
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    error = ""
    try:
        TRAININGS[name].run(options)
    except Exception as caught:  # noqa: BLE001  # whatever it is, it goes below the table
        error = f"{type(caught).__name__}: {caught}"
        traceback.print_exc()
    return {"seen": recorder.seen, "error": error}


def table(only: list[str]) -> str:
    """The table of docs/any_training.md, and below it why numbers are NaN or missing."""
    lines = [
        "| training | starts bare | bitwise neutral | finite | infinite | NaN | left out | predictor f |",
        "|---|---|---|--:|--:|--:|--:|---|",
    ]
    notes, absent = [], []
    for name, training in TRAININGS.items():
        if only and not any(each.lower() in name.lower() for each in only):
            continue
        if not installed(training.package):
            absent.append(name)
            continue
        print(name, file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            bare, ours = (_in_a_process(name, how, Path(folder, how)) for how in ("bare", "measured"))
            found = [each for path in Path(folder).rglob("normtheory.jsonl") for each in read_histories(path)]
        cells = [f"{name} ({installed(training.package)})", "no" if ours["error"] else "yes", _difference(bare, ours)]
        lines.append(f"| {' | '.join([*cells, *(_counts(found[0]) if found else [])])} |")
        notes += [f"\n{name}:\n", *(f"- {each}" for each in [bare["error"], ours["error"]] if each)]
        notes += [f"- `{metric}`: {reason}" for metric, reason in (_reasons(found[0]) if found else {}).items()]
    return "\n".join([*lines, *notes, *([f"\nNot installed: {', '.join(absent)}."] if absent else [])])


def _counts(history: History) -> list[str]:
    """Finite, infinite and NaN metrics, those left out, and the predictor."""
    metrics, reasons = history.rows[-1].metrics, history.rows[-1].reasons
    counts = [sum(map(kind, metrics.values())) for kind in (math.isfinite, math.isinf, math.isnan)]
    left_out = sum(name not in metrics for name in reasons)
    return [*map(str, (*counts, left_out)), history.measured.get("predictor", "")]


def _reasons(history: History) -> dict[str, str]:
    """The first sentence of why metrics are NaN or left out, by the first metric of each."""
    row = history.rows[-1]
    reasons = {name: why.split(". ")[0] for name, why in row.reasons.items()}
    unknown = [name for name, value in row.metrics.items() if math.isnan(value) and not history.reason(name)]
    return {**reasons, **dict.fromkeys(unknown, "NaN without a reason")}


def _difference(bare: dict[str, Any], ours: dict[str, Any]) -> str:
    """Whether nothing differs, or what does first."""
    for number, (before, after) in enumerate(zip(bare["seen"], ours["seen"])):
        differ = [name for name in before if before[name] != after[name]]
        if differ:
            return f"no: {', '.join(differ)} at {number} of {len(bare['seen'])}"
    return "yes" if len(bare["seen"]) == len(ours["seen"]) > 0 else "–"


def _in_a_process(name: str, how: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.trainings", name, how]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    # In a folder of its own: some packages write into the current one.
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    result = folder / "result.json"
    if not result.exists():
        raise RuntimeError(f"{name} ended without a result:\n{done.stderr}")
    return json.loads(result.read_text())


if __name__ == "__main__":
    name, how = sys.argv[1:]
    Path("result.json").write_text(json.dumps(train(name, how == "measured")))
