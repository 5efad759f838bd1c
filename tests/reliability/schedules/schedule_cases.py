"""Trainings whose steps come in every way that Lightning has."""

import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging, Timer
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

from lightning_normtheory.callbacks import NormTheory

from reliability.processes.process_cases import strategy
from reliability.resume.resume_cases import InOrder, Resumable
from reliability.schedules.witness import Witness, Written, read
from support.lit import CLASSES, FEATURES, Augmented, Classifier, Stream, loader, trainer
from support.neutral_cases import Collecting, Scheduled

SAMPLES = 52  # seven batches, the last one of four samples; in each of two processes four, the last one of two
SMALL = {"on_error": "raise", "probe": 20, "ntk_samples": 8, "max_hvps": 12}


class Endless(IterableDataset):
    """Draws new samples for ever, from the global generator and its own."""

    def __init__(self):
        self.own = torch.Generator().manual_seed(3)

    def __iter__(self):
        for _ in count():
            x = torch.randn(FEATURES, generator=self.own)
            yield x + 0.1 * torch.rand(1), torch.randint(0, CLASSES, ())


class Players(pl.LightningModule):
    """A GAN. Both players step on every batch, or the generator on every second one, or on the sum of three."""

    def __init__(self, turns="both"):
        super().__init__()
        self.automatic_optimization = False
        self.turns = turns
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, FEATURES))
        self.critic = nn.Sequential(
            weight_norm(nn.Linear(FEATURES, 8)), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch, batch_idx):
        real = batch[0]
        of_generator, of_critic = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        criterion = nn.functional.binary_cross_entropy_with_logits
        fake = self(torch.randn(len(real), 4))
        critic_loss = criterion(self.critic(real), ones) + criterion(self.critic(fake.detach()), zeros)
        of_critic.zero_grad()
        self.manual_backward(critic_loss)
        of_critic.step()
        self.log("critic_loss", critic_loss, on_step=True, on_epoch=True)
        if self.turns == "second" and batch_idx % 2:
            return
        generator_loss = criterion(self.critic(fake), ones)
        self.log("generator_loss", generator_loss)
        if self.turns == "sum of three":
            self.manual_backward(generator_loss / 3)
            if batch_idx % 3 == 2:
                of_generator.step()
                of_generator.zero_grad()
        else:
            of_generator.zero_grad()
            self.manual_backward(generator_loss)
            self.clip_gradients(of_generator, 0.5, "norm")
            of_generator.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch, batch_idx):
        self.log("realism", self.critic(batch[0]).mean())

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(player.parameters(), 0.01) for player in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.99) for each in optimizers]


