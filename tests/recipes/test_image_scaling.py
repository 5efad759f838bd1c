"""What is done to images: scaled by one of four rules, moved and mirrored."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from support.recipes.image_files import held, pixels, ready, write_folder, write_mnist


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
