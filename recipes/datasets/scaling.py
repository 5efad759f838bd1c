"""Scale and augment images."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Augmented", "Scale", "Scaling"]

Scale = Literal["unit", "sqrt_d", "ball", "standard"]

# Largest shift of an augmented image, in pixels.
_PADDING = 4


class Scaling:
    """Scale images, (…, C, H, W) of uint8, to float, flattened or not, with the statistics of ``images``.

    Example:
        >>> images = torch.tensor([0, 3, 4, 0], dtype=torch.uint8).reshape(2, 1, 1, 2)
        >>> [Scaling(scale, images, flatten=True)(images).tolist() for scale in ("unit", "ball")]
        [[[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.75], [1.0, 0.0]]]
    """

    def __init__(self, scale: Scale, images: Tensor, flatten: bool) -> None:
        self.flatten = flatten
        features = math.prod(images.shape[1:])
        self.norm = {"unit": 1.0, "sqrt_d": math.sqrt(features)}.get(scale)
        self.mean, self.deviation = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
        if scale == "ball":
            norms = (chunk.flatten(1).float().norm(dim=1).max() for chunk in images.split(1000))
            self.deviation = _or_one(torch.stack(list(norms)).max().reshape(1, 1, 1))
        if scale == "standard":
            self.mean, self.deviation = _moments(images)

    def __call__(self, images: Tensor) -> Tensor:
        x = images.float()
        if self.norm is None:
            x = x.sub_(self.mean).div_(self.deviation)
        else:
            # Pixels are integers: only a black image has a norm below 1.
            norms = x.flatten(-3).norm(dim=-1).clamp_min(1)
            x = x.mul_((self.norm / norms)[..., None, None, None])
        return x.flatten(-3) if self.flatten else x


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and deviation of each channel, (C, 1, 1), exactly from the counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64)
    counts = [torch.bincount(images[:, c].flatten(), minlength=256) for c in range(images.shape[1])]
    weights = torch.stack([count / count.sum(dtype=torch.float64) for count in counts])
    mean = weights @ values
    variance = (weights * (values - mean[:, None]).square()).sum(1)
    return mean.float()[:, None, None], _or_one(variance.sqrt().float()[:, None, None])


def _or_one(divisor: Tensor) -> Tensor:
    return torch.where(divisor > 0, divisor, 1.0)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Shift and mirror each image at random when it is read, with torch's generator, which Lightning seeds."""

    def __init__(self, images: Tensor, targets: Tensor, scaling: Scaling) -> None:
        self.height, self.width = images.shape[-2:]
        self.padded = torch.nn.functional.pad(images, (_PADDING,) * 4)
        self.targets = targets
        self.scaling = scaling

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        top, left = torch.randint(2 * _PADDING + 1, (2,)).tolist()
        image = self.padded[index, :, top : top + self.height, left : left + self.width]
        return self.scaling(image.flip(-1) if torch.rand(()) < 0.5 else image), self.targets[index]
