"""The images of the recipes: where they are found, which are taken, and how they are scaled."""

import math
import pickle
import struct
import warnings
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10, MNIST

from lightning_normtheory.callbacks import RSCRatio
from lightning_normtheory.recipes.image_data import Images
from lightning_normtheory.recipes.image_source import embedded_images

from lit import rows, trainer

CIFAR10_FILES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_mnist(root, name="MNIST", n=30):
    """Files as torchvision keeps them; the labels go through the ten classes. The training images."""
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    for part, count in (("train", n), ("t10k", 10)):
        images = pixels(count, 28, 28, seed=count)
        labels = np.arange(count, dtype=np.uint8) % 10
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, *images.shape) + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
    return pixels(n, 28, 28, seed=n)


def write_cifar10(root, n=4):
    """Six pickles of n images; image i of all has the class i % 10. All images, in order."""
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
    """n training and 2 validation images of each class, whose first pixel tells class and number."""
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
    """All of a set, in its order."""
    return next(iter(DataLoader(dataset, len(dataset))))


def restored(x, images):
    """Whether x are the pixels of these images, up to one shift and scale."""
    a = (x - x.mean()).flatten().double()
    b = torch.tensor(images).double().flatten()
    b = b - b.mean()
    return float(a @ b / (a.norm() * b.norm())) > 1 - 1e-6


class Line(pl.LightningModule):
    """A linear network; the batches that it was trained on."""

    def __init__(self, inputs=784, classes=10):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].clone())
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.001)


# --- where the images are found


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
    with pytest.warns(UserWarning, match=r"stands in for .*--data\.root DIR") as caught:
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
def test_a_folder_of_images_is_recognised(tmp_path, dataset, validation):
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


def test_grey_images_have_one_channel_unless_one_is_coloured(tmp_path):
    write_folder(tmp_path, shape=(8, 8))
    assert Images("folder", str(tmp_path)).shape == (1, 8, 8)
    Image.fromarray(pixels(8, 8, 3)).save(tmp_path / "train" / "dog" / "colour.png")
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
    write_folder(tmp_path, classes=("board", "grey"), n=1)
    board, grey = 200 * (np.indices((8, 8)).sum(0) % 2), np.full((8, 8), 100)
    for path in tmp_path.rglob("*.png"):
        Image.fromarray((board if path.parent.name == "board" else grey).astype(np.uint8)).save(path)
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


# --- what is missing


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
        with pytest.raises(FileNotFoundError, match=r"no route to host.*torchvision's layout.*--data\.download true"):
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


# --- which are taken


def test_limit_draws_from_all_classes_whatever_the_seed(tmp_path):
    write_folder(tmp_path, n=10)
    drawn = []
    for seed in (0, 1):
        pl.seed_everything(seed)
        drawn.append(held(ready(dataset="folder", root=tmp_path, limit=9).train))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert len(drawn[0][0]) == 9
    assert drawn[0][1].unique().tolist() == [0, 1, 2]


def test_limit_takes_nothing_from_the_global_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    ready(limit=5)
    assert torch.equal(torch.rand(2), expected)


def test_a_larger_limit_adds_and_more_than_all_is_all():
    def taken(limit):
        return {tuple(x.tolist()) for x in held(ready(limit=limit, scale="unit", flatten=True).train)[0]}

    small, large, everything = taken(100), taken(200), taken(None)
    assert (len(small), len(large)) == (100, 200)
    assert small < large < everything
    assert len(ready(limit=9999).train) == 2000
    assert len(ready(limit=10).val) == 500


def test_classes_are_relabelled_in_their_order_before_limit():
    images, targets = embedded_images("train")
    data = ready(classes=[5, 3], limit=300, scale="unit")
    x, y = held(data.train)
    assert data.number_of_classes == 2
    assert len(x) == 300
    assert y.unique().tolist() == [0, 1]
    assert len(data.val) == 100
    whole = held(ready(classes=[5, 3], scale="unit").train)
    assert len(whole[0]) == 400
    of_class_5 = nn.functional.normalize(images[targets == 5].flatten(1).float())
    torch.testing.assert_close(whole[0][whole[1] == 0].flatten(1), of_class_5)


def test_classes_of_a_folder_read_only_their_files(tmp_path):
    write_folder(tmp_path)
    for path in (tmp_path / "train" / "cat").iterdir():
        path.write_bytes(b"never read")
    data = ready(dataset="folder", root=tmp_path, classes=[0, 2])
    assert data.source.endswith("12 + 4 images")


