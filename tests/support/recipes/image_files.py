"""Image files as torchvision and people keep them, written for tests."""

import pickle
import struct

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from lightning_normtheory.recipes.datasets.images import Images

CIFAR10_FILES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_mnist(root, name="MNIST", n=30):
    """Write files in torchvision's layout, labels cycling through ten classes; return the training images."""
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    for part, count in (("train", n), ("t10k", 10)):
        images = pixels(count, 28, 28, seed=count)
        labels = np.arange(count, dtype=np.uint8) % 10
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, *images.shape) + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
    return pixels(n, 28, 28, seed=n)


def write_cifar10(root, n=4):
    """Write six pickles of n images, image i with class i % 10; return all images in order."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images = pixels(6 * n, 3, 32, 32)
    for i, name in enumerate(CIFAR10_FILES):
        indices = range(i * n, (i + 1) * n)
        entry = {"data": images[indices].reshape(n, -1), "labels": [index % 10 for index in indices]}
        written = pickle.dumps(entry, protocol=2)
        # The real files are older than this name.
        (folder / name).write_bytes(written.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    return images


def write_folder(root, classes=("bird", "cat", "dog"), n=6, shape=(8, 8, 3), validation="test", suffix="png"):
    """Write n training and 2 validation images per class; the first pixel encodes class and number."""
    for part, count in (("train", n), (validation, 2)):
        for label, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                array = pixels(*shape, seed=100 * label + i)
                array[0, 0] = 10 * label + i
                Image.fromarray(array).save(folder / f"{i:04}.{suffix}")
    return root


def ready(**arguments):
    data = Images(**{key: str(value) if key == "root" else value for key, value in arguments.items()})
    data.prepare_data()
    data.setup("fit")
    return data


def held(dataset):
    """Return all samples of a set in order."""
    return next(iter(DataLoader(dataset, len(dataset))))


def restored(x, images):
    """Tell whether x are the pixels of these images, up to one shift and scale."""
    a = (x - x.mean()).flatten().double()
    b = torch.tensor(images).double().flatten()
    b = b - b.mean()
    return float(a @ b / (a.norm() * b.norm())) > 1 - 1e-6
