"""Modules whose training step moves state of its own, in the idioms of self-supervised learning. All are float64."""

import copy
import math
from collections.abc import Callable
from typing import ClassVar

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES, CODES = 4, 3


def encoder(outputs: int = CODES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, outputs))


def freeze(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad = False
    return module


class Moving(pl.LightningModule):
    """A step on two views of each sample.

    Attributes:
        remembered: attributes that move, beside parameters and buffers.
    """

    remembered: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.student = encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05)


class BYOL(Moving):
    """The teacher's data are replaced at the start of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Linear(CODES, CODES)
        self.teacher = freeze(encoder())

    def update_momentum(self, m: float) -> None:
        for ema, p in zip(self.teacher.parameters(), self.student.parameters()):
            ema.data = ema.data * m + p.data * (1 - m)

    def training_step(self, batch, batch_idx):
        self.update_momentum(0.7)
        views = [(self.predictor(self.student(x)), self.teacher(x).detach()) for x in batch]
        (p0, z0), (p1, z1) = views
        return 2 - F.cosine_similarity(p0, z1).mean() - F.cosine_similarity(p1, z0).mean()


class MoCo(Moving):
    """A key encoder updated in place, and a queue with its pointer in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.key_encoder = freeze(copy.deepcopy(self.student))
        self.register_buffer("queue", F.normalize(torch.randn(CODES, 6), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _update_key_encoder(self) -> None:
        for k, q in zip(self.key_encoder.parameters(), self.student.parameters()):
            k.mul_(0.6).add_(q, alpha=0.4)

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        places = (int(self.pointer) + torch.arange(len(keys))) % self.queue.shape[1]
        self.queue[:, places] = keys.T
        self.pointer[0] = (int(self.pointer) + len(keys)) % self.queue.shape[1]

    def training_step(self, batch, batch_idx):
        q = F.normalize(self.student(batch[0]), dim=1)
        with torch.no_grad():
            self._update_key_encoder()
            k = F.normalize(self.key_encoder(batch[1]), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.clone().detach()], 1) / 0.5
        self._enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


class DINO(Moving):
    """A WeightNorm head with frozen lengths, a teacher, and a center that is replaced after the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = self._network(), freeze(self._network())
        self.register_buffer("center", torch.zeros(1, CODES))

    def _network(self) -> nn.Sequential:
        head = nn.utils.parametrizations.weight_norm(nn.Linear(3, CODES, bias=False))
        head.parametrizations.weight.original0.data.fill_(1)
        head.parametrizations.weight.original0.requires_grad = False
        return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), head)

    def training_step(self, batch, batch_idx):
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.data.mul_(0.5).add_((1 - 0.5) * s.detach().data)
        with torch.no_grad():
            targets = [self.teacher(x) for x in batch]
        students = [F.log_softmax(self.student(x) / 0.5, dim=1) for x in batch]
        pairs = [(F.softmax((targets[i] - self.center) / 0.2, dim=1), students[1 - i]) for i in range(2)]
        loss = sum(-(t * s).sum(1).mean() for t, s in pairs) / 2
        self.center = self.center * 0.5 + torch.cat(targets).mean(0, keepdim=True) * 0.5
        return loss


class MeanTeacher(Moving):
    """The teacher is updated after the loss, with a ramp that a counter drives."""

    remembered = ("steps",)

    def __init__(self) -> None:
        super().__init__()
        self.teacher = freeze(encoder())
        self.steps = 0

    def training_step(self, batch, batch_idx):
        consistency = F.mse_loss(self.student(batch[0]), self.teacher(batch[1]))
        loss = (1 - math.exp(-0.2 * self.steps)) * consistency + self.student(batch[0]).square().mean()
        with torch.no_grad():
            for ema, p in zip(self.teacher.parameters(), self.student.parameters()):
                ema.copy_(0.5 * ema + 0.5 * p)
        self.steps += 1
        return loss


class SwAV(Moving):
    """Normalizes trained weights in place before it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Linear(CODES, 4, bias=False)

    def normalize(self) -> None:
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight.data.clone(), dim=1))

    def training_step(self, batch, batch_idx):
        self.normalize()
        scores = [self.prototypes(F.normalize(self.student(x), dim=1)) for x in batch]
        targets = [F.softmax(s.detach() / 0.3, dim=1) for s in scores]
        pairs = ((targets[0], scores[1]), (targets[1], scores[0]))
        return sum(-(t * F.log_softmax(s / 0.5, dim=1)).sum(1).mean() for t, s in pairs) / 2


class SwAVData(SwAV):
    """The same, past autograd."""

    def normalize(self) -> None:
        self.prototypes.weight.data = F.normalize(self.prototypes.weight.data, dim=1)


class Rescaled(SwAV):
    """Weights written past autograd, each batch in its own way: no graph notices that they change under it."""

    def training_step(self, batch, batch_idx):
        self.prototypes.weight.data.mul_(batch[0].square().mean())
        return super().training_step(batch, batch_idx)

    def normalize(self) -> None:
        pass


class VAE(Moving):
    """Draws the code of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.student = encoder(2 * 2)
        self.decoder = nn.Linear(2, FEATURES)

    def training_step(self, batch, batch_idx):
        mu, log_var = self.student(batch[0]).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        kl = -0.5 * (1 + log_var - mu.square() - log_var.exp()).sum(1).mean()
        return F.mse_loss(self.decoder(z), batch[0]) + 0.1 * kl


class Annealed(Moving):
    """A schedule by a counter, a tensor in a plain attribute, a list, and a generator of its own."""

    remembered = ("steps", "average", "memory")

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.average, self.memory = 0, torch.zeros(CODES), []
        self.noise = torch.Generator().manual_seed(3)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        noise = torch.randn(CODES, generator=self.noise, dtype=torch.float64)
        z = self(batch[0]) + 0.1 * noise
        self.average.mul_(0.5).add_(z.detach().mean(0), alpha=0.5)
        self.memory.append(z.detach().square().mean())
        return 0.9**self.steps * (z - self.average).square().mean() + z.square().mean() / (1 + sum(self.memory))


MODULES: dict[str, Callable[[], Moving]] = {
    module.__name__: module for module in (BYOL, MoCo, DINO, MeanTeacher, SwAV, SwAVData, Rescaled, VAE, Annealed)
}


def build(name: str) -> Moving:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MODULES[name]()
    for attribute in module.remembered:
        value = getattr(module, attribute)
        if isinstance(value, Tensor):
            setattr(module, attribute, value.double())
    return module.double()
