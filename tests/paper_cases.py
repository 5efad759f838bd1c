"""What the tests of WN's and RSC's constants share: activations, random numbers, and networks as flat vectors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Norms and sums of at most a few hundred float64 numbers, beside bounds that a measured value may just meet.
ROUNDING = 1 + 1e-12
TINY = torch.finfo(torch.float64).tiny


class Activation(NamedTuple):
    """φ with |φ'| ≤ 1 and |φ''| ≤ beta."""

    function: Callable[[Tensor], Tensor]
    beta: float
    phi0: float = 0.0


ACTIVATIONS = {
    "tanh": Activation(torch.tanh, 4 / (3 * math.sqrt(3))),
    "sigmoid": Activation(torch.sigmoid, 1 / (6 * math.sqrt(3)), 0.5),
    "softplus": Activation(nn.functional.softplus, 0.25, math.log(2)),
    "sin": Activation(torch.sin, 1.0),
    "cos": Activation(torch.cos, 1.0, 1.0),
    "narrow sine": Activation(lambda z: torch.sin(5 * z) / 5, 5.0),
    # The slopes of GELU and SiLU reach 1.129 and 1.0998.
    "scaled GELU": Activation(lambda z: nn.functional.gelu(z) / 1.13, math.sqrt(2 / math.pi) / 1.13),
    "scaled SiLU": Activation(lambda z: nn.functional.silu(z) / 1.1, 0.5 / 1.1),
}


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(direction: Tensor) -> Tensor:
    """Of norm 1, or 0 for 0."""
    return direction / direction.norm().clamp_min(TINY)


def cosine(a: Tensor, b: Tensor) -> float:
    return min(1.0, abs(float(unit(a) @ unit(b))))


@dataclass(frozen=True)
class PaperNetwork:
    """A network f(θ; x) of a paper's form on its own samples, θ being one flat vector."""

    seed: int
    depth: int
    width: int
    inputs: int
    outputs: int
    samples: int
    activation: str

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    @property
    def shapes(self) -> list[tuple[int, int]]:
        hidden = [(self.width, self.inputs)] + [(self.width, self.width)] * (self.depth - 1)
        return [*hidden, (self.outputs, self.width)]

    def split(self, theta: Tensor) -> list[Tensor]:
        parts = theta.split([a * b for a, b in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]

    def loss(self, theta: Tensor) -> Tensor:
        x, y = self.data
        return (self.predict(theta, x) - y).square().sum() / len(x)

    def value_and_gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        theta = theta.clone().requires_grad_()
        value = self.loss(theta)
        return float(value.detach()), torch.autograd.grad(value, theta)[0]
