"""Labeled images, found in a folder or included in this package."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["Part", "Shape", "Source", "embedded", "embedded_images", "held", "part_name", "resized"]

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Part:
    """Training or validation images: their classes, and a function that reads those at given indices."""

    name: str
    targets: Tensor
    read: Callable[[Tensor, int | None], Tensor]


@dataclass(frozen=True)
class Source:
    """Images of a data set: ``part(True)`` returns those for training, ``part(False)`` those for validation."""

    title: str
    shape: Shape
    number_of_classes: int
    part: Callable[[bool], Part]


def embedded_images(part: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """Read the Fashion-MNIST images included in this package, (n, 1, 28, 28) of uint8, and their classes.

    Example:
        >>> images, targets = embedded_images("test")
        >>> images.shape, images.dtype, targets.bincount().tolist()
        (torch.Size([500, 1, 28, 28]), torch.uint8, [50, 50, 50, 50, 50, 50, 50, 50, 50, 50])
    """
    with files(__package__).joinpath("embedded/fashion_mnist_slice.npz").open("rb") as file:
        arrays = np.load(file)
        images, targets = arrays[f"x_{part}"], arrays[f"y_{part}"]
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(targets).long()


def embedded() -> Source:
    return Source("embedded Fashion-MNIST slice", (1, 28, 28), 10, _embedded_part)


def _embedded_part(training: bool) -> Part:
    return held(*embedded_images("train" if training else "test"), training)


def held(images: Tensor, targets: Tensor, training: bool) -> Part:
    return Part(part_name(training), targets, lambda indices, size: resized(images[indices], size))


def part_name(training: bool) -> str:
    return "training" if training else "validation"


def resized(images: Tensor, size: int | None) -> Tensor:
    if size is None or images.shape[-2:] == (size, size):
        return images
    return torch.nn.functional.interpolate(images, (size, size), mode="bilinear", antialias=True)
