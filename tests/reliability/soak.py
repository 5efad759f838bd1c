"""Long runs with every callback: nothing grows, and the training is bit by bit that of the bare run.

``cd tests && python -m reliability.soak 200`` prints the figures. It needs Linux, whose /proc tells what a process
holds.
"""

import contextlib
import gc
import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory import callbacks as ours
from lightning_normtheory.callbacks.output import run_file, wandb
from lightning_normtheory.recipes.datasets.source import embedded_images

from reliability.outcome import Outcome
from support.neutral_cases import freeze, generators, state

# What has to stay the same to the last one. Objects are all that python's garbage collector knows of.
COUNTED = (
    "file descriptors",
    "threads",
    "objects",
    "tensors",
    "hooks",
    "function modes",
    "warning filters",
    "trainers known",
)
# Bytes over a whole run. A bare run moves by a tenth of that, as the allocator gives pages back or not.
MEMORY_LIMIT = 2 * 2**20


class Soaked(pl.LightningModule):
    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def weightnorm_mlp() -> Soaked:
    """Of the form of WN's theorems, with the loss of the theory: every diagnostic but that of BatchNorm has work."""
    layers = [weight_norm(nn.Linear(49, 8, bias=False)), nn.Tanh(), weight_norm(nn.Linear(8, 8, bias=False)), nn.Tanh()]
    return Soaked(nn.Sequential(nn.Flatten(), *layers, nn.Linear(8, 10, bias=False)), one_hot_square_loss)


def one_hot_square_loss(outputs: Tensor, classes: Tensor) -> Tensor:
    return ((outputs - nn.functional.one_hot(classes, 10)) ** 2).sum(1).mean()


def batchnorm_conv() -> Soaked:
    block = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4)]
    head = [nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 10)]
    return Soaked(nn.Sequential(*block, *head), nn.functional.cross_entropy)


MODELS = {"WeightNorm MLP": weightnorm_mlp, "BatchNorm conv net": batchnorm_conv}


def every_callback(model: str) -> list[pl.Callback]:
    """`NormTheory`, and every other by itself."""
    probe: dict[str, Any] = {"probe": 48, "on_error": "raise"}
    alone = [ours.MinWeightNorm, ours.RSCRatio, ours.RademacherBound, ours.ProgressiveBound]
    alone += [ours.BatchNormTheory if "BatchNorm" in model else ours.WeightNormTheory]
    return [
        ours.NormTheory(**probe, ntk_samples=16),
        ours.HessianTopEigenvalue(**probe, predictor_samples=2, max_hvps=20, prefix="other_hessian"),
        ours.HessianTrace(**probe, hvps=12, layers=True, prefix="other_trace"),
        ours.NTKLeastEigenvalue(**probe, samples=16, prefix="other_ntk"),
        ours.Linearity(**probe, samples=16, prefix="other_linearity"),
        ours.ConvergenceCertificate(**probe, samples=16, prefix="other_certificate"),
        *(callback(**probe, prefix=f"other_{callback.__name__}") for callback in alone),
    ]


def loaders() -> list[DataLoader]:
    """Images of 7 × 7, for training and validation."""
    sets = []
    for part, samples in (("train", 64), ("test", 32)):
        images, classes = embedded_images(part)
        small = nn.functional.avg_pool2d(images[:samples].float().reshape(samples, 1, 28, 28), 4)
        sets.append(TensorDataset(nn.functional.normalize(small, dim=(1, 2, 3)), classes[:samples]))
    return [DataLoader(sets[0], 16, shuffle=True), DataLoader(sets[1], 16)]


class Meter(pl.Callback):
    """Writes a line at the end of every epoch: into a file, since a list in memory would grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin = time.process_time()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Of the processor, not of the wall: whatever else the machine does is not counted.
        seconds = time.process_time() - self.begin
        bits = repr(freeze([state(trainer, pl_module), generators()]))
        digest = hashlib.sha256(bits.encode()).hexdigest()
        write(self.path, {**count(pl_module), "seconds": seconds, "digest": digest})
        self.begin = time.process_time()


def write(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def count(model: nn.Module) -> dict[str, int]:
    """Everything that a callback could leave behind."""
    importlib.invalidate_caches()  # python remembers the packages of a folder once more whenever the folder changes
    gc.collect()
    objects = gc.get_objects()
    hooks = [found for m in (model, *model.modules()) for name, found in vars(m).items() if "hooks" in name and found]
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(objects),
        "tensors": sum(issubclass(type(each), Tensor) for each in objects),
        "hooks": sum(map(len, hooks)),
        "function modes": torch._C._len_torch_function_stack(),
        "warning filters": len(warnings.filters),
        "trainers known": len(run_file._unnamed) + len(wandb._defined),
        "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def long_fit(model: str, epochs: int, path: Path, watching: Sequence[pl.Callback]) -> None:
    """One fit with a logger and checkpoints."""
    pl.seed_everything(0, verbose=False)
    folder = path.with_name(f"{path.name} files")
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[*watching, Meter(path), ModelCheckpoint(folder / "checkpoints", save_last=True)],
        logger=CSVLogger(folder, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(MODELS[model](), *loaders())


class Interrupted(pl.Callback):
    """Ends a fit by an error after the measurement."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise ZeroDivisionError


