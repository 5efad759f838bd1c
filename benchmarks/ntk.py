"""The cost of the tangent kernel, ours and that of other tools, and the memory it takes, in processes of their own."""

import itertools
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.peers import installed
from benchmarks.timing import in_gradients, timed
from lightning_normtheory import empirical_ntk
from lightning_normtheory.linalg.spectrum import largest_eigenvalue, smallest_eigenvalue
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.ntk.empirical import effort_for_batches, tangent_kernel_of_batches

__all__ = ["CASES", "cost_table", "outputs_table", "scaling_table", "spectrum_table"]

_GRADIENTS, _TIMEOUT = 7, 900


def mlp(sizes: tuple[int, ...], normalized: bool = True) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layer = nn.Linear(inputs, outputs)
        layers += [weight_norm(layer) if normalized else layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


def mobilenet() -> nn.Module:
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(num_classes=10)


@dataclass(frozen=True)
class Case:
    """A network, the shape of an input, the number of samples, and which tools have a chance."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int = 512
    tools: tuple[str, ...] = ("float32", "float64", "nngeometry")

    def subject(self) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return self.build().eval(), torch.rand(self.samples, *self.shape)


_ALL = ("float32", "float64", "jacobian", "nngeometry")
CASES = {
    "wn-mlp": Case(lambda: mlp((784, 1024, 1024, 1)), (784,), tools=_ALL),
    "mlp": Case(lambda: mlp((784, 1024, 1024, 1), normalized=False), (784,), tools=_ALL),
    "wide-wn-mlp": Case(lambda: mlp((3072, 2048, 2048, 10)), (3072,)),
    "resnet18": Case(resnet18, (3, 32, 32), 128, tools=("float32", "float64")),
    "mobilenet": Case(mobilenet, (3, 64, 64), 32, tools=("float32", "float64")),
    "many": Case(lambda: mlp((784, 1024, 1024, 1)), (784,), 4096, tools=("float32",)),
    "tiny": Case(lambda: mlp((8, 6, 2)), (8,), 16, tools=_ALL),
}
_LABELS = {
    "float32": "ours, float32, all parts",
    "float64": "ours, float64, all parts",
    "jacobian": "torch.func: vmap(jacrev), contracted",
    "nngeometry": "nngeometry",
}


def ours(dtype: torch.dtype, model: nn.Module, x: Tensor) -> Tensor:
    return empirical_ntk(model, x, dtype=dtype).kernel


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """As the documentation of torch.func has it."""
    theta = {name: p.detach() for name, p in model.named_parameters()}

    def output(theta: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, theta, (sample[None],))[0]

    parts = vmap(jacrev(output), (None, 0))(theta, x).values()
    total = sum(torch.einsum("ikp,jkp->ij", part.flatten(2), part.flatten(2)) for part in parts)
    return total / next(iter(parts)).shape[1]


def nngeometry(model: nn.Module, x: Tensor) -> Tensor:
    from nngeometry import GramMatrix
    from torch.utils.data import DataLoader, TensorDataset

    data = DataLoader(TensorDataset(x, torch.zeros(len(x))), len(x))
    gram = GramMatrix(model, data).data  # (k, n, k, n)
    return gram.diagonal(dim1=0, dim2=2).mean(-1)


TOOLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "float32": lambda model, x: ours(torch.float32, model, x),
    "float64": lambda model, x: ours(torch.float64, model, x),
    "jacobian": jacobian,
    "nngeometry": nngeometry,
}


def cost_table(name: str, runs: int) -> Table:
    """Cost, memory and error of every tool, for the kernel averaged over the outputs."""
    case = CASES[name]
    table = Table(
        title=f"{name}: tangent kernel, {case.samples} samples, median (worst) of {runs}", title_justify="left"
    )
    for header in ("tool", "cost", "extra memory", "difference", ""):
        table.add_column(header, justify="left" if header in ("tool", "") else "right")
    for tool in case.tools:
        release = installed(tool) if tool == "nngeometry" else ""
        if release is None:
            table.add_row(_LABELS[tool], "–", "–", "–", "not installed")
            continue
        found = _in_a_process(name, tool, runs)
        if "error" in found:
            table.add_row(_LABELS[tool], "–", "–", "–", f"{release}: {found['error']}")
            continue
        costs = found["costs"]
        table.add_row(
            _LABELS[tool],
            f"{statistics.median(costs):.2f} G ({max(costs):.2f})",
            f"{found['memory']:.0f} MB",
            f"{found['difference']:.1e}",
            release,
        )
    return table


def _in_a_process(name: str, tool: str, runs: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ntk", name, tool, str(runs)]
    folder = Path(__file__).parent.parent
    try:
        finished = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {_TIMEOUT} seconds"}
    if finished.returncode != 0:
        return {"error": (finished.stderr.strip().splitlines() or ["killed"])[-1][:70]}
    return json.loads(finished.stdout.splitlines()[-1])


def _measure(name: str, tool: str, runs: int) -> dict[str, Any]:
    model, x = CASES[name].subject()
    parameters = list(model.parameters())

    def gradient() -> None:
        torch.autograd.grad(model(x).square().mean(), parameters)

    solve = TOOLS[tool]
    for _ in range(2):
        gradient()
    before = _peak()
    kernel = solve(model, x)
    memory = _peak(reset=False) - before
    costs = [in_gradients(gradient, lambda: solve(model, x), _GRADIENTS).cost for _ in range(runs)]
    # Compare with our kernel in float64: a full Jacobian of 4096 samples would not fit into memory.
    exact = kernel if tool == "float64" else empirical_ntk(model, x, dtype=torch.float64).kernel
    return {"costs": costs, "memory": memory, "difference": float((kernel - exact).norm() / exact.norm())}


def _peak(reset: bool = True) -> float:
    """The most megabytes since the last reset; Linux only."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def scaling_table(runs: int) -> Table:
    """How the cost in G depends on the width and on the number of samples."""
    table = Table(title="WN MLP 784-m-m-1, float32: cost in G", title_justify="left")
    samples = (256, 512, 1024, 2048)
    table.add_column("width m")
    for n in samples:
        table.add_column(f"n = {n}", justify="right")
    for width in (256, 512, 1024, 2048):
        row = []
        for n in samples:
            model, x = Case(lambda width=width: mlp((784, width, width, 1)), (784,), n).subject()
            parameters = list(model.parameters())
            gradient = _gradient_of(model, x, parameters)
            ours(torch.float32, model, x)
            costs = [
                in_gradients(gradient, lambda m=model, x=x: ours(torch.float32, m, x), _GRADIENTS).cost
                for _ in range(runs)
            ]
            row.append(f"{statistics.median(costs):.2f} G")
        table.add_row(str(width), *row)
    return table


def outputs_table() -> Table:
    """The cost in G against the number of outputs, with the directions that the callback chooses."""
    table = Table(title="WN MLP 784-256-256-k, 128 of 512 samples, batches of 64", title_justify="left")
    for header in ("outputs k", "directions", "float32", "in float64 again", "error of the trace"):
        table.add_column(header, justify="right")
    for k in (1, 10, 100, 1000, 10_000, 50_000):
        model, x = Case(lambda k=k: mlp((784, 256, 256, k)), (784,)).subject()
        parameters, batches = list(model.parameters()), x.split(64)
        samples = [SampleBatch.whole(batch) for batch in batches[:2]]
        effort = effort_for_batches(model, samples, outputs="trace", probe=len(x), most=12.0)
        measure = partial(tangent_kernel_of_batches, model, samples, directions=effort.directions)
        gradient = partial(_gradient_in_batches, model, batches, parameters)
        found = [in_gradients(gradient, partial(measure, dtype=d), 2) for d in (torch.float32, torch.float64)]
        kernel = found[1].result
        table.add_row(
            f"{k}",
            "exact" if effort.directions is None else str(effort.directions),
            *(f"{each.cost:.1f} G" for each in found),
            f"{kernel.trace_error / float(kernel.kernel.trace()):.1%}",
        )
    return table


def _gradient_in_batches(model: nn.Module, batches: Sequence[Tensor], parameters: list[nn.Parameter]) -> None:
    for batch in batches:
        torch.autograd.grad(model(batch).square().mean(), parameters)


def _gradient_of(model: nn.Module, x: Tensor, parameters: list[nn.Parameter]) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(model(x).square().mean(), parameters)


def spectrum_table(size: int = 5120) -> Table:
    """λ_min and λ_max of a full kernel against a decomposition."""
    torch.manual_seed(0)
    model = mlp((784, 256, 10))
    kernel = empirical_ntk(model, torch.rand(size // 10, 784), outputs="full", dtype=torch.float64).kernel
    table = Table(title=f"λ_min of a kernel of {len(kernel)} rows", title_justify="left")
    for header in ("method", "seconds", "λ_min"):
        table.add_column(header, justify="left" if header == "method" else "right")
    found: dict[str, float] = {}

    def decompose() -> None:
        found["eigvalsh"] = float(torch.linalg.eigvalsh(kernel)[0])

    def solve() -> None:
        found["Cholesky and Lanczos, with λ_max"] = smallest_eigenvalue(kernel, largest_eigenvalue(kernel))

    for method, action in (("Cholesky and Lanczos, with λ_max", solve), ("eigvalsh", decompose)):
        seconds = timed(action)
        table.add_row(method, f"{seconds:.1f}", f"{found[method]:.6e}")
    return table


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(_measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
