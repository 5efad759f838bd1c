"""Symmetric maps with known spectra that move from one measurement to the next, in the place of a loss's Hessian.

``cd tests && python -m support.theory.moving_hessians`` prints how both starts do on them.
"""

import math
import statistics
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.hessian.eigenvalues import Eigenpair, leading_eigenpairs
from lightning_normtheory.hessian.following import follow_top_eigenvalue
from lightning_normtheory.hessian.warm_start import WarmStart
from lightning_normtheory.model.parameters import FlatParameters

__all__ = ["CASES", "LARGE", "Case", "MovingHessian", "OneVector", "Outcome", "Several", "outcome"]

# LARGE is a power of two, for the Hadamard transform.
SIZE, LARGE, MEASUREMENTS = 600, 2**16, 8


class Orthogonal:
    """Q = T_m … T_1 Q_0: a few planes (u, v, angle) that turn one after the other, behind a random orthogonal Q_0.

    That is a dense matrix, or, for `LARGE`, two Hadamard transforms behind random signs.
    """

    def __init__(self, first: list[Tensor], planes: tuple = (), transposed: bool = False) -> None:
        self._first, self._planes, self._transposed = first, planes, transposed

    @classmethod
    def random(cls, size: int, generator: torch.Generator) -> "Orthogonal":
        if size < LARGE:
            return cls([torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]])
        return cls([torch.randint(0, 2, (size,), generator=generator).double().mul(2).sub(1) for _ in range(2)])

    def t(self) -> "Orthogonal":
        return Orthogonal(self._first, self._planes, not self._transposed)

    def to(self, dtype: torch.dtype) -> "Orthogonal":
        planes = tuple((u.to(dtype), v.to(dtype), angle) for u, v, angle in self._planes)
        return Orthogonal([each.to(dtype) for each in self._first], planes, self._transposed)

    def __matmul__(self, x: Tensor) -> Tensor:
        if not self._transposed:
            x = self._start(x)
        for u, v, angle in reversed(self._planes) if self._transposed else self._planes:
            x = _turned(x, u, v, -angle if self._transposed else angle)
        return self._start(x) if self._transposed else x

    def _start(self, x: Tensor) -> Tensor:
        if len(self._first) == 1:
            return (self._first[0].t() if self._transposed else self._first[0]) @ x
        a, b = self._first
        return a * _hadamard(b * _hadamard(x)) if self._transposed else _hadamard(b * _hadamard(a * x))

    def turned(self, column: int, angle: float, direction: Tensor) -> "Orthogonal":
        """Turn all columns in the plane of one of them and a direction."""
        unit = torch.zeros(len(self._first[0]), dtype=torch.float64)
        unit[column] = 1.0
        u = self @ unit
        v = direction - u * (u @ direction)
        return Orthogonal(self._first, (*self._planes, (u, v / v.norm(), angle)))


def _turned(x: Tensor, u: Tensor, v: Tensor, angle: float) -> Tensor:
    a, b, sine, cosine = u @ x, v @ x, math.sin(angle), math.cos(angle)
    return x + u * ((cosine - 1) * a - sine * b) + v * (sine * a + (cosine - 1) * b)


def _hadamard(x: Tensor) -> Tensor:
    for width in (2**i for i in range(len(x).bit_length() - 1)):
        pairs = x.view(-1, 2, width)
        x = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
    return x.view(-1) / x.numel() ** 0.5


class MovingHessian:
    """H = QΛQᵀ, with the part of `LossHessian` that eigensolvers use; it counts products."""

    def __init__(self, Q: Orthogonal, values: Tensor, gradient: Tensor, dtype: torch.dtype) -> None:
        self._Q, self._values, self.gradient = Q.to(dtype), values.to(dtype), gradient.to(dtype)
        self.space = FlatParameters({"w": torch.zeros(len(values), dtype=dtype, requires_grad=True)})
        self.vectors = self.space.size
        self.top, self.products = float(values.max()), 0

    def forget_gradient(self) -> None:
        pass

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self._Q @ (self._values * (self._Q.t() @ vector))

    unchecked = __matmul__


class Case(NamedTuple):
    """How a spectrum moves.

    Attributes:
        leading: the measurement (0, 1, …) ↦ the leading eigenvalues, each with its own direction.
        change: the first measurement at which the largest eigenvalue has another direction.
        angle: by how much leading eigenvectors turn between two measurements, in radians.
        steady: whether each turns in the same plane all the time.
        bulk: the other eigenvalues are uniform in ± this.
        known: for each leading eigenvalue the gradient's component along its direction.
    """

    leading: Callable[[int], list[float]]
    change: int = MEASUREMENTS
    angle: float = 5e-3
    steady: bool = False
    bulk: float = 0.1
    known: tuple[float, ...] = (0.6, 0.3, 0.2)

    def sequence(self, seed: int, dtype: torch.dtype = torch.float32, size: int = SIZE) -> list[MovingHessian]:
        """Return the Hessian of each measurement."""
        generator = torch.Generator().manual_seed(seed)
        Q = Orthogonal.random(size, generator)
        others = self.bulk * (2 * torch.rand(size, generator=generator, dtype=torch.float64) - 1)
        found = []
        for measurement in range(MEASUREMENTS):
            leading = self.leading(measurement)
            values = others.clone()
            values[: len(leading)] = torch.tensor(leading, dtype=torch.float64)
            along = torch.zeros(size, dtype=torch.float64)
            along[: len(self.known)] = torch.tensor(self.known, dtype=torch.float64)
            rest = torch.randn(size - len(leading), generator=generator, dtype=torch.float64)
            along[len(leading) :] = 0.5 * rest / rest.norm()
            found.append(MovingHessian(Q, values, Q @ along, dtype))
            if measurement == 0 or not self.steady:
                directions = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in leading]
            for column, direction in enumerate(directions):
                Q = Q.turned(column, self.angle, direction)
        return found


