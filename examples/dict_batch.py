"""Batches that are dicts, and a forward that takes some of their entries and returns a dict."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_normtheory.callbacks import NormTheory


class Houses(Dataset):
    """Made-up prices of houses in five districts."""

    def __init__(self, samples=512):
        self.numbers = torch.randn(samples, 6)
        self.district = torch.randint(5, (samples,))
        effect = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])[self.district]
        self.price = self.numbers[:, :2].sum(1) + effect + 0.1 * torch.randn(samples)

    def __len__(self):
        return len(self.price)

    def __getitem__(self, i):
        return {
            "id": f"house {i}",
            "continuous": self.numbers[i],
            "categorical": self.district[i],
            "target": self.price[i],
        }


class PriceModel(pl.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.lr = lr
        self.embedding = nn.Embedding(5, 3)
        self.backbone = nn.Sequential(nn.Linear(9, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, continuous, categorical):
        features = self.backbone(torch.cat([continuous, self.embedding(categorical)], 1))
        return {"prediction": self.head(features).squeeze(1), "features": features}

    def training_step(self, batch, batch_idx):
        output = self(batch["continuous"], batch["categorical"])
        loss = F.mse_loss(output["prediction"], batch["target"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def main():
    pl.seed_everything(0)
    trainer = pl.Trainer(max_epochs=3, log_every_n_steps=4, callbacks=[NormTheory()])
    trainer.fit(PriceModel(), DataLoader(Houses(), batch_size=64, shuffle=True))


if __name__ == "__main__":
    main()
