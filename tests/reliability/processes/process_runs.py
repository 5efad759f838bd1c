"""Training in several processes: undisturbed by what is measured, and the same after a resume."""

import hashlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_normtheory.callbacks import MinWeightNorm, NormTheory

from reliability.outcome import Outcome
from reliability.processes.process_cases import strategy
from support.lit import Classifier, loader, rows, trainer


class Digests(pl.Callback):
    """Writes, in every process and epoch, what must not change: weights, buffers, optimizer, randomness."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        everything = io.BytesIO()
        gradients = [None if p.grad is None else p.grad for p in pl_module.parameters()]
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        randomness = [torch.get_rng_state()]
        if pl_module.device.type != "cpu":
            randomness.append(torch.get_device_module(pl_module.device).get_rng_state())
        torch.save([pl_module.state_dict(), optimizers, gradients, randomness], everything)
        with (self._folder / f"{trainer.global_rank}").open("a") as file:
            file.write(hashlib.sha256(everything.getvalue()).hexdigest() + "\n")


class Fingerprint(pl.Callback):
    """Writes the weights that the first process ends with."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save({name: value.cpu() for name, value in pl_module.state_dict().items()}, self.path)


def run(folder: Path, devices: int, callbacks: list[pl.Callback], *, random: bool = True, **options: Any) -> None:
    """A short fit; if it is not ``random``, also the training itself resumes exactly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.seed_everything(0)
        checkpoint = options.pop("ckpt_path", None)
        arguments = {"max_epochs": 3, "default_root_dir": folder, **strategy(devices), **options}
        fit = trainer(callbacks, **arguments)
        module, data = Classifier("bn-dropout" if random else "bn"), loader(52, shuffle=random)
        fit.fit(module, data, loader(20, shuffle=False), ckpt_path=checkpoint)


def undisturbed(
    folder: Path,
    devices: int,
    ours: list[pl.Callback] | None = None,
    *,
    new: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> Outcome:
    """Every process is, epoch by epoch, to the last bit where it is without us.

    Args:
        new: returns further arguments of a trainer, which are not to be used twice.
    """
    ours = ours or [NormTheory(on_error="raise"), MinWeightNorm(prefix="other")]
    for name, callbacks in (("bare", []), ("watched", ours)):
        run(folder / name, devices, [*callbacks, Digests(folder / name / "digests")], **options, **new())
    bare, watched = ([path.read_text() for path in sorted((folder / name / "digests").iterdir())] for name in _NAMES)
    lines = sum(len(text.splitlines()) for text in bare)
    wrong = [f"process {rank} is elsewhere" for rank, (a, b) in enumerate(zip(bare, watched)) if a != b]
    return Outcome(lines, (*wrong, *([] if len(bare) == len(watched) == devices else ["a process is missing"])))


_NAMES = ("bare", "watched")


def resumed(folder: Path, devices: int) -> Outcome:
    """Stopped after every epoch in turn, the run gives the rows of the one that was not."""

    def fit(name: str, epochs: int, checkpoint: Path | None = None) -> dict[int, str]:
        save = pl.callbacks.ModelCheckpoint(folder / name, save_last=True, save_on_train_epoch_end=True)
        callbacks = [NormTheory(on_error="raise", probe=20), save]
        options = {"max_epochs": epochs, "enable_checkpointing": True, "ckpt_path": checkpoint}
        run(folder / name, devices, callbacks, random=False, **options)
        return {
            epoch: repr({name: value for name, value in row.items() if "seconds" not in name})
            for epoch, row in rows(folder / name).items()
        }

    whole, wrong = fit("whole", 3), []
    for stop in (1, 2):
        fit(f"until {stop}", stop)
        found = fit(f"from {stop}", 3, folder / f"until {stop}" / "last.ckpt")
        wrong += [f"from {stop}: epoch {epoch} differs" for epoch in range(stop, 3) if found.get(epoch) != whole[epoch]]
    return Outcome(3, tuple(wrong))


PROCESS_RUNS: dict[str, Callable[[Path], Outcome]] = {
    **{f"{n} processes, training undisturbed": lambda folder, n=n: undisturbed(folder, n) for n in (1, 2, 4)},
    "2 processes, accumulated gradients undisturbed": lambda folder: undisturbed(folder, 2, accumulate_grad_batches=2),
    **{f"{n} processes, resumed": lambda folder, n=n: resumed(folder, n) for n in (1, 2)},
}
