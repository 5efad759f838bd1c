"""BYOL: a network predicts, from one view of an image, what a slowly following copy of it makes of another view.

The momentum encoder moves inside `training_step`. Every measurement sees it as it is at the end of the epoch.
"""

import copy

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_normtheory.callbacks import NormTheory


def head(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class BYOL(pl.LightningModule):
    def __init__(self, momentum=0.99, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.projection_head = head(32, 16, 8)
        self.prediction_head = head(8, 16, 8)
        self.backbone_momentum = copy.deepcopy(self.backbone).requires_grad_(False)
        self.projection_head_momentum = copy.deepcopy(self.projection_head).requires_grad_(False)

    def forward(self, x):
        return self.prediction_head(self.projection_head(self.backbone(x)))

    @torch.no_grad()
    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x))

    @torch.no_grad()
    def update_momentum(self):
        m = self.hparams.momentum
        for name in ("backbone", "projection_head"):
            student, teacher = getattr(self, name), getattr(self, f"{name}_momentum")
            for p, p_momentum in zip(student.parameters(), teacher.parameters()):
                p_momentum.mul_(m).add_(p, alpha=1 - m)

    def training_step(self, batch, batch_idx):
        self.update_momentum()
        x0, x1 = batch
        p0, p1 = self(x0), self(x1)
        z0, z1 = self.forward_momentum(x0), self.forward_momentum(x1)
        loss = 2 - F.cosine_similarity(p0, z1).mean() - F.cosine_similarity(p1, z0).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)


class TwoViews(Dataset):
    """Images of bars, each one shifted and made noisy twice."""

    def __init__(self, samples=256):
        self.images = torch.zeros(samples, 1, 8, 8)
        for image in self.images:
            position, upright = int(torch.randint(8, ())), bool(torch.randint(2, ()))
            image[0, :, position] = 1
            if upright:
                image.copy_(image.transpose(1, 2).clone())

    def __len__(self):
        return len(self.images)

    def view(self, image):
        return image.roll(int(torch.randint(-1, 2, ())), 2) + 0.1 * torch.randn_like(image)

    def __getitem__(self, i):
        return self.view(self.images[i]), self.view(self.images[i])


def main():
    pl.seed_everything(0)
    trainer = pl.Trainer(max_epochs=3, log_every_n_steps=4, callbacks=[NormTheory()])
    trainer.fit(BYOL(), DataLoader(TwoViews(), batch_size=32, shuffle=True))


if __name__ == "__main__":
    main()
