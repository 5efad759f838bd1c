"""The models of the recipes, as small LightningModules."""

from itertools import pairwise

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchmetrics.classification import MulticlassAccuracy

__all__ = ["WeightNormMLP"]


class WeightNormMLP(pl.LightningModule):
    """A tanh network with WeightNorm in every hidden layer, trained with the square loss.

    f(x) = V φ(W_L … φ(W_1 x)), each row of W_l being g_i v_i/‖v_i‖ with trained lengths g. The loss is the papers'
    L = (1/n) Σ_i Σ_h (y_ih − f_h(x_i))² against one-hot targets.

    Args:
        inputs: d, the number of input features.
        width: m, the units of each hidden layer.
        depth: L, the number of hidden layers.
        classes: k, the outputs.
        lr: of plain SGD: without momentum and weight decay the norms ‖v_i‖ cannot fall (DGM, eq. 2.3).

    Example:
        >>> model = WeightNormMLP(inputs=4, width=8, depth=2, classes=3)
        >>> model(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """

    def __init__(self, inputs: int = 784, width: int = 256, depth: int = 2, classes: int = 10, lr: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        widths = [inputs] + [width] * depth
        hidden = [(weight_norm(nn.Linear(a, b, bias=False)), nn.Tanh()) for a, b in pairwise(widths)]
        self.net = nn.Sequential(
            nn.Flatten(), *(m for pair in hidden for m in pair), nn.Linear(width, classes, bias=False)
        )
        self.classes = classes
        self.lr = lr
        self.train_accuracy = MulticlassAccuracy(classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, "train", self.train_accuracy)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._step(batch, "val", self.val_accuracy)

    def _step(self, batch: tuple[Tensor, Tensor], stage: str, accuracy: MulticlassAccuracy) -> Tensor:
        x, y = batch
        output = self(x)
        loss = (output - nn.functional.one_hot(y, self.classes)).square().sum(1).mean()
        accuracy(output, y)
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log(f"{stage}_accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)
