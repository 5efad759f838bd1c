"""What a measurement costs with a replay buffer in the module: CPU seconds of two epochs, by the number of entries."""

import random
import tempfile
import time
from collections import deque
from typing import Any, NamedTuple

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import QUIET
from lightning_normtheory.callbacks import NormTheory

__all__ = ["table"]


class _Transition(NamedTuple):
    state: Tensor
    reward: float


def _transition(i: int) -> _Transition:
    return _Transition(torch.full((4,), float(i % 97)), float(i % 89))


class _Learner(LightningModule):
    """Each step adds a transition and samples 32."""

    def __init__(self, kind: str, entries: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
        made = map(_transition, range(entries))
        self.buffer: Any = deque(made, maxlen=entries) if kind == "deque" else [each._asdict() for each in made]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if isinstance(self.buffer, deque):
            self.buffer.append(_transition(batch_idx))
        else:
            self.buffer[batch_idx] = _transition(batch_idx)._asdict()
        found = [self.buffer[random.randrange(len(self.buffer))] for _ in range(32)]
        sample = [_Transition(**each) if isinstance(each, dict) else each for each in found]
        outputs = self.net(torch.stack([each.state for each in sample]))[:, 0]
        targets = torch.tensor([each.reward for each in sample])
        return (self.net(batch[0])[:, 0] - batch[1]).square().mean() + (outputs - targets).square().mean() / 1e4

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def _seconds(kind: str, entries: int) -> float:
    seed_everything(0, verbose=False)
    module = _Learner(kind, entries)
    data = DataLoader(TensorDataset(torch.randn(256, 4), torch.randn(256)), batch_size=32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(max_epochs=2, callbacks=[NormTheory(probe=64)], default_root_dir=folder, **QUIET)
        begin = time.process_time()
        trainer.fit(module, data)
        return time.process_time() - begin


def table() -> Table:
    sizes = [10**3, 10**4, 10**5, 10**6]
    found = Table("buffer", *[f"{entries:,}" for entries in sizes], title="CPU seconds, two epochs")
    _seconds("deque", 100)  # imports
    for kind in ("deque", "list"):
        found.add_row(kind, *[f"{_seconds(kind, entries):.2f}" for entries in sizes])
    return found
