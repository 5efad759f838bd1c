"""Finding images, and the messages about missing ones."""

import math
import pickle
import struct
import warnings
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, MNIST

from lightning_normtheory.recipes.datasets.images import Images
from lightning_normtheory.recipes.datasets.source import embedded_images

from support.recipes.image_files import held, pixels, ready, restored, write_cifar10, write_folder, write_mnist


def test_the_embedded_images_need_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = ready()
    assert (len(data.train), len(data.val)) == (2000, 500)
    assert (data.features, data.number_of_classes, data.shape) == (784, 10, (1, 28, 28))
    assert data.source == "embedded Fashion-MNIST slice"
    images, targets = embedded_images("train")
    assert restored(held(data.train)[0], images.numpy())
    assert torch.equal(held(data.train)[1], targets)


@pytest.mark.parametrize("dataset", ["mnist", "cifar10", "folder"])
def test_the_embedded_images_stand_in_and_it_is_said_once(dataset):
    data = Images(dataset, limit=10)
    with pytest.warns(UserWarning, match=r"instead of .*--data\.root DIR") as caught:
        data.setup("fit")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.setup("validate")
    assert ("--data.download true" in str(caught[0].message)) == (dataset != "folder")
    assert data.source == "embedded Fashion-MNIST slice"
    assert data.shape == held(data.train)[0].shape[1:]


@pytest.mark.parametrize(("dataset", "name"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_torchvisions_idx_files(tmp_path, dataset, name):
    images = write_mnist(tmp_path, name)
    data = ready(dataset=dataset, root=tmp_path)
    x, y = held(data.train)
    assert x.shape == (30, 1, 28, 28)
    assert restored(x, images)
    assert y.tolist() == [i % 10 for i in range(30)]
    assert data.source == f"{dataset.upper().replace('FASHION', 'Fashion')}, 30 + 10 images"


def test_torchvisions_cifar10_files_of_any_number_of_images(tmp_path):
    images = write_cifar10(tmp_path)
    data = ready(dataset="cifar10", root=tmp_path, scale="ball")
    assert data.source == "CIFAR-10, 20 + 4 images"
    for part, expected, first in ((data.train, images[:20], 0), (data.val, images[20:], 20)):
        x, y = held(part)
        assert restored(x, expected)
        assert y.tolist() == [i % 10 for i in range(first, first + len(expected))]


def test_a_pickle_cannot_run_code(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(ValueError, match=r"validation files cannot be read .*asks for .*open"):
        ready(dataset="cifar10", root=tmp_path)
    assert not (tmp_path / "harm").exists()


def test_a_damaged_file_is_named_with_a_remedy(tmp_path):
    write_mnist(tmp_path)
    labels = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    labels.write_bytes(struct.pack(">II", 2049, 3) + bytes(3))
    with pytest.raises(ValueError, match=r"MNIST.raw.*30 images with 3 labels.*--data\.download true"):
        ready(dataset="mnist", root=tmp_path)


@pytest.mark.parametrize("dataset", ["cifar10", "folder", "mnist"])
@pytest.mark.parametrize("validation", ["test", "val"])
def test_a_folder_of_images_is_recognized(tmp_path, dataset, validation):
    root = write_folder(tmp_path / "animals", validation=validation)
    data = ready(dataset=dataset, root=root)
    title = {"cifar10": "CIFAR-10", "folder": "animals", "mnist": "MNIST"}[dataset]
    assert data.source == f"{title}, 18 + 6 images"
    assert (data.shape, data.number_of_classes) == ((3, 8, 8), 3)
    assert held(data.train)[1].tolist() == [0] * 6 + [1] * 6 + [2] * 6
    expected = np.asarray(Image.open(root / validation / "cat" / "0001.png")).transpose(2, 0, 1)
    assert restored(ready(dataset=dataset, root=root, scale="ball").val[3][0], expected)


def test_val_comes_before_test(tmp_path):
    write_folder(tmp_path, validation="test")
    (tmp_path / "val" / "dog").mkdir(parents=True)
    Image.fromarray(pixels(8, 8, 3)).save(tmp_path / "val" / "dog" / "a.PNG")
    data = ready(dataset="folder", root=tmp_path)
    assert held(data.val)[1].tolist() == [2]  # numbered as in training, though it is the only class here


def test_grey_images_have_one_channel_unless_one_is_colored(tmp_path):
    write_folder(tmp_path, shape=(8, 8))
    assert Images("folder", str(tmp_path)).shape == (1, 8, 8)
    Image.fromarray(pixels(8, 8, 3)).save(tmp_path / "train" / "dog" / "color.png")
    data = ready(dataset="folder", root=tmp_path)
    assert data.shape == held(data.train)[0].shape[1:] == (3, 8, 8)


def test_images_of_several_sizes_need_a_size(tmp_path):
    write_folder(tmp_path)
    Image.fromarray(pixels(12, 10, 3)).save(tmp_path / "train" / "dog" / "larger.png")
    with pytest.raises(ValueError, match=r"8 × 8.*larger\.png has 12 × 10.*--data\.size 8"):
        ready(dataset="folder", root=tmp_path)
    data = ready(dataset="folder", root=tmp_path, size=6)
    assert data.shape == held(data.train)[0].shape[1:] == held(data.val)[0].shape[1:] == (3, 6, 6)


def test_size_holds_for_every_source(tmp_path):
    write_mnist(tmp_path)
    for arguments in ({}, {"dataset": "mnist", "root": tmp_path}):
        data = ready(**arguments, size=14)
        assert data.shape == held(data.train)[0].shape[1:] == (1, 14, 14)


def test_a_smaller_size_takes_means(tmp_path):
    write_folder(tmp_path, classes=("board", "gray"), n=1)
    board, gray = 200 * (np.indices((8, 8)).sum(0) % 2), np.full((8, 8), 100)
    for path in tmp_path.rglob("*.png"):
        Image.fromarray((board if path.parent.name == "board" else gray).astype(np.uint8)).save(path)
    x = held(ready(dataset="folder", root=tmp_path, size=4, scale="ball").train)[0]
    torch.testing.assert_close(x[0], x[1], rtol=0.05, atol=0)


def test_what_is_not_an_8_bit_image_is_named(tmp_path):
    write_folder(tmp_path)
    broken = tmp_path / "train" / "cat" / "broken.jpg"
    broken.write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"broken\.jpg.*cannot be read"):
        ready(dataset="folder", root=tmp_path)
    broken.unlink()
    Image.fromarray(pixels(8, 8).astype(np.uint16) * 256).save(tmp_path / "train" / "cat" / "deep.png")
    with pytest.raises(ValueError, match=r"8 bits.*deep\.png"):
        ready(dataset="folder", root=tmp_path)


def test_a_class_of_validation_alone_is_refused(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "test" / "zebra").mkdir()
    with pytest.raises(ValueError, match=r"bird, cat, dog; but found zebra"):
        _ = Images("folder", str(tmp_path)).features


def test_hidden_files_are_not_images(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "cat" / "._0000.png").write_bytes(b"")
    data = ready(dataset="folder", root=tmp_path)
    assert (data.number_of_classes, len(data.train)) == (3, 18)


@pytest.mark.parametrize("ask", [lambda data: data.features, lambda data: data.setup("fit")])
@pytest.mark.parametrize(
    ("dataset", "expected"),
    [("cifar10", "cifar-10-batches-py/ with data_batch_1"), ("mnist", "MNIST/raw/"), ("folder", "train/CLASS")],
)
def test_missing_images(tmp_path, dataset, expected, ask):
    root = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError) as caught:
        ask(Images(dataset, str(root)))
    message = str(caught.value)
    assert str(root) in message
    assert expected in message
    remedy = "--data.root DIR" if dataset == "folder" else f"--data.root {root} --data.download true"
    assert message.endswith(remedy)


def test_a_folder_with_nothing_to_validate_on_or_no_images(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "test").rename(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match=r"test/CLASS/\* \(or val/CLASS/\*\)"):
        ready(dataset="folder", root=tmp_path)
    (tmp_path / "val" / "cat").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"val, but found none \(\.jpg"):
        ready(dataset="folder", root=tmp_path)


