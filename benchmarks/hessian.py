"""The top eigenvalue of the loss's Hessian: our cost and the peers', with the true error."""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.peers import PEERS, installed
from benchmarks.results import record
from benchmarks.timing import Timed, in_gradients, timed
from lightning_normtheory import Eigenpair, hessian_top_eigenvalue
from lightning_normtheory.hessian import hessian_operator
from lightning_normtheory.hessian.eigenvalues import Method
from lightning_normtheory.hessian.following import follow_top_eigenvalue
from lightning_normtheory.hessian.warm_start import WarmStart
from lightning_normtheory.linalg.eigensolvers import lanczos
from lightning_normtheory.recipes.datasets import FashionMNISTSlice

__all__ = ["CASES", "Subject", "compare", "cost_table", "images", "loss_function"]

loss_function = nn.functional.cross_entropy


def mlp(normalized: bool) -> nn.Module:
    normalize = weight_norm if normalized else lambda layer: layer
    return nn.Sequential(
        nn.Flatten(),
        normalize(nn.Linear(784, 1024)),
        nn.Tanh(),
        normalize(nn.Linear(1024, 1024)),
        nn.Tanh(),
        normalize(nn.Linear(1024, 10)),
    )


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), model)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(784, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 10)))


@dataclass(frozen=True)
class Case:
    """A model, the number of samples, the learning rate at which it is trained for two epochs before it is measured."""

    build: Callable[[], nn.Module]
    samples: int
    lr: float = 0.1
    epochs: int = 2


CASES = {
    "wn-mlp": Case(partial(mlp, True), 512),
    "mlp": Case(partial(mlp, False), 512),
    "resnet18": Case(resnet18, 128, epochs=1),
    "tiny": Case(tiny, 64),
}
# Our methods with the tolerance of the callbacks: the relative residual, whose square is the error of the eigenvalue.
OURS: dict[Method, float] = {"power": 1e-2, "lanczos": 1e-2}


def images() -> tuple[Tensor, Tensor]:
    data = FashionMNISTSlice()
    data.setup("fit")
    x, y = zip(*(data.train[i] for i in range(len(data.train))))
    return torch.stack(x), torch.tensor(y)


def train(model: nn.Module, lr: float, epochs: int, seed: int) -> None:
    """Plain SGD with batches of 128."""
    x, y = images()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(128):
            optimizer.zero_grad()
            loss_function(model(x[batch]), y[batch]).backward()
            optimizer.step()
    optimizer.zero_grad()


class Subject:
    """A trained model with its samples. BatchNorm uses its running statistics: that is what all tools can do."""

    def __init__(self, name: str, seed: int) -> None:
        case = CASES[name]
        torch.manual_seed(seed)
        self.model = case.build()
        train(self.model, case.lr, case.epochs, seed)
        self.model.eval()
        x, y = images()
        self.x, self.y = x[: case.samples], y[: case.samples]

    def gradient(self) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        torch.autograd.grad(loss_function(self.model(self.x), self.y), parameters)

    def true_value(self) -> float:
        """A long Lanczos run in float64."""
        model = copy.deepcopy(self.model).double()
        batches = [(self.x.double(), self.y)]
        return hessian_top_eigenvalue(model, loss_function, batches, method="lanczos", tol=1e-5, max_hvps=200).value

    def solve(self, method: Method, tol: float, last: WarmStart) -> Timed:
        """As the callbacks do."""

        def follow() -> tuple[Eigenpair, WarmStart]:
            with hessian_operator(self.model, loss_function, [(self.x, self.y)]) as hessian:
                return follow_top_eigenvalue(hessian, last, method=method, tol=tol, max_hvps=200)

        return in_gradients(self.gradient, follow)

    def epoch_of_small_steps(self, seed: int) -> None:
        self.model.train()
        train(self.model, 0.01, 1, seed)
        self.model.eval()


def cost_table(name: str) -> Table:
    """The parts of the cost."""
    subject = Subject(name, 0)
    with hessian_operator(subject.model, loss_function, [(subject.x, subject.y)]) as hessian:
        build = in_gradients(subject.gradient, lambda: hessian.gradient).cost
        vector = torch.randn(hessian.space.size)
        hessian @ vector
        products, ratios = [], []
        for _ in range(12):  # in turns, several of each: the machine's speed drifts
            unit = statistics.mean(timed(subject.gradient) for _ in range(3))
            products += [timed(lambda: hessian @ vector) for _ in range(3)]
            ratios.append(statistics.mean(products[-3:]) / unit)
        product = statistics.median(products)
        table = Table(title=f"{name}: p = {hessian.space.size:,}, {len(subject.x)} samples", title_justify="left")
    table.add_column("part")
    table.add_column("cost", justify="right")
    table.add_row("graph of the gradient, once", f"{build:.2f} G")
    table.add_row("product, after that", f"{statistics.median(ratios):.2f} G")
    table.add_row("Lanczos without its products, per step", f"{_reorthogonalization(vector) / product:.2f} products")
    return table


def _reorthogonalization(vector: Tensor) -> float:
    """Seconds per step of Lanczos on a map that costs next to nothing, with a basis that fills up to 24 vectors."""
    diagonal = torch.linspace(-1, 1, len(vector))
    seconds = timed(lambda: lanczos(diagonal.mul, vector, which="algebraic", tol=1e-9, max_products=24))
    return (seconds - 24 * timed(lambda: diagonal * vector)) / 24


def compare(name: str, runs: int) -> None:
    """Record every tool on several networks, from several starts: ours cold and warm, the peers cold."""
    table = f"{name}: top eigenvalue, {runs} networks with a start each, median (worst)"
    for seed in range(runs):
        subject = Subject(name, seed)
        truth = subject.true_value()
        last = _run_ours(table, subject, truth, seed, "cold", {})
        _run_peers(table, subject, truth, seed)
        subject.epoch_of_small_steps(seed)
        _run_ours(table, subject, subject.true_value(), seed, "warm", last)


def _run_ours(
    table: str, subject: Subject, truth: float, seed: int, start: str, last: dict[Method, WarmStart]
) -> dict[Method, WarmStart]:
    """Our methods; returns what to begin with next time."""
    left = {}
    for method, tol in OURS.items():
        cost, (pair, left[method]) = subject.solve(method, tol, last.get(method, WarmStart(seed=seed)))
        row = f"ours, {method}, {start}"
        record(table, row, "cost", cost)
        record(table, row, "products", pair.hvps, "count")
        record(table, row, "true relative error", abs(pair.value / truth - 1), "error")
    return left


def _run_peers(table: str, subject: Subject, truth: float, seed: int) -> None:
    for package, solver in PEERS.items():
        release = installed(package)
        row = f"{package} {release or ''}".strip()
        if release is None:
            record(table, row, "cost", "not installed")
            continue
        torch.manual_seed(seed)
        solve = partial(solver, copy.deepcopy(subject.model), loss_function, subject.x, subject.y)
        try:
            cost, value = in_gradients(subject.gradient, solve)
        except Exception as error:  # noqa: BLE001  # what a peer cannot do belongs into the table
            record(table, row, "cost", f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
        else:
            record(table, row, "cost", cost)
            record(table, row, "true relative error", abs(value / truth - 1), "error")
