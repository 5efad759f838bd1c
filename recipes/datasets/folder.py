"""Read folders of image files, one folder per class."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS  # type: ignore[import-untyped]

from lightning_normtheory.recipes.datasets.source import Part, Shape, Source, part_name, resized

__all__ = ["image_folder"]

# Pillow ignores the file name: without this list it would run a PostScript program that is named .png.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def image_folder(title: str, train: Path, validation: Path) -> Source:
    """Find the images of each class; number classes as `torchvision.datasets.ImageFolder` does."""
    classes = _class_names(train)
    unknown = sorted(set(_class_names(validation)) - set(classes))
    if unknown:
        raise ValueError(
            f"Expected in {validation.absolute()} only classes of {train.absolute()}: {', '.join(classes)}; but found"
            f" {', '.join(unknown)}. Rename or remove these folders."
        )
    listed = {True: _list_files(train, classes), False: _list_files(validation, classes)}
    for training, folder in ((True, train), (False, validation)):
        if not listed[training]:
            raise FileNotFoundError(
                f"Expected image files CLASS/* in {folder.absolute()}, but found none ({', '.join(IMG_EXTENSIONS)})."
                " Put them there, one folder per class, or choose another folder: --data.root DIR"
            )
    first = listed[True][0][0]
    # Gray only if all are; the search stops at the first one in color.
    channels = 1 if all(_is_gray(path) for path, _ in listed[True]) else 3
    height, width = _pixels(first, channels).shape[1:]
    shape = (channels, height, width)
    return Source(title, shape, len(classes), partial(_folder_part, listed, shape))


def _class_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _list_files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    return [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in IMG_EXTENSIONS and not path.name.startswith(".")
    ]


def _folder_part(listed: Mapping[bool, Sequence[tuple[Path, int]]], shape: Shape, training: bool) -> Part:
    paths, labels = zip(*listed[training])
    return Part(part_name(training), torch.tensor(labels), partial(_read_files, paths, shape))


def _read_files(paths: Sequence[Path], shape: Shape, indices: Tensor, size: int | None) -> Tensor:
    channels, height, width = shape
    images = torch.empty(len(indices), channels, size or height, size or width, dtype=torch.uint8)
    for image, index in zip(images, indices.tolist()):
        pixels = _pixels(paths[index], channels)
        if size is None and pixels.shape != shape:
            raise ValueError(
                f"Expected images of {height} × {width} pixels, the size of the first one, but {paths[index]} has"
                f" {pixels.shape[1]} × {pixels.shape[2]}. Resize all images: --data.size {min(height, width)}"
            )
        image.copy_(resized(pixels[None], size)[0])
    return images


def _is_gray(path: Path) -> bool:
    with Image.open(path, formats=_FORMATS) as image:
        return image.mode in ("1", "L")


def _pixels(path: Path, channels: int) -> Tensor:
    """Read an image, (C, H, W) of uint8."""
    try:
        with Image.open(path, formats=_FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode}")
            array = np.array(image.convert("L" if channels == 1 else "RGB"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Expected an image of 8 bits per channel in {path}, but it cannot be read as one ({error}). Convert or"
            " remove it."
        ) from error
    return torch.from_numpy(array).reshape(*array.shape[:2], channels).permute(2, 0, 1)
