"""A variational autoencoder of bars: the step calls encoder and decoder, and draws a latent variable in between.

The draw makes loss and outputs random. All quantities of an epoch are measured with the same draws.
"""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory


class VAE(pl.LightningModule):
    def __init__(self, pixels=9, hidden=32, latent_dim=2, kl_coeff=0.1, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.fc_mu = nn.Linear(hidden, latent_dim)
        self.fc_var = nn.Linear(hidden, latent_dim)
        self.decoder = nn.Sequential(nn.Linear(latent_dim, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, x):
        return self.decoder(self.fc_mu(self.encoder(x)))

    def posterior(self, x):
        hidden = self.encoder(x)
        return Normal(self.fc_mu(hidden), (self.fc_var(hidden) / 2).exp())

    def training_step(self, batch, batch_idx):
        (x,) = batch
        q = self.posterior(x)
        p = Normal(torch.zeros_like(q.loc), torch.ones_like(q.scale))
        x_hat = self.decoder(q.rsample())
        recon_loss = F.mse_loss(x_hat, x)
        kl = kl_divergence(q, p).mean()
        loss = recon_loss + self.hparams.kl_coeff * kl
        self.log_dict({"recon_loss": recon_loss, "kl": kl, "loss": loss}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def bars(samples=256, size=3):
    """Images of one bright row or column, with noise."""
    images = torch.zeros(samples, size, size)
    for i, (line, upright) in enumerate(zip(torch.randint(size, (samples,)), torch.rand(samples) < 0.5)):
        images[i][(slice(None), line) if upright else (line, slice(None))] = 1
    return (images + 0.1 * torch.randn_like(images)).flatten(1)


def main():
    pl.seed_everything(0)
    trainer = pl.Trainer(max_epochs=3, log_every_n_steps=4, callbacks=[NormTheory()])
    trainer.fit(VAE(), DataLoader(TensorDataset(bars()), batch_size=32, shuffle=True))


if __name__ == "__main__":
    main()
