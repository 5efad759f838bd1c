"""A vocoder's generator: transposed convolutions with WeightNorm turn frames of a spectrum into a wave."""

import math

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory

BANDS, HOP, FRAMES = 4, 4, 6


class ResBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)) for dilation in (1, 3)
        )

    def forward(self, x):
        for conv in self.convs:
            x = x + conv(F.leaky_relu(x, 0.1))
        return x


class Generator(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.conv_pre = weight_norm(nn.Conv1d(BANDS, channels, 3, padding=1))
        self.ups = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(channels >> i, channels >> (i + 1), 4, 2, padding=1)) for i in range(2)
        )
        self.blocks = nn.ModuleList(ResBlock(channels >> (i + 1)) for i in range(2))
        self.conv_post = weight_norm(nn.Conv1d(channels >> 2, 1, 5, padding=2))

    def forward(self, mel):
        x = self.conv_pre(mel)
        for up, block in zip(self.ups, self.blocks):
            x = block(up(F.leaky_relu(x, 0.1)))
        return torch.tanh(self.conv_post(F.leaky_relu(x)))


class Vocoder(pl.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.lr = lr
        self.generator = Generator()

    def forward(self, mel):
        return self.generator(mel)

    def training_step(self, batch, batch_idx):
        mel, audio = batch
        audio_hat = self(mel)
        loss_mel = F.l1_loss(energies(audio_hat), mel)
        loss = F.mse_loss(audio_hat, audio) + loss_mel
        self.log_dict({"loss": loss, "loss_mel": loss_mel}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr, betas=(0.8, 0.99))


def energies(audio):
    """Return the log energies of a few bands (samples, bands, frames)."""
    frames = F.pad(audio.squeeze(1), (HOP // 2, HOP // 2)).unfold(1, 2 * HOP, HOP)
    spectrum = torch.view_as_real(torch.fft.rfft(frames)[..., 1:])
    return (spectrum.pow(2).sum(-1) + 1e-2).log().transpose(1, 2)


def tones(samples=256):
    """Two sine waves of random pitch and phase."""
    time = torch.arange(FRAMES * HOP) / (2 * HOP)
    pitch, phase = 1 + 3 * torch.rand(samples, 2, 1), 2 * math.pi * torch.rand(samples, 2, 1)
    return 0.4 * (2 * math.pi * pitch * time + phase).sin().sum(1, keepdim=True)


def main():
    pl.seed_everything(0)
    audio = tones()
    mel = energies(audio)
    trainer = pl.Trainer(max_epochs=3, log_every_n_steps=4, callbacks=[NormTheory()])
    trainer.fit(Vocoder(), DataLoader(TensorDataset(mel, audio), batch_size=32, shuffle=True))


if __name__ == "__main__":
    main()
