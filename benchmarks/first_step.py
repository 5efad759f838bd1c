"""How long `NormTheory` delays the first step, what a measurement costs, and the memory of it, against outputs."""

import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from rich.table import Table
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import QUIET
from benchmarks.many_outputs import CASES, Trained
from benchmarks.timing import timed
from lightning_normtheory import callbacks

__all__ = ["table"]

PROBE = 512
# All products take the same memory.
_FEW = {"HessianTopEigenvalue": {"max_hvps": 4}}
_TINY = TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
# Memory of at least this many bytes is returned to the system as soon as it is free: the peak is of what is in use.
_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Clock(pl.Callback):
    """Behind the callback that is measured: notes the time from fit start to the first step, and, with the other clock
    before that callback, that of each measurement."""

    def __init__(self, found: dict[str, Any], before: "Clock | None" = None) -> None:
        self._found, self._before = found, before
        self.now = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._before is not None and trainer.global_step == 0:
            self._found["first step"] = time.perf_counter() - self.now

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.now = time.perf_counter()
        if self._before is not None:
            self._found[f"measurement {trainer.current_epoch + 1}"] = self.now - self._before.now


def table(only: list[str], limit: float) -> Table:
    """One row for every case; ``limit`` in G, after which a run ends."""
    result = Table(
        title=f"NormTheory() beside the bare run, two measurements, at most {limit:.0f} G",
        caption="Memory: the peak of the process above that after a tiny training, relative to the bare run's.",
        title_justify="left",
        caption_justify="left",
    )
    result.add_column("training")
    for header in ("outputs", "batch", "probe", "G", "first step after", "first measurement", "second", "memory"):
        result.add_column(header, justify="right")
    for name, case in CASES.items():
        if only and not any(each.lower() in name.lower() for each in only):
            continue
        spent = _in_a_process(name, "time", "NormTheory", limit)
        bare, ours = (_in_a_process(name, "memory", callback, limit) for callback in ("", "NormTheory"))
        result.add_row(
            name,
            f"{case.outputs:,}",
            str(case.batch),
            str(min(case.samples, PROBE)),
            f"{spent['G']:.2f} s",
            *(_in_units(spent, key, limit) for key in ("first step", "measurement 1", "measurement 2")),
            f"{'' if ours['ended'] else '> '}{ours['peak'] / bare['peak']:.1f} × {bare['peak']:.0f} MB",
        )
    return result


def _in_units(spent: dict[str, float], key: str, limit: float) -> str:
    return f"{spent[key] / spent['G']:.1f} G" if key in spent else f"> {limit:.0f} G"


def _in_a_process(*arguments: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.first_step", *map(str, arguments)]
    environment = {**os.environ, **(_MAPPED if "memory" in arguments else {})}
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, env=environment)
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _run(name: str, what: str, callback: str, limit: float) -> None:
    """Run a case in this process, and print what was measured, at the latest when the limit is reached."""
    case = CASES[name]
    found: dict[str, Any] = {}
    if what == "memory":  # what is loaded on first use is no memory of a training
        _fit(Trained(torch.nn.Linear(2, 1), F.mse_loss), DataLoader(_TINY, 2), [callbacks.NormTheory()], {})
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _peak()

    def end(*, ended: bool) -> None:
        os.write(1, f"\n{json.dumps({**found, 'ended': ended, 'peak': _peak() - before})}\n".encode())
        os._exit(0)

    loader = case.loader()
    found["G"] = statistics.median(timed(partial(_gradient, case.module(), loader)) for _ in range(3))
    bare: dict[str, Any] = {}
    for _ in range(2 if what == "time" else 0):  # the first run also loads what Lightning loads when it is used
        _fit(case.module(), loader, [], bare)
    timer = threading.Timer(limit * found["G"], lambda: end(ended=False))
    timer.daemon = True
    timer.start()
    options = _FEW.get(callback, {}) if what == "memory" else {}
    _fit(case.module(), loader, [getattr(callbacks, callback)(**options)] if callback else [], found)
    found["first step"] -= bare.get("first step", 0.0)
    end(ended=True)


def _gradient(model: Trained, loader: DataLoader) -> None:
    """The gradient of the loss on the probe, batch by batch."""
    samples = 0
    for batch in loader:
        torch.autograd.grad(model.training_step(batch, 0), list(model.parameters()))
        samples += len(batch[0])
        if samples >= PROBE:
            return


def _fit(model: Trained, loader: DataLoader, ours: list[pl.Callback], found: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        before = Clock(found)
        trainer = pl.Trainer(
            max_epochs=2,
            limit_train_batches=1,
            callbacks=[before, *ours, Clock(found, before)],
            default_root_dir=folder,
            **QUIET,
        )
        trainer.fit(model, loader)


def _peak() -> float:
    """The largest resident memory so far, in MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


if __name__ == "__main__":
    _run(*sys.argv[1:4], float(sys.argv[4]))
