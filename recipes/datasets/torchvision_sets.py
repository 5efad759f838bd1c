"""The data sets that torchvision can download, in its layout."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, MNIST, FashionMNIST  # type: ignore[import-untyped]

from lightning_normtheory.recipes.datasets.source import Part, Shape, Source, held, part_name

__all__ = ["DOWNLOADABLE", "Downloadable"]


@dataclass(frozen=True)
class Downloadable:
    """A data set that torchvision can download; all have ten classes."""

    title: str
    shape: Shape
    folder: str
    files: tuple[str, ...]
    torchvision: Callable[..., Any]
    read: Callable[[Path, bool], tuple[Tensor, Tensor]]

    def source(self, root: Path) -> Source:
        return Source(self.title, self.shape, 10, partial(self.part, root))

    def part(self, root: Path, training: bool) -> Part:
        try:
            images, targets = self.read(root, training)
            if len(images) != len(targets):
                raise ValueError(f"{len(images)} images with {len(targets)} labels")
        except Exception as error:  # a damaged file can cause any error
            raise ValueError(
                f"Expected {self.title} in {root.absolute() / self.folder}, but its {part_name(training)} files"
                f" cannot be read ({type(error).__name__}: {error}). Delete the folder and download it again:"
                " --data.download true"
            ) from error
        return held(images, targets, training)


def _read_mnist(torchvision: Callable[..., Any], root: Path, training: bool) -> tuple[Tensor, Tensor]:
    data = torchvision(root, train=training)
    return data.data.unsqueeze(1), data.targets


def _read_cifar10(root: Path, training: bool) -> tuple[Tensor, Tensor]:
    # torchvision's class reads only the complete set.
    names = _CIFAR10_FILES[:-1] if training else _CIFAR10_FILES[-1:]
    images, targets = [], []
    for name in names:
        with (root / CIFAR10.base_folder / name).open("rb") as file:
            entry = _ArrayUnpickler(file, encoding="latin1").load()
        images.append(torch.from_numpy(entry["data"]).reshape(-1, 3, 32, 32))
        targets.append(torch.tensor(entry["labels"]))
    return torch.cat(images), torch.cat(targets)


_ARRAY_PARTS = {
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
}


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickle only numpy arrays and plain Python types, so that a file of unknown origin cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        # Compare whole names: looking into another module of numpy would import, hence run, it.
        if f"{module}.{name}" in _ARRAY_PARTS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


_MNIST_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_CIFAR10_FILES = tuple(name for name, _ in (*CIFAR10.train_list, *CIFAR10.test_list))
DOWNLOADABLE = {
    "mnist": Downloadable("MNIST", (1, 28, 28), "MNIST/raw", _MNIST_FILES, MNIST, partial(_read_mnist, MNIST)),
    "fashion-mnist": Downloadable(
        "Fashion-MNIST", (1, 28, 28), "FashionMNIST/raw", _MNIST_FILES, FashionMNIST, partial(_read_mnist, FashionMNIST)
    ),
    "cifar10": Downloadable("CIFAR-10", (3, 32, 32), CIFAR10.base_folder, _CIFAR10_FILES, CIFAR10, _read_cifar10),
}
