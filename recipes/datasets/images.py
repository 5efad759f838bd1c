"""The images of the recipes: from torchvision's data sets, from folders, or included in this package."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_normtheory.recipes.datasets.full_batch import full_batch_loader
from lightning_normtheory.recipes.datasets.locate import check_place, fetch, find, missing, title
from lightning_normtheory.recipes.datasets.scaling import Augmented, Scale, Scaling
from lightning_normtheory.recipes.datasets.source import Part, Shape, Source, embedded
from lightning_normtheory.recipes.datasets.torchvision_sets import DOWNLOADABLE

__all__ = ["Images"]

# For `limit`, independent of the seed of the run, so that compared runs train on the same images.
_LIMIT_SEED = 0


class Images(pl.LightningDataModule):
    """Labeled images for training and validation, read once and kept in memory.

    Without ``root``, the embedded images replace any data set, so that every recipe runs without a download. ``scale``
    uses the statistics of the training images in use. The test set is the validation set.

    Args:
        dataset: name of the images. "slice": the 2000 + 500 of Fashion-MNIST included in this package.
        root: their folder, in torchvision's layout (MNIST/raw, FashionMNIST/raw, cifar-10-batches-py) or, for any data
            set, with files train/CLASS/* and val/CLASS/* or test/CLASS/* (val if both exist). The classes are then
            numbered in the order of their sorted names.
        download: let torchvision download missing images into ``root``.
        limit: number of training images, drawn from all classes with a fixed seed. A larger limit adds images to those
            of a smaller one.
        classes: use only these classes, relabeled 0, 1, … in this order; applied before ``limit``.
        batch_size: of all loaders.
        full_batch_steps: number of gradient-descent steps per epoch, each on all training images in the same order,
            instead of mini-batches. Requires one process.
        scale: "unit": each image has ‖x‖ = 1. "sqrt_d": ‖x‖ = √d. "ball": all images are divided by
            max_i ‖x_i‖ over the training images, so that these have ‖x_i‖ ≤ 1; they are not centered. "standard": each
            channel has mean 0 and deviation 1 over the training images. A black image stays 0 in the first three.
        flatten: return vectors of d = C·H·W features.
        augment: shift training images by up to 4 pixels (a random crop after padding with black) and mirror them with
            probability ½. Scaled afterwards.
        num_workers: number of processes that load the batches.
        size: resize all images to size × size. By default they keep the size of their files, which must be the same.
        targets: "class": 0, 1, …. "sign": −1.0 and +1.0 for the first and the second of two classes.

    Attributes:
        source: the images in use, such as "CIFAR-10, 5000 + 1000 images"; set by `setup`.
        train, val: the two sets; set by `setup`.

    Example:
        >>> data = Images(limit=512, scale="sqrt_d", flatten=True, batch_size=64)
        >>> data.features, data.number_of_classes, data.shape
        (784, 10, (1, 28, 28))
        >>> data.setup("fit")
        >>> x, y = next(iter(data.val_dataloader()))
        >>> x.shape, bool((x.norm(dim=1) - 28).abs().max() < 1e-4), len(data.train), data.source
        (torch.Size([64, 784]), True, 512, 'embedded Fashion-MNIST slice')
    """

    def __init__(
        self,
        dataset: Literal["slice", "mnist", "fashion-mnist", "cifar10", "folder"] = "slice",
        root: str | None = None,
        download: bool = False,
        limit: int | None = None,
        classes: list[int] | None = None,
        batch_size: int = 128,
        full_batch_steps: int | None = None,
        scale: Scale = "standard",
        flatten: bool = False,
        augment: bool = False,
        num_workers: int = 0,
        size: int | None = None,
        targets: Literal["class", "sign"] = "class",
    ) -> None:
        super().__init__()
        check_place(dataset, root, download)
        counts = {"limit": limit, "batch_size": batch_size, "full_batch_steps": full_batch_steps, "size": size}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"Expected {name} to be a positive integer, but got {value}.")
        if classes is not None and (not classes or len(set(classes)) < len(classes)):
            raise ValueError(f"Expected classes to be different numbers, such as [3, 5], but got {classes}.")
        self.dataset = dataset
        self.root = None if root is None else Path(root).expanduser()
        self.download = download
        self.limit = limit
        self.classes = classes
        self.batch_size = batch_size
        self.full_batch_steps = full_batch_steps
        self.scale: Scale = scale
        self.flatten = flatten
        self.augment = augment
        self.num_workers = num_workers
        self.size = size
        self.targets = targets
        self.source = ""
        self.train: Dataset
        self.val: Dataset
        self._located: Source | None = None

    @property
    def shape(self) -> Shape:
        """(C, H, W) of an image; available before `setup`."""
        channels, height, width = self._expected().shape
        return (channels, self.size or height, self.size or width)

    @property
    def features(self) -> int:
        """d = C·H·W; available before `setup`."""
        return math.prod(self.shape)

    @property
    def number_of_classes(self) -> int:
        """The number of classes; available before `setup`."""
        return len(self._taken_classes(self._expected()))

    def prepare_data(self) -> None:
        if self.download and self._locate() is None:
            assert self.root is not None  # checked in __init__
            fetch(self.dataset, self.root)

    def setup(self, stage: str) -> None:
        if self.source:
            return  # Lightning calls it for each stage
        source = self._locate()
        if source is None:
            assert self.root is not None
            raise FileNotFoundError(missing(self.dataset, self.root))
        classes = self._taken_classes(source)
        if self.targets == "sign" and len(classes) != 2:
            raise ValueError(
                f"Expected two classes for targets 'sign', but {source.title} has {len(classes)}. Select two:"
                f" --data.classes [{classes[0]},{classes[-1]}]"
            )
        if self.root is None and self.dataset != "slice":
            _warn_replaced(self.dataset)
        train, train_targets = _read(source.part(True), classes, self.limit, self.size)
        val, val_targets = _read(source.part(False), classes, None, self.size)
        if self.targets == "sign":
            train_targets, val_targets = 2.0 * train_targets - 1.0, 2.0 * val_targets - 1.0
        scaling = Scaling(self.scale, train, self.flatten)
        if self.augment:
            self.train = Augmented(train, train_targets, scaling)
        else:
            self.train = TensorDataset(scaling(train), train_targets)
        self.val = TensorDataset(scaling(val), val_targets)
        self.source = source.title
        if self.root is not None:
            self.source += f", {len(train)} + {len(val)} images"

    def train_dataloader(self) -> DataLoader:
        if self.full_batch_steps is None:
            return self._loader(self.train, self.batch_size, shuffle=True)
        return full_batch_loader(self.train, self.full_batch_steps, self.trainer, loader=self._loader)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def _loader(self, dataset: Dataset, batch_size: int, **options: Any) -> DataLoader:
        options |= {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        if isinstance(dataset, TensorDataset):
            return DataLoader(_BatchIndexed(*dataset.tensors), batch_size, collate_fn=_unchanged, **options)
        return DataLoader(dataset, batch_size, **options)

    def _locate(self) -> Source | None:
        """Find the images; ``None`` if they do not exist (yet)."""
        if self._located is None:
            self._located = embedded() if self.root is None else find(self.dataset, self.root)
        return self._located

    def _expected(self) -> Source:
        """Describe the images, those in the folder or those to be downloaded."""
        source = self._locate()
        if source is not None:
            return source
        assert self.root is not None
        if self.download:
            return DOWNLOADABLE[self.dataset].source(self.root)
        raise FileNotFoundError(missing(self.dataset, self.root))

    def _taken_classes(self, source: Source) -> list[int]:
        if self.classes is None:
            return list(range(source.number_of_classes))
        for index in self.classes:
            if not 0 <= index < source.number_of_classes:
                raise ValueError(
                    f"Expected classes from 0 to {source.number_of_classes - 1}, those of {source.title}, but got"
                    f" {index}."
                )
        return self.classes


def _warn_replaced(dataset: str) -> None:
    how = "--data.root DIR"
    if dataset in DOWNLOADABLE:
        how += ", or --data.root DIR --data.download true to download them"
    rank_zero_warn(
        f"Using the {embedded().title} instead of {title(dataset)}: no folder was given. For the real images: {how}."
    )


def _read(part: Part, classes: Sequence[int], limit: int | None, size: int | None) -> tuple[Tensor, Tensor]:
    """Read the images of these classes, (n, C, H, W) of uint8, and their new labels."""
    indices, targets = _choose(part.targets, classes, limit)
    if not len(indices):
        raise ValueError(f"Expected {part.name} images of the classes {list(classes)}, but there are none.")
    return part.read(indices, size), targets


def _choose(targets: Tensor, classes: Sequence[int], limit: int | None) -> tuple[Tensor, Tensor]:
    """Return indices in ascending order, and the position of their class in ``classes``.

    Example:
        >>> _choose(torch.tensor([5, 3, 4, 3]), [3, 5], None)
        (tensor([0, 1, 3]), tensor([1, 0, 0]))
    """
    matches = targets[:, None] == torch.tensor(classes)
    indices = matches.any(1).nonzero().flatten()
    if limit is not None and limit < len(indices):
        order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(_LIMIT_SEED))
        indices = indices[order[:limit].sort().values]
    return indices, matches[indices].int().argmax(1)


class _BatchIndexed(TensorDataset):
    """Index a whole batch at once, in a third of the time of stacking its samples."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return self[torch.tensor(indices)]


def _unchanged(batch: Any) -> Any:
    return batch
