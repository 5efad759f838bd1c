"""A GAN with manual optimization: a generator learns a ring of eight Gaussians.

The two players have different losses, so each one has its own callback: `parameters=` chooses whose weights are
measured, here by the index of the optimizer, and with them the loss that trains them; `prefix=` names the metrics.
"""

import math

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory


class GAN(pl.LightningModule):
    def __init__(self, latent_dim=4, width=32, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)
        )
        self.discriminator = nn.Sequential(weight_norm(nn.Linear(2, width)), nn.LeakyReLU(0.2), nn.Linear(width, 1))
        self.criterion = nn.BCEWithLogitsLoss()

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        ones, zeros = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
        fake = self(torch.randn(len(real), self.hparams.latent_dim).type_as(real))

        err_d_real = self.criterion(self.discriminator(real), ones)
        err_d_fake = self.criterion(self.discriminator(fake.detach()), zeros)
        opt_d.zero_grad()
        self.manual_backward(err_d_real)
        self.manual_backward(err_d_fake)
        opt_d.step()

        err_g = self.criterion(self.discriminator(fake), ones)
        opt_g.zero_grad()
        self.manual_backward(err_g)
        opt_g.step()
        self.log_dict({"g_loss": err_g, "d_loss": err_d_real + err_d_fake}, prog_bar=True)

    def configure_optimizers(self):
        adam = {"lr": self.hparams.lr, "betas": (0.5, 0.999)}
        return [
            torch.optim.Adam(self.generator.parameters(), **adam),
            torch.optim.Adam(self.discriminator.parameters(), **adam),
        ]


def ring(samples=1024):
    angle = 2 * math.pi * torch.randint(8, (samples,)) / 8
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(samples, 2)


def main():
    pl.seed_everything(0)
    callbacks = [
        NormTheory(parameters=0, prefix="generator"),
        NormTheory(parameters=1, prefix="discriminator"),
    ]
    trainer = pl.Trainer(max_epochs=3, log_every_n_steps=4, callbacks=callbacks)
    trainer.fit(GAN(), DataLoader(TensorDataset(ring()), batch_size=128, shuffle=True))


if __name__ == "__main__":
    main()