class Average(pl.Callback):
    """A moving average of the weights, of which the module keeps a number."""

    def on_fit_start(self, trainer, pl_module):
        self.average = AveragedModel(pl_module.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.average.update_parameters(pl_module.net)
        pl_module.moved = float(sum(p.sum() for p in self.average.parameters()))


class Batches(Timer):
    """Time that passes by one second in every batch, so that `max_time` ends a run at the same batch each time."""

    def __init__(self, seconds):
        super().__init__(timedelta(seconds=seconds))
        self.passed = 0

    def on_train_batch_end(self, trainer, *args, **kwargs):
        self.passed += 1
        super().on_train_batch_end(trainer, *args, **kwargs)

    def time_elapsed(self, stage="train"):
        return float(self.passed)


class HalfPrecision(MixedPrecision):
    """Float16 with a scale that overflows at first, and grows again soon."""

    def __init__(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3, backoff_factor=2.0**-9)
        super().__init__("16-mixed", "cpu", scaler)


def samples(**options):
    return loader(SAMPLES, **options)


def augmented(**options):
    return DataLoader(Augmented(SAMPLES), 8, shuffle=True, **options)


def stream(**options):
    return DataLoader(Stream(SAMPLES), 8, **options)


def endless(**options):
    return DataLoader(Endless(), 8, **options)


def positioned():
    """A loader whose position is part of a checkpoint."""
    return Resumable(Augmented(SAMPLES), 8, sampler=InOrder(SAMPLES))


def theory(**schedule):
    return [NormTheory(**SMALL, **schedule)]


def of_players(**schedule):
    return [
        NormTheory(parameters=0, prefix="generator", **SMALL, **schedule),
        NormTheory(parameters=1, prefix="critic", **SMALL, **schedule),
    ]


@dataclass(frozen=True)
class Schedule:
    """A training.

    Attributes:
        epoch: the optimizer steps of an epoch; ``None`` where it has no end of its own.
        more: builds callbacks beside ours: before it and after it.
    """

    module: Callable[[], pl.LightningModule] = Collecting
    data: Callable[[], Any] = samples
    epoch: int | None = 7
    trainer: dict[str, Any] = field(default_factory=dict)
    watch: Callable[..., list[pl.Callback]] = theory
    more: Callable[[], list[pl.Callback]] = list


SCHEDULES = {
    "every batch": Schedule(),
    "accumulation of 4, the last window cut short": Schedule(epoch=2, trainer={"accumulate_grad_batches": 4}),
    "accumulation of 3, no validation": Schedule(
        epoch=3, trainer={"accumulate_grad_batches": 3, "limit_val_batches": 0}
    ),
    "two players": Schedule(Players, epoch=14, watch=of_players),
    "one player on every second batch": Schedule(lambda: Players("second"), epoch=11, watch=of_players),
    # 7 is no multiple of three: gradients pass from one epoch to the next.
    "one player on the sum of three batches": Schedule(lambda: Players("sum of three"), epoch=9, watch=of_players),
    "bf16-mixed": Schedule(trainer={"precision": "bf16-mixed"}),
    "bf16-mixed, accumulation": Schedule(epoch=4, trainer={"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    "float16 with a scaler": Schedule(lambda: Classifier("wn"), trainer={"plugins": HalfPrecision}),
    "float16 with a scaler, accumulation": Schedule(
        lambda: Classifier("wn"), epoch=4, trainer={"plugins": HalfPrecision, "accumulate_grad_batches": 2}
    ),
    "iterable": Schedule(data=stream),
    "iterable, 2 workers": Schedule(data=lambda: stream(num_workers=2), epoch=14),
    "endless": Schedule(data=endless, epoch=None, trainer={"max_steps": 15, "max_epochs": None}),
    "endless, 2 workers": Schedule(
        data=lambda: endless(num_workers=2), epoch=None, trainer={"max_steps": 15, "max_epochs": None}
    ),
    "endless, accumulation": Schedule(
        data=endless,
        epoch=None,
        trainer={"max_steps": 8, "max_epochs": None, "accumulate_grad_batches": 3, "val_check_interval": 6},
    ),
    "endless, two players": Schedule(
        Players, endless, None, {"max_steps": 30, "max_epochs": None, "limit_val_batches": 0}, of_players
    ),
    "endless, limited epochs": Schedule(data=endless, trainer={"limit_train_batches": 7}),
    "max_steps within an epoch": Schedule(trainer={"max_steps": 17, "max_epochs": None}),
    "max_time": Schedule(trainer={"max_epochs": None}, more=lambda: [Batches(17)]),
    "validation every 3 batches": Schedule(trainer={"val_check_interval": 3}),
    "validation four times an epoch": Schedule(trainer={"val_check_interval": 0.25}),
    "validation across epochs": Schedule(trainer={"val_check_interval": 5, "check_val_every_n_epoch": None}),
    "shuffled, 2 workers": Schedule(data=lambda: augmented(num_workers=2)),
    "shuffled by its own generator": Schedule(data=lambda: augmented(generator=torch.Generator().manual_seed(5))),
    "a loader that knows its position": Schedule(data=positioned),
    "schedulers of steps and epochs": Schedule(Scheduled, trainer={"gradient_clip_val": 0.1}),
    "moving average": Schedule(more=lambda: [Average()]),
    "stochastic weight averaging": Schedule(
        lambda: Classifier("bn-dropout"), more=lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)]
    ),
    "logged every 5 batches": Schedule(trainer={"log_every_n_steps": 5}),
}


class Run(NamedTuple):
    """What a training has left.

    Attributes:
        seen: everything that must be the same without the callback.
        users: the user's metrics, as a logger got them.
        logged: the steps at which a logger got our rows.
        steps: `global_step` at the end of every batch.
        places: where Lightning logs the user's metrics of every batch.
        rows: our metrics by prefix and step, without times.
        epochs: the epoch of each row, by prefix and step.
    """

    seen: list
    users: list[str]
    logged: list[int]
    steps: list[int]
    places: list[int]
    rows: dict[str, dict[int, dict[str, float]]]
    epochs: dict[str, dict[int, int]]


def run(name: str, callbacks: Sequence[pl.Callback] = (), processes: int = 1) -> Run:
    """Train, in one or two processes. What the first one leaves is returned, `seen` of all of them."""
    about = SCHEDULES[name]
    pl.seed_everything(1)
    with tempfile.TemporaryDirectory() as folder:
        witness = Witness(Written(folder))
        options = {"max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 1, **about.trainer}
        options |= strategy(processes, find_unused_parameters=True) | {
            "default_root_dir": folder,
            "logger": witness.logger,
        }
        if "plugins" in options:
            options["plugins"] = options["plugins"]()
        fit = trainer([*callbacks, *about.more(), witness], **options)
        fit.fit(about.module(), about.data(), loader(20, shuffle=False))
        left = [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(processes)]
        rows, epochs = read(folder)
    return Run([record for each in left for record in each[0]], *left[0][1:], rows, epochs)


def due(name: str, found: Run, n: int, processes: int = 1) -> list[int]:
    """Return the batches after which a multiple of n steps has been reached, and there are samples to measure on."""
    reached = [i for i, (before, now) in enumerate(zip([0, *found.steps], found.steps)) if now // n > before // n]
    copied = isinstance(SCHEDULES[name].data().dataset, IterableDataset)  # from the first batches of 8
    return [batch for batch in reached if not copied or (batch + 1) * 8 * processes >= SMALL["probe"]]