def _ramp(*ends: tuple[float, float]) -> Callable[[int], list[float]]:
    share = MEASUREMENTS - 1.0
    return lambda t: [begin + (end - begin) * t / share for begin, end in ends]


def _step(before: list[float], after: list[float], at: int) -> Callable[[int], list[float]]:
    return lambda t: before if t < at else after


CASES = {
    "calm": Case(lambda t: [1.0, 0.8, 0.6, 0.5]),
    "calm, crowded": Case(lambda t: [1.0, 0.95, 0.92, 0.9, 0.88, 0.85, 0.8, 0.7, 0.6, 0.5], bulk=0.4),
    "training": Case(lambda t: [1.0 + 0.05 * t, 0.8, 0.6, 0.5], angle=0.05),
    "training, steady": Case(lambda t: [1.0, 0.8, 0.6, 0.5], angle=0.05, steady=True),
    "training, wild": Case(lambda t: [1.0 * 1.2**t, 0.8, 0.6, 0.5], angle=0.3),
    "slow crossing": Case(_ramp((1.0, 1.0), (0.8, 1.15), (0.5, 0.5)), change=5),
    "crossing": Case(_step([1.0, 0.9, 0.6, 0.5], [1.0, 1.1, 0.6, 0.5], 4), change=4),
    "wide crossing": Case(_step([1.0, 0.7, 0.6, 0.5], [1.0, 1.4, 0.6, 0.5], 5), change=5),
    "crossing by the third": Case(_step([1.0, 0.9, 0.7, 0.5], [1.0, 0.9, 1.15, 0.5], 4), change=4),
    "exchange": Case(_step([1.0, 0.9, 0.6, 0.5], [0.9, 1.0, 0.6, 0.5], 3), change=3),
    "jump": Case(_step([1.0, 0.8, 0.6, 0.05], [1.0, 0.8, 0.6, 1.2], 4), change=4),
    "large jump": Case(_step([1.0, 0.8, 0.6, 0.05], [1.0, 0.8, 0.6, 2.0], 4), change=4),
    "jump that the gradient knows": Case(
        _step([1.0, 0.8, 0.6, 0.05], [1.0, 0.8, 0.6, 1.2], 4), change=4, known=(0.6, 0.3, 0.2, 0.2)
    ),
    "jump, crowded": Case(
        _step([0.05, 1.0, 0.95, 0.92, 0.9, 0.85], [1.2, 1.0, 0.95, 0.92, 0.9, 0.85], 4),
        change=4,
        bulk=0.4,
        known=(0, 0.6, 0.3, 0.2),
    ),
    "nearly double": Case(lambda t: [1.0, 0.995, 0.6, 0.5]),
    "negative dominates": Case(lambda t: [1.0, 0.8, -3.0, -2.0]),
    "negative, crossing": Case(_step([1.0, 0.9, -3.0, -2.0], [1.0, 1.1, -3.0, -2.0], 4), change=4),
}


class OneVector:
    """Begin with the last vector, rounded to a byte per entry, gradient and noise."""

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def measure(self, hessian: MovingHessian, tol: float = 1e-2) -> Eigenpair:
        last = self._last
        options = {"method": "lanczos", "which": "algebraic", "tol": tol, "max_hvps": 100}
        (pair,) = leading_eigenpairs(hessian, 1, start=None if last is None else lambda: last, **options)
        vector = pair.vector["w"]
        self._last = (vector * len(vector) ** 0.5).to(torch.float8_e5m2).to(vector)
        return pair


class Several:
    """Begin with what `follow_top_eigenvalue` returned."""

    def __init__(self) -> None:
        self.last = WarmStart()

    def measure(self, hessian: MovingHessian, tol: float = 1e-2) -> Eigenpair:
        pair, self.last = follow_top_eigenvalue(hessian, self.last, method="lanczos", tol=tol, max_hvps=100)
        return pair


class Outcome(NamedTuple):
    """By measurement: the numbers of products of all seeds, and how often a wrong eigenvalue is called converged."""

    products: list[list[int]]
    wrong: list[int]


def outcome(
    case: Case, start: type[OneVector] | type[Several], seeds: range, dtype=torch.float32, size: int = SIZE
) -> Outcome:
    """Some eigenvalue lies within the residual. If it is not the largest, the answer is wrong."""
    products: list[list[int]] = [[] for _ in range(MEASUREMENTS)]
    wrong = [0] * MEASUREMENTS
    for seed in seeds:
        started = start()
        for measurement, hessian in enumerate(case.sequence(seed, dtype, size)):
            pair = started.measure(hessian)
            assert pair.hvps == hessian.products
            products[measurement].append(pair.hvps)
            wrong[measurement] += pair.converged and abs(hessian.top - pair.value) > pair.residual + 1e-5
    return Outcome(products, wrong)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| case | start | products: before, at the change | wrong called converged: at the change, after |")
    print("|---|---|---|---|")
    for name, case in CASES.items():
        for start in (OneVector, Several):
            found = outcome(case, start, range(50))
            calm = statistics.mean(chain.from_iterable(found.products[1 : case.change]))
            at = f", {statistics.mean(found.products[case.change]):.1f}" if case.change < MEASUREMENTS else ""
            wrong = f"{sum(found.wrong[case.change : case.change + 1])}, {sum(found.wrong[case.change + 1 :])}"
            wrong = wrong if case.change < MEASUREMENTS else str(sum(found.wrong))
            print(f"| {name} | {start.__name__} | {calm:.1f}{at} | {wrong} |", flush=True)
