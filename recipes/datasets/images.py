"""The images of the recipes: of torchvision's data sets, of folders, or those that come with this package."""

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

# Of the draw of `limit`, whatever the seed of the run: runs that are compared are trained on the same images.
_LIMIT_SEED = 0


class Images(pl.LightningDataModule):
    """Labeled images for training and validation, read once and kept in memory.

    Without a ``root`` the embedded images stand in for any data set, so that every recipe runs with nothing. The
    constants of ``scale`` are those of the training images in use. There is no test set beside the validation images.

    Args:
        dataset: which images. "slice": the 2000 + 500 of Fashion-MNIST that come with this package.
        root: where they lie, in torchvision's layout (MNIST/raw, FashionMNIST/raw, cifar-10-batches-py) or, for any
            data set, as files train/CLASS/* and val/CLASS/* or test/CLASS/* (val, if there are both). The classes are
            then numbered in the order of their sorted names.
        download: let torchvision fetch them into ``root`` if they are not there.
        limit: train on so many images, drawn from all classes by a seed that never changes. A larger limit adds images
            to those of a smaller one.
        classes: take only these classes, relabelled 0, 1, … in this order; before ``limit``.
        batch_size: of all loaders.
        full_batch_steps: gradient descent instead of mini-batches: an epoch is so many steps, each on all training
            images in the same order. For one process.
        scale: "unit": each image has ‖x‖ = 1. "sqrt_d": ‖x‖ = √d. "ball": all are divided by the one number
            max_i ‖x_i‖ over the training images, so that these have ‖x_i‖ ≤ 1; they are not centered. "standard": each
            channel has mean 0 and deviation 1 over the training images. A black image stays 0 in the first three.
        flatten: give vectors of d = C·H·W features.
        augment: move training images by up to 4 pixels (a random crop after padding with black) and mirror every second
            one. Scaled afterwards.
        num_workers: processes that load the batches.
        size: make all images size × size. By default they have the size of their files, which must be one size.
        targets: "class": 0, 1, …. "sign": −1.0 and +1.0 for the first and the second of two classes.

    Attributes:
        source: what is really used, such as "CIFAR-10, 5000 + 1000 images"; known after `setup`.
        train, val: the two sets, after `setup`.

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
        """(C, H, W) of an image, before `setup` too."""
        channels, height, width = self._expected().shape
        return (channels, self.size or height, self.size or width)

    @property
    def features(self) -> int:
        """d = C·H·W, before `setup` too."""
        return math.prod(self.shape)

    @property
    def number_of_classes(self) -> int:
        """How many classes there are, before `setup` too."""
        return len(self._taken_classes(self._expected()))

    def prepare_data(self) -> None:
        if self.download and self._locate() is None:
            assert self.root is not None  # checked in __init__
            fetch(self.dataset, self.root)

    def setup(self, stage: str) -> None:
        if self.source:
            return  # Lightning asks once for every stage
        source = self._locate()
        if source is None:
            assert self.root is not None
            raise FileNotFoundError(missing(self.dataset, self.root))
        classes = self._taken_classes(source)
        if self.targets == "sign" and len(classes) != 2:
            raise ValueError(
                f"Expected two classes for targets 'sign', but {source.title} has {len(classes)}. Take two of them:"
                f" --data.classes [{classes[0]},{classes[-1]}]"
            )
        if self.root is None and self.dataset != "slice":
            _warn_stand_in(self.dataset)
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
            return DataLoader(_Gathered(*dataset.tensors), batch_size, collate_fn=_as_it_is, **options)
        return DataLoader(dataset, batch_size, **options)

    def _locate(self) -> Source | None:
        """The images, or ``None`` if they are not there (yet)."""
        if self._located is None:
            self._located = embedded() if self.root is None else find(self.dataset, self.root)
        return self._located

    def _expected(self) -> Source:
        """The images, or what a download will bring."""
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


def _warn_stand_in(dataset: str) -> None:
    how = "--data.root DIR"
    if dataset in DOWNLOADABLE:
        how += ", or --data.root DIR --data.download true where there is network"
    rank_zero_warn(
        f"The {embedded().title} stands in for {title(dataset)}, since no folder was named; for the real images: {how}."
    )


def _read(part: Part, classes: Sequence[int], limit: int | None, size: int | None) -> tuple[Tensor, Tensor]:
    """The images of these classes, (n, C, H, W) of uint8, and their new labels."""
    indices, targets = _choose(part.targets, classes, limit)
    if not len(indices):
        raise ValueError(f"Expected {part.name} images of the classes {list(classes)}, but there are none.")
    return part.read(indices, size), targets


def _choose(targets: Tensor, classes: Sequence[int], limit: int | None) -> tuple[Tensor, Tensor]:
    """Indices in ascending order, and the place of their class in ``classes``.

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


class _Gathered(TensorDataset):
    """Tensors of which a batch is taken at once, a third of the time of stacking its samples."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return self[torch.tensor(indices)]


def _as_it_is(batch: Any) -> Any:
    return batch