def test_a_class_without_validation_images(tmp_path):
    write_folder(tmp_path)
    for path in (tmp_path / "test" / "cat").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"validation images of the classes \[1\]"):
        ready(dataset="folder", root=tmp_path, classes=[1])


def test_signs():
    data = ready(classes=[3, 5], targets="sign")
    labels = held(ready(classes=[3, 5]).train)[1]
    signs = held(data.train)[1]
    assert signs.dtype == torch.float32
    assert torch.equal(signs, torch.where(labels == 1, 1.0, -1.0))
    assert held(data.val)[1].unique().tolist() == [-1.0, 1.0]
    assert data.number_of_classes == 2


# --- how they are scaled


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize(("scale", "norm"), [("unit", 1.0), ("sqrt_d", math.sqrt(192))])
def test_each_image_has_the_same_norm(tmp_path, scale, norm, augment):
    data = ready(dataset="folder", root=write_folder(tmp_path), scale=scale, augment=augment)
    for part in (data.train, data.val):
        norms = held(part)[0].flatten(1).norm(dim=1)
        torch.testing.assert_close(norms, torch.full_like(norms, norm))


def test_ball_divides_all_by_one_number(tmp_path):
    write_mnist(tmp_path)
    data = ready(dataset="mnist", root=tmp_path, scale="ball")
    raw = torch.as_tensor(pixels(30, 28, 28, seed=30)).double()
    radius = raw.flatten(1).norm(dim=1).max()
    torch.testing.assert_close(held(data.train)[0].double().squeeze(1), raw / radius, rtol=1e-6, atol=0)
    raw = torch.as_tensor(pixels(10, 28, 28, seed=10)).double()
    torch.testing.assert_close(held(data.val)[0].double().squeeze(1), raw / radius, rtol=1e-6, atol=0)


