"""The trainings that are compared between devices: layers for which a device has its own kernels, nodes or draws."""

from collections.abc import Callable
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.recipes.models import WeightNormMLP

from support.models import MODELS, Graph

SAMPLES, BATCH = 24, 8


def square_loss(output: Tensor, y: Tensor) -> Tensor:
    """(1/n) Σ ‖f(x) − y‖²."""
    return (output - y).square().flatten(1).sum(1).mean()


def ignoring(index: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, y: F.cross_entropy(output, y, ignore_index=index)


@dataclass(frozen=True)
class Row:
    """A training.

    Attributes:
        build: makes the network.
        shape: of one input; numbers below ``tokens`` if that is not 0.
        loss: of outputs and targets.
        ignored: the label of every third sample, which the loss leaves out.
        draws: whether the training draws on its device. There the numbers of a device are others than the CPU's: such a
            training takes steps too small to be seen, so that the measurements are still of the same weights.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    tokens: int = 0
    ignored: int | None = None
    draws: bool = False

    def module(self) -> pl.LightningModule:
        """The same one each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = self.build().float()
        return net if isinstance(net, pl.LightningModule) else Training(net, self.loss, 1e-9 if self.draws else 0.05)

    def loader(self, seed: int = 0) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, *self.shape, generator=generator)
        if self.tokens:
            x = torch.randint(self.tokens, (SAMPLES, *self.shape), generator=generator)
        y = torch.randint(3, (SAMPLES,), generator=generator)
        if self.loss in (square_loss, reconstruction):
            y = torch.randn(SAMPLES, 3, generator=generator)
        if self.ignored is not None:
            y[::3] = self.ignored
        return DataLoader(TensorDataset(x, y), BATCH)


class Training(pl.LightningModule):
    """A network, its loss and SGD with momentum."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], lr: float) -> None:
        super().__init__()
        self.net, self.loss, self.lr = net, loss, lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.loss is reconstruction:
            return reconstruction(*self.net(batch[0]), batch[0])
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], self.lr, momentum=0.5)


def recurrent(kind: type[nn.Module], **options) -> nn.Module:
    layer = kind(2, 4, batch_first=True, **options)
    width = 8 if layer.bidirectional else 4
    return Graph(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=layer, head=nn.Linear(width, 3))


def autoencoder() -> nn.Module:
    """A VAE, whose noise is drawn where its data are."""

    def connect(m, x):
        mean, log_variance = m.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return m.decoder(code), mean, log_variance

    return Graph(connect, encoder=nn.Linear(4, 4), decoder=nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4)))


def reconstruction(output: Tensor, mean: Tensor, log_variance: Tensor, x: Tensor) -> Tensor:
    divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
    return ((output - x).square().sum(1) + divergence).mean()


class Bump(nn.Module):
    """An activation that nobody knows, with a constant in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.scale * x).sigmoid() + torch.tensor([0.1], device=x.device)


def mlp(activation: nn.Module, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias), activation, nn.Linear(6, 3, bias))


def pooled() -> nn.Module:
    pool = nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)
    return nn.Sequential(*pool, nn.Flatten(), nn.Linear(12, 3))


TABLE = {
    "WeightNorm, parametrized": Row(MODELS["wn-parametrized-dim-0"].build, loss=square_loss),
    "WeightNorm, hook": Row(MODELS["wn-hook-dim-0"].build, loss=square_loss),
    "README": Row(lambda: WeightNormMLP(4, 6, 2, 3, lr=0.05)),
    "BatchNorm": Row(MODELS["bn"].build),
    "BatchNorm, convolution": Row(MODELS["bn-conv"].build, (2, 5, 5)),
    "BatchNorm, residual": Row(MODELS["bn-residual"].build, (2, 3, 3)),
    "BatchNorm, ReLU": Row(
        lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1, bias=False)),
        loss=lambda output, y: F.binary_cross_entropy_with_logits(output[:, 0], (y > 0).float()),
    ),
    "LSTM": Row(lambda: recurrent(nn.LSTM), (5, 2)),
    "GRU": Row(lambda: recurrent(nn.GRU, bidirectional=True), (5, 2)),
    "RNN": Row(lambda: recurrent(nn.RNN, bias=False), (5, 2)),
    "LSTM with dropout": Row(lambda: recurrent(nn.LSTM, num_layers=2, dropout=0.5), (5, 2), draws=True),
    "LSTM, WeightNorm": Row(MODELS["wn-lstm"].build, (5, 2)),
    "attention": Row(MODELS["attention"].build, (3, 4), draws=True),
    "embedding": Row(lambda: Graph(lambda m, x: m.head(m.table(x).mean(1).tanh()), table=nn.Embedding(7, 4),
                                   head=nn.Linear(4, 3)), (5,), tokens=7),
    "VAE": Row(autoencoder, loss=reconstruction, draws=True),
    "dropout": Row(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(), nn.Linear(6, 3)), draws=True),
    "max pooling": Row(pooled, (2, 4, 4)),
    "labels −1": Row(lambda: mlp(nn.Tanh()), loss=ignoring(-1), ignored=-1),
    "labels −100": Row(lambda: mlp(nn.Tanh()), ignored=-100),
    "no biases": Row(lambda: mlp(nn.Tanh(), bias=False), loss=square_loss),
    "unknown activation": Row(lambda: mlp(Bump()), loss=square_loss),
    "PReLU": Row(lambda: mlp(nn.PReLU())),
    "LayerNorm": Row(MODELS["layer-norm"].build),
    "convolution": Row(MODELS["conv"].build, (2, 5, 5)),
    "transposed convolution": Row(MODELS["transposed-conv"].build, (2, 3)),
    "WeightNorm, convolution": Row(MODELS["wn-conv-parametrized-dim-1"].build, (2, 5, 5)),
    "WeightNorm, residual": Row(MODELS["wn-residual-parametrized"].build, loss=square_loss),
    "WeightNorm, shared": Row(MODELS["wn-shared-hook"].build),
    "tied": Row(MODELS["tied"].build),
    "frozen": Row(MODELS["frozen"].build),
}  # fmt: skip
