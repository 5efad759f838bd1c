"""Random Lightning modules: every seed is another strange model, with the data and the arguments that go with it."""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from reliability.strange.strange_draw import Plan, collapsed, draw
from reliability.strange.strange_parts import Strange
from support.models import WEIGHT_NORM_FORMS


class StrangeModule(pl.LightningModule):
    """A plan as a module. Everything that `training_step` does beside the loss is a trace that must not double."""

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = plan
        self.automatic_optimization = not plan.manual
        shape, before = plan.shape, None
        if plan.vocabulary:
            self.embedding = nn.Embedding(plan.vocabulary, plan.shape[0])
            if plan.embedding_norm:
                WEIGHT_NORM_FORMS[plan.embedding_norm](self.embedding, dim=plan.embedding_dim)
        self.blocks = nn.ModuleList()
        for index, block in enumerate(plan.blocks):
            if index == plan.turn:
                shape = collapsed(shape, plan.collapse)
            if index == len(plan.blocks) - 1:
                self.widened = plan.second_input > 0 and (plan.join == "cat" or plan.second_input != shape[0])
                shape = (shape[0] + self.widened * plan.second_input,)
            before = Strange(block, shape, before)
            self.blocks.append(before)
            shape = before.shape
        self._begin(self.blocks[-1].layer.in_features)

    def _begin(self, features: int):
        plan = self.plan
        if plan.zero_head:
            for parameter in self.blocks[-1].layer.parameters():
                nn.init.zeros_(parameter)
        if plan.outer:
            self.gain, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(features))
            self.unused = nn.Parameter(torch.ones(2))
        if plan.buffer:
            self.register_buffer("seen", torch.zeros(()))
        if plan.remembers:
            self.steps, self.history, self.by_size = 0, [], {}
            self.mean = torchmetrics.MeanMetric()

    def _turned(self, h: Tensor) -> Tensor:
        flat = self.plan.collapse == "flatten" or len(self.plan.shape) == 1
        return h.flatten(1) if flat else h.flatten(2).mean(2)

    def forward(self, x, second=None):
        plan = self.plan
        h = self.embedding(x).transpose(1, 2) if plan.vocabulary else x
        for index, block in enumerate(self.blocks):
            if index == plan.turn:
                h = self._turned(h)
            if index == len(self.blocks) - 1:
                h = self._joined(h, second)
            h = block(h)
        return {"dict": {"out": h}, "tuple": (h, x)}.get(plan.returns, h)

    def _joined(self, h: Tensor, second: Tensor | None) -> Tensor:
        """What enters the head."""
        if self.widened:
            h = torch.cat([h, second], 1)
        elif self.plan.second_input:
            h = h + second if self.plan.join == "add" else h * second
        if self.plan.outer:
            h = h * self.gain + self.shift
        if self.plan.buffer == "used":
            h = h * (1 + 0.1 * self.seen)
        if self.plan.buffer:
            self.seen.add_(0.5)
        return h

    def outputs(self, batch) -> Tensor:
        """f of a batch: what `predict` is to return."""
        *inputs, _ = batch.values() if isinstance(batch, dict) else batch
        out = self(*inputs)
        return {"dict": lambda: out["out"], "tuple": lambda: out[0]}.get(self.plan.returns, lambda: out)()

    def loss_of(self, batch) -> Tensor:
        y = batch["y"] if isinstance(batch, dict) else batch[-1]
        f = self.outputs(batch)
        loss = {
            "square": lambda: (f - y).square().sum(1).mean(),
            "mse": lambda: F.mse_loss(f, y),
            "cross entropy": lambda: F.cross_entropy(f, y),
            "logistic": lambda: F.binary_cross_entropy_with_logits(f, y),
        }[self.plan.loss]()
        return loss + 0.01 * sum(p.square().sum() for p in self.parameters()) if self.plan.regularized else loss

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("train_loss", loss.detach(), on_epoch=True, batch_size=1)
        if self.plan.remembers:
            value = float(loss.detach())
            self.steps += 1
            self.history.append(value)
            self.by_size.setdefault(len(batch), []).append(batch_idx)
            self.mean.update(value)
        if self.plan.manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch), batch_size=1)

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        kind, lr = self.plan.optimizer, self.plan.lr
        if kind == "adam":
            return torch.optim.Adam(parameters, lr)
        if kind == "groups":
            groups = [{"params": parameters[:1], "lr": lr / 2, "name": "first"}, {"params": parameters[1:]}]
            return torch.optim.SGD(groups, lr)
        return torch.optim.SGD(parameters, lr, momentum=0.5 if kind == "momentum" else 0.0)


