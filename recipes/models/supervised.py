"""Base class of the recipes' networks: training and validation steps, logging, plain gradient descent."""

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

__all__ = ["Supervised", "square_loss"]


def square_loss(output: Tensor, classes: Tensor) -> Tensor:
    """Compute the papers' loss L = (1/n) Σ_i Σ_h (y_ih − f_h(x_i))² with one-hot targets, k times ``nn.MSELoss``.

    Example:
        >>> float(square_loss(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])))
        1.0
    """
    return (output - nn.functional.one_hot(classes, output.shape[1])).square().sum(1).mean()


class Supervised(pl.LightningModule):
    """Log loss and accuracy of both stages, and train with SGD without momentum and weight decay, which is gradient
    descent with full batches. A subclass sets ``lr`` and may override ``loss``."""

    lr: float

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return square_loss(output, y)

    def correct(self, output: Tensor, y: Tensor) -> Tensor:
        """Tell which samples (n,) are classified correctly."""
        return output.argmax(1) == y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._step(batch, "val")

    def _step(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        x, y = batch
        output = self(x)
        loss = self.loss(output, y)
        logged = {f"{stage}_loss": loss, f"{stage}_accuracy": self.correct(output, y).float().mean()}
        self.log_dict(logged, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(y), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)
