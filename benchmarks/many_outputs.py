"""Trainings with many outputs per sample: tokens × vocabulary, pixels, audio samples; and two ordinary ones beside."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.recipes.models.resnet import ResNet18

__all__ = ["CASES", "Case", "Trained"]

Criterion = Callable[[Tensor, Tensor], Tensor]


class Trained(pl.LightningModule):
    """A network with its loss, trained by Adam."""

    def __init__(self, net: nn.Module, criterion: Criterion) -> None:
        super().__init__()
        self.net, self.criterion = net, criterion

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        outputs: k, the number of outputs of a sample.
        make: returns the network.
        data: returns inputs and targets of a number of samples.
    """

    outputs: int
    samples: int
    batch: int
    make: Callable[[], nn.Module]
    criterion: Criterion
    data: Callable[[int], tuple[Tensor, Tensor]]

    def module(self) -> Trained:
        torch.manual_seed(0)
        return Trained(self.make(), self.criterion)

    def loader(self) -> DataLoader:
        """Shuffled: the probe is drawn from all samples, however few batches an epoch has."""
        torch.manual_seed(1)
        return DataLoader(TensorDataset(*self.data(self.samples)), self.batch, shuffle=True)


class LanguageModel(nn.Module):
    """Causal attention with LayerNorm before each layer."""

    def __init__(self, vocabulary: int, width: int, positions: int, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm1(x)).chunk(3, -1)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(future, float("-inf"))
        x = x + self.projection(scores.softmax(-1) @ v)
        return x + self.mlp(self.norm2(x))


class UNet(nn.Module):
    """Two levels of convolutions with BatchNorm, and a logit for every pixel."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner, self.bottom = _conv(3, width), _conv(width, 2 * width)
        self.outer, self.head = _conv(3 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.inner(x)
        deep = F.interpolate(self.bottom(F.max_pool2d(skipped, 2)), scale_factor=2.0)
        return self.head(self.outer(torch.cat([skipped, deep], 1)))


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Separator(nn.Module):
    """A mask on a learned transform of audio, as in ConvTasNet: WeightNorm, and normalization over all positions."""

    def __init__(self, filters: int = 64, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, filters, 16, stride=8, padding=4, bias=False)
        self.decoder = nn.ConvTranspose1d(filters, 1, 16, stride=8, padding=4, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                weight_norm(nn.Conv1d(filters, width, 1)),
                nn.PReLU(),
                nn.GroupNorm(1, width),
                weight_norm(nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i, groups=width)),
                nn.PReLU(),
                nn.GroupNorm(1, width),
                weight_norm(nn.Conv1d(width, filters, 1)),
            )
            for i in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        coded = hidden = self.encoder(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.decoder(coded * hidden.sigmoid())


def _autoencoder() -> nn.Module:
    def layers() -> Iterator[nn.Module]:
        for inputs, outputs in ((784, 256), (256, 32), (32, 256)):
            yield from (nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU())
        yield nn.Linear(256, 784)

    return nn.Sequential(*layers())


def _mlp() -> nn.Module:
    hidden = [weight_norm(nn.Linear(784, 512)), nn.ReLU(), weight_norm(nn.Linear(512, 512)), nn.ReLU()]
    return nn.Sequential(*hidden, weight_norm(nn.Linear(512, 10)))


def _tokens(length: int, vocabulary: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def text(samples: int) -> tuple[Tensor, Tensor]:
        found = torch.randint(vocabulary, (samples, length + 1))
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    return text


def _over_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _images(size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, 3, size, size), torch.rand(n, 1, size, size).round())


def _audio(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 1, 1600), torch.randn(samples, 1, 1600)


def _same(samples: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(samples, 784)
    return x, x.clone()


def _classes(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, *shape), torch.randint(10, (n,)))


_BCE = F.binary_cross_entropy_with_logits
CASES = {
    "LM, 16 × 1,000 outputs": Case(
        16_000, 256, 32, lambda: LanguageModel(1000, 64, 16), _over_tokens, _tokens(16, 1000)
    ),
    "LM, 32 × 50,000": Case(1_600_000, 32, 8, lambda: LanguageModel(50_000, 32, 32), _over_tokens, _tokens(32, 50_000)),
    "U-Net, 32×32": Case(1024, 128, 16, UNet, _BCE, _images(32)),
    "U-Net, 256×256": Case(65_536, 6, 2, UNet, _BCE, _images(256)),
    "ConvTasNet-like, 1,600": Case(1600, 128, 8, Separator, F.mse_loss, _audio),
    "autoencoder, 784": Case(784, 512, 64, _autoencoder, F.mse_loss, _same),
    "WeightNorm MLP, 10": Case(10, 512, 64, _mlp, F.cross_entropy, _classes(784)),
    "ResNet18, 10": Case(10, 64, 32, lambda: ResNet18(width=16).net, F.cross_entropy, _classes(3, 32, 32)),
}
