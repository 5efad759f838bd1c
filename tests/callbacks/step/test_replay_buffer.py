"""A step that reads, fills and changes a replay buffer is measured, and the training stays bitwise the same."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.measuring.watched import MANY

from support.lit import trainer
from support.measuring.large_containers import Transition

SIZE = 2 * MANY


def transition(i: int) -> Transition:
    return Transition(torch.full((4,), i / SIZE) if i % 2 else np.full(4, i / SIZE, dtype=np.float32), i / SIZE)


class QLearning(LightningModule):
    """Each step adds a transition, samples eight, and writes a new priority into each."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        entries = [transition(i) for i in range(SIZE)]
        makers = {"list": list, "deque": lambda x: deque(x, maxlen=SIZE), "dict": lambda x: dict(enumerate(x))}
        self.buffer = makers[kind](entries)
        self.position, self.priorities, self.seen = 0, np.ones(SIZE), torch.zeros(SIZE)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if isinstance(self.buffer, deque):
            self.buffer.append(transition(self.position))
        else:
            self.buffer[self.position % SIZE] = transition(self.position)
        self.position += 1
        numbers = random.sample(range(SIZE), 8)
        sample = [self.buffer[i] for i in numbers]
        states = torch.stack([torch.as_tensor(each.state) for each in sample])
        targets = torch.tensor([each.reward for each in sample])
        loss = (self.net(batch[0])[:, 0] - batch[1]).square().mean()
        errors = (self.net(states)[:, 0] - targets).square()
        for i, each, error in zip(numbers, sample, errors.tolist()):
            each.priority = self.priorities[i] = error
            each.state[0] += error
            self.seen[i] += 1
        return loss + errors.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def bits(value: Any) -> bytes:
    return np.asarray(value).tobytes()


def trained(kind: str, callbacks: list) -> list:
    seed_everything(0, verbose=False)
    module = QLearning(kind)
    data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32)), batch_size=8, shuffle=True)
    trainer(callbacks, max_epochs=2).fit(module, data)
    assert type(module.buffer) in (list, deque, dict)
    entries = [module.buffer[i] for i in range(SIZE)]
    parameters = [parameter.detach() for parameter in module.parameters()]
    arrays = [bits(value) for value in (*parameters, module.priorities, module.seen, torch.get_rng_state())]
    return [[{**vars(each), "state": bits(each.state)} for each in entries], module.position, arrays, random.getstate()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["deque", "list", pytest.param("dict", marks=pytest.mark.slow)])
def test_neutral(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measured = NormTheory(probe=16)
    assert trained(kind, [measured]) == trained(kind, [])