class Samples(Dataset):
    """The data of a plan: tuples, or dicts."""

    def __init__(self, plan: Plan, n: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
        if plan.vocabulary:
            x = torch.randint(0, plan.vocabulary, (n, *plan.shape[1:]), generator=generator)
        else:
            x = torch.randn(n, *plan.shape, **options)
        y = torch.randn(n, plan.outputs, **options)
        if plan.loss == "cross entropy":
            y = torch.arange(n) % plan.outputs
        if plan.loss == "logistic":
            y = (y > 0).double()
        second = {"x2": torch.randn(n, plan.second_input, **options)} if plan.second_input else {}
        self.columns = {"x": x, **second, "y": y}
        self.as_dict = plan.dict_batches

    def __len__(self):
        return len(self.columns["y"])

    def __getitem__(self, i):
        found = {name: column[i] for name, column in self.columns.items()}
        return found if self.as_dict else tuple(found.values())

    def batch(self, indices: list[int]) -> Any:
        """Of these samples, as a loader would give it."""
        found = {name: column[indices] for name, column in self.columns.items()}
        return found if self.as_dict else list(found.values())


@dataclass(frozen=True)
class StrangeModel:
    """What a seed stands for."""

    seed: int
    plan: Plan

    def build(self, *, checkpoints: bool = True) -> StrangeModule:
        """The module before its training, the same every time; perhaps without checkpoints, which change no number."""
        plan = self.plan
        if not checkpoints:
            blocks = tuple(dataclasses.replace(block, checkpointed=False) for block in plan.blocks)
            plan = dataclasses.replace(plan, blocks=blocks)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return StrangeModule(plan).double()

    def data(self, *, validation: bool = False) -> Samples:
        plan = self.plan
        return Samples(plan, plan.validation if validation else plan.samples, 2 * self.seed + validation)

    def loader(self) -> DataLoader:
        return DataLoader(self.data(), self.plan.batch_size, shuffle=True, drop_last=self.plan.drop_last)

    def validation_loader(self) -> DataLoader | None:
        return DataLoader(self.data(validation=True), self.plan.validation_batch) if self.plan.validation else None

    @property
    def arguments(self) -> dict[str, Any]:
        """What a user may pass: nothing, and for some seeds the functions that are to be found."""
        return {} if self.seed % 4 else {"predict": StrangeModule.outputs, "loss": StrangeModule.loss_of}

    @property
    def describe(self) -> str:
        return f"seed {self.seed}: {self.plan}"

    def probe(self) -> list[Any]:
        """The batches of the probe, by the rules that docs/measuring.md states."""
        return self._cut(self.data(), self.plan.batch_size)

    def validation_probe(self) -> list[Any]:
        return self._cut(self.data(validation=True), self.plan.validation_batch)

    def _cut(self, data: Samples, size: int) -> list[Any]:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()[: self.plan.probe]
        chunks = [order[start : start + size] for start in range(0, len(order), size)]
        if len(chunks) > 1 and len(chunks[-1]) == 1:
            lonely = chunks.pop()
            chunks[-1] = chunks[-1] + lonely
        return [data.batch(chunk) for chunk in chunks]


def strange_model(seed: int) -> StrangeModel:
    """A random model of at most 150 trainable parameters, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        model = StrangeModel(seed, draw(rng))
        trainable = sum(p.numel() for p in model.build().parameters() if p.requires_grad)
        if 0 < trainable <= 150:
            return model
