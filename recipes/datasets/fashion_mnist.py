"""The embedded Fashion-MNIST images as a data module."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.recipes.datasets.source import embedded_images

__all__ = ["FashionMNISTSlice"]


class FashionMNISTSlice(pl.LightningDataModule):
    """2000 training and 500 validation images of Fashion-MNIST, included in this package.

    Each image is a vector of unit norm, as the theorems of WN assume.

    Args:
        batch_size: of both loaders.
        limit: number of training images to use, from the first on.

    Example:
        >>> data = FashionMNISTSlice(batch_size=100)
        >>> data.setup("fit")
        >>> x, y = next(iter(data.val_dataloader()))
        >>> x.shape, float(x.norm(dim=1).sub(1).abs().max()) < 1e-6
        (torch.Size([100, 784]), True)
    """

    def __init__(self, batch_size: int = 100, limit: int | None = None) -> None:
        super().__init__()
        if limit is not None and limit < 1:
            raise ValueError(f"Expected limit to be a positive integer, but got {limit}.")
        self.batch_size = batch_size
        self.limit = limit

    features = 784
    number_of_classes = 10
    source = "embedded Fashion-MNIST slice"

    def setup(self, stage: str) -> None:
        train, test = (TensorDataset(_unit_norm(x), y) for x, y in (embedded_images("train"), embedded_images("test")))
        self.train = torch.utils.data.Subset(train, range(min(self.limit or len(train), len(train))))
        self.val = test

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.batch_size)


def _unit_norm(images: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(images.flatten(1).float())
