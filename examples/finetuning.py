"""Fine-tuning: the head of a pretrained network is trained first, then its backbone is unfrozen.

Only trainable weights are measured: from the third epoch on, θ and all that is computed from it include the backbone.
"""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory


class Classifier(pl.LightningModule):
    def __init__(self, classes=3, lr=0.1):
        super().__init__()
        self.lr = lr
        self.backbone = nn.Sequential(
            nn.Linear(8, 32, bias=False),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 16, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), self.lr)


class Unfreeze(pl.callbacks.BaseFinetuning):
    def __init__(self, epoch=2):
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=pl_module.lr / 10)


def task(seed, samples=512):
    """Points whose class is the largest of three random directions, which differ from seed to seed a little."""
    x = torch.randn(samples, 8)
    shared, own = torch.eye(8, 3), torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x @ (shared + 0.3 * own)).argmax(1))


def main():
    pl.seed_everything(0)
    model = Classifier()
    pl.Trainer(max_epochs=3, log_every_n_steps=4).fit(
        model, DataLoader(task(seed=1), batch_size=32, shuffle=True)
    )  # the pretraining

    model.head.reset_parameters()
    trainer = pl.Trainer(max_epochs=4, log_every_n_steps=4, callbacks=[Unfreeze(), NormTheory()])
    trainer.fit(model, DataLoader(task(seed=2), batch_size=32, shuffle=True))


if __name__ == "__main__":
    main()
