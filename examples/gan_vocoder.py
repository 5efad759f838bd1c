"""A GAN vocoder like HiFi-GAN: WeightNorm in both players, an endless stream of audio, a number of steps for an end.

No epoch ends here, so the callbacks measure at about 20 steps of `max_steps`, and say so at fit start;
``every_n_steps=`` is another choice. Each player has its own callback: `parameters=` is the index of its optimizer.
The generator is that of `vocoder.py`.
"""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, IterableDataset

from lightning_normtheory.callbacks import NormTheory

from vocoder import Generator, energies, tones


class PeriodDiscriminator(nn.Module):
    """Looks at every n-th sample of the wave."""

    def __init__(self, period, channels=8):
        super().__init__()
        self.period = period
        self.conv_in = weight_norm(nn.Conv2d(1, channels, (3, 1), (2, 1), padding=(1, 0)))
        self.conv_post = weight_norm(nn.Conv2d(channels, 1, (3, 1), padding=(1, 0)))

    def forward(self, audio):
        features = F.leaky_relu(self.conv_in(audio.unflatten(2, (-1, self.period))), 0.1)
        return self.conv_post(features).flatten(1), features


class Discriminator(nn.Module):
    def __init__(self, periods=(2, 3)):
        super().__init__()
        self.parts = nn.ModuleList(PeriodDiscriminator(period) for period in periods)

    def forward(self, audio):
        scores, features = zip(*(part(audio) for part in self.parts))
        return torch.cat(scores, 1), features


class GANVocoder(pl.LightningModule):
    def __init__(self, lr=2e-3):
        super().__init__()
        self.lr = lr
        self.automatic_optimization = False
        self.generator, self.discriminator = Generator(), Discriminator()

    def forward(self, mel):
        return self.generator(mel)

    def training_step(self, batch, batch_idx):
        mel, audio = batch
        opt_g, opt_d = self.optimizers()
        audio_hat = self(mel)

        real, _ = self.discriminator(audio)
        fake, _ = self.discriminator(audio_hat.detach())
        loss_d = (real - 1).square().mean() + fake.square().mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()

        _, features = self.discriminator(audio)
        fake, features_hat = self.discriminator(audio_hat)
        loss_adversarial = (fake - 1).square().mean()
        loss_features = sum(F.l1_loss(ours, theirs.detach()) for ours, theirs in zip(features_hat, features))
        loss_mel = F.l1_loss(energies(audio_hat), mel)
        loss_g = loss_adversarial + 2 * loss_features + loss_mel
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.log_dict({"loss_g": loss_g, "loss_d": loss_d, "loss_mel": loss_mel}, prog_bar=True)

    def configure_optimizers(self):
        adam = {"lr": self.lr, "betas": (0.8, 0.99)}
        return [
            torch.optim.AdamW(self.generator.parameters(), **adam),
            torch.optim.AdamW(self.discriminator.parameters(), **adam),
        ]


class Tones(IterableDataset):
    """Two sine waves of random pitch and phase, for ever."""

    def __iter__(self):
        while True:
            audio = tones(1)
            yield energies(audio)[0], audio[0]


def main(every_n_steps=None):
    pl.seed_everything(0)
    options = {"probe": 16, "every_n_steps": every_n_steps}
    callbacks = [
        NormTheory(parameters=0, prefix="generator", **options),
        NormTheory(parameters=1, prefix="discriminator", **options),
    ]
    # Lightning counts the steps of both optimizers: 200 batches.
    trainer = pl.Trainer(max_steps=400, log_every_n_steps=10, callbacks=callbacks)
    trainer.fit(GANVocoder(), DataLoader(Tones(), batch_size=16))


if __name__ == "__main__":
    main()
