"""Synthetic data of the papers: Gaussian classes, a sphere, the dyadic set."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.recipes.datasets.full_batch import full_batch_loader
from lightning_normtheory.theorems.papers.dyadic import dyadic_data

__all__ = ["Dyadic", "GaussianClasses", "Sphere", "SyntheticData"]


class SyntheticData(pl.LightningDataModule):
    """A few samples in memory, for full-batch gradient descent.

    Args:
        x: (n, d).
        y: (n,).
        number_of_classes: 1 for real targets.
        steps_per_epoch: gradient steps between two measurements.
    """

    def __init__(self, x: Tensor, y: Tensor, number_of_classes: int, steps_per_epoch: int) -> None:
        super().__init__()
        self.x, self.y = x, y
        self.number_of_classes = number_of_classes
        self.steps_per_epoch = steps_per_epoch

    @property
    def features(self) -> int:
        """d."""
        return self.x.shape[1]

    def train_dataloader(self) -> DataLoader[Any]:
        return full_batch_loader(TensorDataset(self.x, self.y), self.steps_per_epoch, self.trainer)


class GaussianClasses(SyntheticData):
    """n points on a line in three equally likely classes, N(0, 1), N(10, 1) and N(−10, 1) (LIN, eq. (25)).

    Args:
        n: N, the number of samples.
        seed: of the data only.
        steps_per_epoch: gradient steps between two measurements.

    Example:
        >>> data = GaussianClasses(n=60)
        >>> data.x.shape, bool((data.x[data.y == 2] < -5).all())
        (torch.Size([60, 1]), True)
    """

    def __init__(self, n: int = 60, seed: int = 0, steps_per_epoch: int = 10) -> None:
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 3, (n,), generator=generator)
        x = torch.randn(n, generator=generator) + torch.tensor([0.0, 10.0, -10.0])[y]
        super().__init__(x[:, None], y, 3, steps_per_epoch)


class Sphere(SyntheticData):
    """n points uniform on the unit sphere of ℝᵈ, with random targets ±1: normalized, no two samples parallel (DGM).

    Args:
        n: the number of samples.
        d: their dimension; DGM, Theorem 4.2, requires d ≥ 50.
        seed: of the data only.
        steps_per_epoch: gradient steps between two measurements.

    Example:
        >>> data = Sphere(n=5, d=50)
        >>> float(data.x.norm(dim=1).sub(1).abs().max()) < 1e-6, data.y.abs().tolist()
        (True, [1.0, 1.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, n: int = 64, d: int = 50, seed: int = 0, steps_per_epoch: int = 10) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.nn.functional.normalize(torch.randn(n, d, generator=generator))
        y = torch.randint(0, 2, (n,), generator=generator) * 2.0 - 1
        super().__init__(x, y, 1, steps_per_epoch)


class Dyadic(SyntheticData):
    """±2⁻ʲe_j with the labels ±1, j = 1 … d (BN, Definition 1.1): a feature of every magnitude.

    Args:
        d: the dimension; there are 2d samples.
        steps_per_epoch: gradient steps between two measurements.

    Example:
        >>> Dyadic(d=2).x.tolist()
        [[0.5, 0.0], [0.0, 0.25], [-0.5, -0.0], [-0.0, -0.25]]
    """

    def __init__(self, d: int = 4, steps_per_epoch: int = 10) -> None:
        x, y = dyadic_data(d, dtype=torch.float32)
        super().__init__(x, y, 1, steps_per_epoch)