def short_fits(model: str, fits: int, path: Path, kind: str) -> None:
    """One fit after the other, without a logger and with a progress bar."""
    watching = every_callback(model)
    for _ in range(fits):
        pl.seed_everything(0, verbose=False)
        if kind == "new callbacks":
            watching = every_callback(model)
        trainer = pl.Trainer(
            max_epochs=1,
            # Not rich's bar, which holds on to what it has drawn last.
            callbacks=[*watching, TQDMProgressBar(), *([Interrupted()] if kind == "fits that fail" else [])],
            default_root_dir=path.with_name("files"),
            logger=False,
            enable_checkpointing=False,
            accelerator="cpu",
            devices=1,
            num_sanity_val_steps=0,
        )
        module = MODELS[model]()
        with contextlib.suppress(ZeroDivisionError):
            trainer.fit(module, *loaders())
        del trainer
        write(path, count(module))


def run_alone(what: str, model: str, rounds: int, path: Path) -> None:
    """Run one kind of soak; the entry point of the separate process."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if what == "epochs":
        long_fit(model, rounds, path.with_suffix(".bare"), [])
        long_fit(model, rounds, path, every_callback(model))
    else:
        short_fits(model, rounds, path, what)


class SoakResult(NamedTuple):
    """
    Attributes:
        outcome: values compared: counts and digests of every round.
        figures: of each run, in words, for the report.
    """

    outcome: Outcome
    figures: dict[str, str]


def soak(epochs: int, folder: Path, fits: int = 10) -> SoakResult:
    """Train both models for ``epochs``; run ``fits`` in one process: same callbacks, new ones, fits that fail."""
    runs = [("epochs", model, epochs) for model in MODELS]
    runs += [(kind, "WeightNorm MLP", fits) for kind in ("the same callbacks", "new callbacks", "fits that fail")]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda run: soak_one(*run, folder), runs))
    outcomes = [result.outcome for result in found]
    differences = tuple(each for outcome in outcomes for each in outcome.differences)
    figures = {name: text for result in found for name, text in result.figures.items()}
    return SoakResult(Outcome(sum(outcome.compared for outcome in outcomes), differences), figures)


def soak_one(what: str, model: str, rounds: int, folder: Path) -> SoakResult:
    name = f"{rounds} epochs, {model}" if what == "epochs" else f"{rounds} fits, {what}"
    path = folder / f"{name}.jsonl"
    # One arena: with several, which of them a page comes from is chance.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, __file__, what, model, str(rounds), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return SoakResult(Outcome(0, (f"{name}: ended with {done.returncode}: {done.stderr[-2000:]}",)), {})
    rows, bare = read(path), read(path.with_suffix(".bare"))
    compared = len(rows) * len(COUNTED) + len(bare)
    differences = [f"{name}: {each}" for each in grown(rows)]
    differences += [f"{name}: epoch {i} is not that of the bare run" for i in unlike(rows, bare)]
    return SoakResult(Outcome(compared, tuple(differences)), {name: in_words(rows, bare)})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def thirds(rows: Sequence[dict[str, Any]], name: str) -> tuple[float, float, float]:
    """The median of each third of the rounds after a tenth of them, and at least two, which warm up."""
    values = [row[name] for row in rows[max(2, len(rows) // 10) :]]
    third = len(values) // 3
    return median(values[:third]), median(values[third:-third]), median(values[-third:])


def grown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is more in the second third than in the first, and more still in the last. What is made once, such as a
    module that a warning imports, is not: it comes in one third only."""
    found = []
    for name in COUNTED:
        first, middle, last = thirds(rows, name)
        if first < middle < last:
            found.append(f"{name} grow: {first:g}, {middle:g}, {last:g}")
    first, _, last = thirds(rows, "memory")
    if last - first > MEMORY_LIMIT:
        found.append(f"memory grows by {(last - first) / 2**20:.1f} MB")
    return found


def unlike(rows: Sequence[dict[str, Any]], bare: Sequence[dict[str, Any]]) -> list[int]:
    """The epochs after which something differs."""
    return [i for i, (row, other) in enumerate(zip(rows, bare)) if row["digest"] != other["digest"]]


def in_words(rows: Sequence[dict[str, Any]], bare: Sequence[dict[str, Any]]) -> str:
    def change(name: str, of: Sequence[dict[str, Any]]) -> float:
        first, _, last = thirds(of, name)
        return last - first

    def slower(of: Sequence[dict[str, Any]]) -> float:
        first, _, last = thirds(of, "seconds")
        return last / first

    counts = ", ".join(f"{name} {change(name, rows):+g}" for name in COUNTED[:4])
    words = f"{counts}, memory {change('memory', rows) / 2**20:+.2f} MB"
    if not bare:
        return words
    return (
        f"{words} (bare {change('memory', bare) / 2**20:+.2f} MB), time of an epoch × {slower(rows):.2f}"
        f" (bare × {slower(bare):.2f}); {len(rows) - len(unlike(rows, bare))} of {len(rows)} epochs bitwise equal"
    )


def main() -> int:
    if len(sys.argv) > 2:
        what, model, rounds, path = sys.argv[1:]
        run_alone(what, model, int(rounds), Path(path))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        outcome, figures = soak(int(sys.argv[1]), Path(folder))
    for name, text in figures.items():
        print(f"{name}: {text}")
    print(outcome)
    return bool(outcome.differences)


if __name__ == "__main__":
    sys.exit(main())
