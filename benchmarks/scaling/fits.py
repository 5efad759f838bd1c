"""A fit of three epochs: its first measurement and the second, warm one are counted, the third is timed."""

import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import QUIET
from benchmarks.overhead import PARTS
from benchmarks.scaling.counting import Counter
from benchmarks.timing import unit
from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic

__all__ = ["PRODUCTS", "Counts", "count_fit"]

# λ_max takes exactly so many products here, so that counts depend on sizes only.
PRODUCTS = 4
_FIRST, _WARM = 1, 2


@dataclass
class Counts:
    """Of one process: operations of one gradient on its share of the probe and of the measurements, the latter by part;
    bytes written, sent and at most in use in the warm one; bytes of θ; seconds of a gradient and of a measurement."""

    gradient: int = 0
    first: int = 0
    warm: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    written: int = 0
    sent: int = 0
    peak: int = 0
    theta: int = 0
    unit: float = 0.0
    seconds: float = 0.0


class _Counted(NormTheory):
    """Also counts the operations of each diagnostic."""

    def __init__(self, counter: Counter, **options: Any) -> None:
        self._counter, self.parts = counter, {}
        super().__init__(hessian_tol=1e-9, max_hvps=PRODUCTS, on_error="raise", **options)

    def make_diagnostics(self) -> list[Diagnostic]:
        made = super().make_diagnostics()
        for each in made:
            each.measure = self._counting(PARTS.get(each.key, "all else"), each.measure)  # type: ignore[method-assign]
        return made

    def _counting(self, part: str, action: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(view: Any) -> Any:
            before = self._counter.flops
            try:
                return action(view)
            finally:
                self.parts[part] = self.parts.get(part, 0) + self._counter.flops - before

        return run


class _Before(pl.Callback):
    """Before ours: begins to count."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch + 1 in (_FIRST, _WARM):
            self._counter.flops = self._counter.written = self._counter.sent = 0
            self._counter.peak = self._counter.live = 0
            self._counter.__enter__()


class _After(pl.Callback):
    """Behind ours: writes what has been counted to a file, since the fit may be in another process."""

    def __init__(self, ours: _Counted, counter: Counter, folder: Path) -> None:
        self._ours, self._counter, self._folder = ours, counter, folder
        self._counts = Counts()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        epoch, counter, counts = trainer.current_epoch + 1, self._counter, self._counts
        if epoch in (_FIRST, _WARM):
            counter.__exit__(None, None, None)
        if epoch == _FIRST:
            counts.first = counter.flops
        elif epoch == _WARM:
            counts.warm, counts.written, counts.sent, counts.peak = (
                *(counter.flops, counter.written, counter.sent),
                counter.peak,
            )
            counts.parts = dict(self._ours.parts)
        else:
            counts.seconds = float(trainer.callback_metrics["normtheory/seconds"])
            counts.theta = sum(p.nbytes for p in pl_module.parameters())
        self._ours.parts.clear()
        path = self._folder / f"{trainer.global_rank}.json"
        path.write_text(json.dumps(asdict(counts)))


def count_fit(
    module: pl.LightningModule, data: TensorDataset, batch: int, processes: int = 1, **options: Any
) -> list[Counts]:
    """Train one step in each epoch; return what each process has counted. ``options`` are those of `NormTheory`."""
    counter = Counter()
    ours = _Counted(counter, **options)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=3,
            limit_train_batches=1,
            limit_val_batches=0,
            callbacks=[_Before(counter), ours, _After(ours, counter, Path(folder))],
            default_root_dir=folder,
            devices=processes,
            strategy="ddp_fork" if processes > 1 else "auto",
            **QUIET,
        )
        trainer.fit(module, DataLoader(data, batch, shuffle=processes == 1))
        found = [Counts(**json.loads(path.read_text())) for path in sorted(Path(folder).glob("*.json"))]
    own = [part for part in zip(*(each[: ours.probe.samples].split(batch) for each in data.tensors))]
    with Counter() as gradient:
        _gradient(module, own)
    seconds = unit(lambda: _gradient(module, own))
    for counts in found:
        counts.gradient, counts.unit = gradient.flops, seconds
    return found


def _gradient(module: Any, batches: list[tuple[torch.Tensor, ...]]) -> None:
    """On the whole probe."""
    parameters = list(module.parameters())
    for batch in batches:
        torch.autograd.grad(module.loss(module(batch[0]), batch[1]), parameters)