def test_standard_uses_the_training_images_that_are_used(tmp_path):
    write_folder(tmp_path)
    data = ready(dataset="folder", root=tmp_path, classes=[0, 2], limit=7)
    x = held(data.train)[0].double()
    assert x.mean(dim=(0, 2, 3)).abs().max() < 1e-6
    assert (x.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-6
    assert held(data.val)[0].mean().abs() > 1e-4  # with the same constants, not its own


def test_black_images_and_constant_channels_stay_finite(tmp_path):
    write_folder(tmp_path, classes=("a", "b"), n=1)
    for path in tmp_path.rglob("*.png"):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    for scale in ("unit", "sqrt_d", "ball", "standard"):
        assert torch.equal(held(ready(dataset="folder", root=tmp_path, scale=scale).train)[0], torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize("augment", [False, True])
def test_flatten(augment):
    data = ready(flatten=True, limit=20, augment=augment)
    assert data.shape == (1, 28, 28)
    assert held(data.train)[0].shape == (20, 784)
    assert next(iter(data.val_dataloader()))[0].shape == (128, 784)


# --- augmentation


def test_augmentation_moves_and_mirrors_training_images_alone(tmp_path):
    write_folder(tmp_path, classes=("a", "b"), n=1)
    arguments = {"dataset": "folder", "root": tmp_path, "scale": "ball"}
    plain, data = ready(**arguments), ready(**arguments, augment=True)
    assert torch.equal(held(plain.val)[0], held(data.val)[0])
    assert torch.equal(held(data.val)[0], held(data.val)[0])
    padded = nn.functional.pad(plain.train[0][0], (4, 4, 4, 4))
    crops = [padded[:, top : top + 8, left : left + 8] for top in range(9) for left in range(9)]
    possible = {tuple(image.flatten().tolist()) for crop in crops for image in (crop, crop.flip(-1))}
    torch.manual_seed(0)
    seen = {tuple(data.train[0][0].flatten().tolist()) for _ in range(1500)}
    assert seen <= possible
    assert len(seen) > 150  # of 162
    assert data.train[1][1] == plain.train[1][1] == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_follows_the_seed(tmp_path, num_workers):
    write_folder(tmp_path, classes=("a", "b"), n=8)
    for path in tmp_path.rglob("*.png"):
        Image.fromarray(pixels(8, 8, 3)).save(path)  # one image, many times: only the draws differ
    data = ready(dataset="folder", root=tmp_path, augment=True, batch_size=8, num_workers=num_workers)

    def epoch(seed):
        torch.manual_seed(seed)
        return torch.cat([x for x, _ in data.train_dataloader()])

    first = epoch(1)
    assert torch.equal(first, epoch(1))
    assert not torch.equal(first, epoch(2))
    assert not torch.equal(*first.chunk(2))  # workers do not repeat one another's draws


# --- loaders


def test_equal_arguments_give_equal_tensors():
    a, b = (ready(limit=50, classes=[1, 2, 7]) for _ in range(2))
    assert all(
        torch.equal(x, y) for x, y in zip((*a.train.tensors, *a.val.tensors), (*b.train.tensors, *b.val.tensors))
    )


def test_batches_are_the_samples_in_the_order_of_the_seed():
    data = ready(limit=70, batch_size=32)
    torch.manual_seed(5)
    batches = list(data.train_dataloader())
    torch.manual_seed(5)
    reference = list(DataLoader(data.train, 32, shuffle=True))
    assert [len(x) for x, _ in batches] == [32, 32, 6]
    for (x, y), (x_reference, y_reference) in zip(batches, reference):
        assert torch.equal(x, x_reference)
        assert torch.equal(y, y_reference)
    assert not torch.equal(torch.cat([x for x, _ in batches]), held(data.train)[0])


def test_setup_again_changes_nothing_and_every_stage_has_its_images():
    data = Images(limit=40)
    for stage in ("fit", "validate", "test", "predict"):
        data.setup(stage)
        kept = getattr(data, "kept", data.train)
        assert data.train is kept
        data.kept = kept
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert torch.equal(torch.cat([x for x, _ in loader]), held(data.val)[0])
    for stage in ("validate", "test", "predict"):  # each by itself, too
        alone = Images(limit=40)
        alone.setup(stage)
        assert len(alone.val) == 500


def test_a_trainer_fits_and_tests():
    data, module = Images(limit=64, batch_size=16), Line()
    runner = trainer(max_epochs=2)
    runner.fit(module, datamodule=data)
    assert runner.global_step == 8
    assert math.isfinite(runner.test(module, datamodule=data, verbose=False)[0]["val_loss"])


def test_the_data_can_be_sent_to_another_process(tmp_path):
    data = ready(dataset="folder", root=write_folder(tmp_path), augment=True)
    copy = pickle.loads(pickle.dumps(data))
    torch.manual_seed(0)
    expected = held(data.train)[0]
    torch.manual_seed(0)
    assert torch.equal(held(copy.train)[0], expected)


# --- full-batch gradient descent


def test_full_batch_steps_all_see_all_images_in_one_order():
    data, module = Images(limit=30, full_batch_steps=4), Line()
    runner = trainer(max_epochs=2)
    runner.fit(module, datamodule=data)
    assert runner.global_step == 8
    assert all(torch.equal(x, data.train.tensors[0]) for x in module.seen)


def test_the_probe_of_a_full_batch_is_all_of_it(tmp_path):
    data, module, callback = Images(limit=512, full_batch_steps=3), Line(), RSCRatio(probe=512)
    losses = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            x, y = data.train.tensors
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(module(x), y)))

    trainer([Watch(), callback], max_epochs=2).fit(module, datamodule=data)
    (batch,) = callback.probe.batches(0, 1)
    probed, trained = (x.flatten(1).double() @ torch.arange(784.0).double() for x in (batch.data[0], module.seen[0]))
    assert torch.equal(probed.sort().values, trained.sort().values)
    measured = [row["normtheory/loss"] for _, row in sorted(rows(tmp_path).items())]
    assert measured == pytest.approx(losses, rel=1e-5)


def test_a_full_batch_is_for_one_process():
    data = ready(limit=30, full_batch_steps=4)
    data.trainer = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match=r"one process.*there are 2.*--trainer\.devices 1"):
        data.train_dataloader()


# --- the command line


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter", "ignore::DeprecationWarning")
def test_lightnings_command_line_tells_the_model_what_the_data_is(tmp_path):
    class Linked(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("data.features", "model.inputs", apply_on="instantiate")
            parser.link_arguments("data.number_of_classes", "model.classes", apply_on="instantiate")

    def linked(*options):
        return Linked(Line, Images, run=False, args=list(options), save_config_callback=None)

    root = write_folder(tmp_path)
    cli = linked("--data.dataset=folder", f"--data.root={root}", "--data.classes=[0,2]", "--data.scale=sqrt_d")
    assert cli.model.net[1].weight.shape == (2, 192)
    assert (cli.datamodule.classes, cli.datamodule.scale) == ([0, 2], "sqrt_d")
    with pytest.raises(FileNotFoundError, match=r"Expected CIFAR-10 in .*nowhere"):
        linked("--data.dataset=cifar10", f"--data.root={tmp_path / 'nowhere'}")