@pytest.mark.parametrize(("dataset", "shape"), [("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))])
def test_before_a_download_the_constants_are_known(tmp_path, dataset, shape):
    data = Images(dataset, str(tmp_path), download=True, classes=[3, 5])
    assert (data.shape, data.features, data.number_of_classes) == (shape, math.prod(shape), 2)
    assert Images(dataset, str(tmp_path), download=True, size=8).features == 64 * shape[0]


def test_a_download_without_network_says_why(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise URLError("no route to host")

    for module in ("mnist", "cifar"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.download_and_extract_archive", fail)
    for dataset in ("mnist", "cifar10"):
        # torchvision 0.19 keeps the reason of the first to itself.
        reason = r"download failed \(.*(no route to host|Error downloading)"
        with pytest.raises(FileNotFoundError, match=rf"{reason}.*torchvision's layout.*--data\.download true"):
            Images(dataset, str(tmp_path), download=True).prepare_data()


def test_a_download_happens_once_and_only_on_request(tmp_path, monkeypatch):
    asked = []

    def download(self):
        asked.append(str(self.root))
        write_mnist(tmp_path)

    monkeypatch.setattr(MNIST, "download", download)
    data = ready(dataset="mnist", root=tmp_path, download=True)
    assert len(data.train) == 30
    ready(dataset="mnist", root=tmp_path, download=True)
    assert asked == [str(tmp_path)]
    monkeypatch.setattr(CIFAR10, "download", download)
    with pytest.raises(FileNotFoundError):
        ready(dataset="cifar10", root=tmp_path)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 0}, "limit to be a positive integer, but got 0"),
        ({"limit": -5}, "limit to be a positive integer, but got -5"),
        ({"batch_size": 0}, "batch_size"),
        ({"full_batch_steps": 0}, "full_batch_steps"),
        ({"size": 0}, "size"),
        ({"classes": []}, "different numbers"),
        ({"classes": [3, 3]}, "different numbers"),
        ({"classes": [3, 10]}, "from 0 to 9.*but got 10"),
        ({"classes": [-1, 3]}, "from 0 to 9.*but got -1"),
        ({"targets": "sign"}, r"two classes.*has 10.*--data\.classes \[0,9\]"),
        ({"root": "data"}, "--data.dataset mnist or"),
        ({"dataset": "mnist", "download": True}, "--data.root DIR"),
        ({"dataset": "folder", "root": "data", "download": True}, "to download"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        ready(**arguments)
