"""What the tests of WN's and RSC's constants share: activations, random numbers, and networks as flat vectors."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_normtheory.theorems.papers.rsc import rsc_constants, rsc_radii
from lightning_normtheory.theorems.papers.wn import weightnorm_constants

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


@dataclass(frozen=True)
class WeightNormCase(PaperNetwork):
    """A random network of the paper's form, samples of unit norm and targets."""

    log_scale: float  # of the weight vectors
    rho1: float
    v0_norm: float
    aligned: bool  # v is v_0, stretched: then ‖v‖ = ‖v_0‖ + ρ₁

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        *hidden, V = self.split(theta)
        for W in hidden:
            unit = W / W.norm(dim=1, keepdim=True)
            x = ACTIVATIONS[self.activation].function(x @ unit.t() / math.sqrt(self.width))
        return x @ V.t()

    @property
    def v0(self) -> Tensor:
        V = rand(self.outputs, self.width, seed=self.seed)
        return self.v0_norm * V / V.norm(dim=1, keepdim=True)

    @property
    def theta(self) -> Tensor:
        scales = [10**self.log_scale * (1 + rand(m, 1, seed=self.seed + 1).abs()) for m, _ in self.shapes[:-1]]
        hidden = [rand(*shape, seed=self.seed + 2 + l) for l, shape in enumerate(self.shapes[:-1])]  # noqa: E741
        away = self.v0 if self.aligned else rand(self.outputs, self.width, seed=self.seed + 99)
        V = self.v0 + self.rho1 * away / away.norm(dim=1, keepdim=True)
        rows = [W / W.norm(dim=1, keepdim=True) * scale for W, scale in zip(hidden, scales)]
        return torch.cat([W.flatten() for W in [*rows, V]])

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        x = rand(self.samples, self.inputs, seed=self.seed + 3)
        return x / x.norm(dim=1, keepdim=True), rand(self.samples, self.outputs, seed=self.seed + 4)

    def w_min(self, theta: Tensor) -> float:
        return min(float(W.norm(dim=1).min()) for W in self.split(theta)[:-1])

    def away(self, theta: Tensor) -> float:
        """The largest ‖v_h − v_h(0)‖."""
        return float((self.split(theta)[-1] - self.v0).norm(dim=1).max())

    def constants(self, theta: Tensor, **more):
        activation = ACTIVATIONS[self.activation]
        at = {"w_min": self.w_min(theta), "rho1": self.away(theta), "v0_norm": self.v0_norm, **more}
        shape = {"depth": self.depth, "width": self.width, "targets": self.data[1]}
        return weightnorm_constants(**shape, beta_phi=activation.beta, phi0=activation.phi0, **at)


# Far from 0 at 0, and almost straight: what is printed for c_H does not see the first.
SHIFTED = {"shifted": Activation(lambda z: 30 + 1000 * torch.sin(z / 1000), 0.001, 30.0)}


@dataclass(frozen=True)
class RSCCase(PaperNetwork):
    """A random network of the paper's form, samples of norm √d and targets."""

    gamma: float  # ‖W_l‖₂/√m of every layer
    rho1: float
    v0_norm: float
    aligned: bool  # v is v_0, stretched: then ‖v‖ = ‖v_0‖ + ρ₁
    target_scale: float = 1.0

    @property
    def phi(self) -> Activation:
        return {**ACTIVATIONS, **SHIFTED}[self.activation]

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        *hidden, V = self.split(theta)
        for W in hidden:
            x = self.phi.function(x @ W.t() / math.sqrt(W.shape[1]))
        return x @ V.t() / math.sqrt(self.width)

    @property
    def initial(self) -> list[Tensor]:
        V = rand(self.outputs, self.width, seed=self.seed)
        return [*map(torch.zeros_like, self.split(self.theta)[:-1]), self.v0_norm * V / V.norm(dim=1, keepdim=True)]

    @property
    def theta(self) -> Tensor:
        hidden = [rand(*shape, seed=self.seed + 2 + number) for number, shape in enumerate(self.shapes[:-1])]
        scale = self.gamma * math.sqrt(self.width)
        hidden = [W * scale / torch.linalg.matrix_norm(W, 2) for W in hidden]
        v0 = rand(self.outputs, self.width, seed=self.seed)
        away = v0 if self.aligned else rand(self.outputs, self.width, seed=self.seed + 99)
        V = self.v0_norm * v0 / v0.norm(dim=1, keepdim=True) + self.rho1 * away / away.norm(dim=1, keepdim=True)
        return torch.cat([W.flatten() for W in [*hidden, V]])

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        x = rand(self.samples, self.inputs, seed=self.seed + 3)
        y = self.target_scale * rand(self.samples, self.outputs, seed=self.seed + 4)
        return x / x.norm(dim=1, keepdim=True) * math.sqrt(self.inputs), y

    def mean_gradient(self, theta: Tensor) -> Tensor:
        """ḡ = (1/(nk)) Σ_i Σ_h ∇f_h(x_i)."""
        theta = theta.clone().requires_grad_()
        return torch.autograd.grad(self.predict(theta, self.data[0]).mean(), theta)[0]

    def constants(self, *thetas: Tensor, margin: float = 0.0, rho2: float = 0.0, kappa: float = 1.0):
        """What holds on the segment between the points, and within ``margin`` of them."""
        radii = [rsc_radii(self.split(theta), self.initial) for theta in thetas]
        return rsc_constants(
            depth=self.depth,
            width=self.width,
            gamma=max(each.gamma for each in radii) + margin / math.sqrt(self.width),
            rho1=max(each.rho1 for each in radii) + margin,
            rho2=rho2,
            kappa=kappa,
            beta_phi=self.phi.beta,
            phi0=self.phi.phi0,
            targets=self.data[1],
            v0_norm=self.v0_norm,
            inputs=self.inputs,
        )


def largest_hessian(case: RSCCase) -> float:
    """√m‖∇²f_h(θ; x)‖₂ of the first sample, the largest over the outputs: what c_H bounds."""
    x = case.data[0][:1]
    hessians = torch.func.hessian(lambda t: case.predict(t, x)[0])(case.theta)
    return math.sqrt(case.width) * float(torch.linalg.eigvalsh(hessians).abs().max())


def cases(kind: type[PaperNetwork], **ranges: st.SearchStrategy) -> st.SearchStrategy:
    """Random networks of a paper's form; a range may be replaced."""
    common = {
        "seed": st.integers(0, 10**6),
        "depth": st.integers(1, 4),
        "width": st.integers(1, 8),
        "outputs": st.integers(1, 3),
        "samples": st.integers(1, 3),
        "rho1": st.floats(0, 4),
        "v0_norm": st.sampled_from([1.0, 0.3, 2.0]),
        "aligned": st.booleans(),
    }
    every = {**common, **ranges}
    return st.builds(kind, **{field.name: every[field.name] for field in fields(kind)})
