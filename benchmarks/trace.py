"""The trace of the loss's Hessian: our cost beside that of Hutchinson's method in PyHessian, at equal error."""

import copy
import math
import statistics

import torch
from rich.table import Table

from benchmarks.hessian import Subject, loss_function
from benchmarks.peers import installed
from benchmarks.timing import in_gradients
from lightning_normtheory.hessian import hessian_trace

__all__ = ["table"]

_PRODUCTS = 30
# Vectors from which the spread of a single one is estimated, to within √(1/(2·60)), 9 %.
_VECTORS = 60
_PACKAGE = "pyhessian"


def table(name: str, runs: int) -> Table:
    """Both on one network, from several seeds. The spread of our values over the seeds is the error to be equaled."""
    subject = Subject(name, 0)
    batches = [(subject.x, subject.y)]
    truth = hessian_trace(
        copy.deepcopy(subject.model).double(), loss_function, [(subject.x.double(), subject.y)], hvps=300
    )
    timed = [
        in_gradients(
            subject.gradient, lambda seed=seed: hessian_trace(subject.model, loss_function, batches, seed=seed)
        )
        for seed in range(runs)
    ]
    error = math.sqrt(statistics.mean((each.result.value - truth.value) ** 2 for each in timed))
    stated = math.sqrt(statistics.mean(each.result.standard_error**2 for each in timed))
    title = f"{name}: tr(∇²L) = {truth.value:.4g} ± {truth.standard_error:.2g}"
    found = Table(title=title, title_justify="left")
    for header in ("tool", "cost", "products", "relative error", "stated", ""):
        found.add_column(header, justify="left" if header in ("tool", "") else "right")
    cost = statistics.median(each.cost for each in timed)
    relative = f"{error / abs(truth.value):.1e}"
    found.add_row("ours", f"{cost:.1f} G", f"{_PRODUCTS}", relative, f"{stated / abs(truth.value):.1e}", "")
    found.add_row(*_hutchinson(subject, truth.value, error))
    return found


def _hutchinson(subject: Subject, truth: float, error: float) -> tuple[str, ...]:
    """PyHessian's trace with as many vectors as our error takes, from the spread of single ones."""
    release = installed(_PACKAGE)
    if release is None:
        return _PACKAGE, "–", "–", "–", "–", "not installed"
    from pyhessian import hessian

    torch.manual_seed(0)
    model = copy.deepcopy(subject.model)

    def run() -> list[float]:
        return hessian(model, loss_function, data=(subject.x, subject.y), cuda=False).trace(maxIter=_VECTORS, tol=0)

    try:
        cost, values = in_gradients(subject.gradient, run)
    except Exception as failure:  # noqa: BLE001  # what a peer cannot do belongs into the table
        return _PACKAGE, "–", "–", "–", "–", f"{release}: {type(failure).__name__}: {str(failure).splitlines()[0][:60]}"
    vectors = math.ceil(statistics.variance(values) / error**2)
    offset = statistics.mean(values) - truth
    wrong = abs(offset) > 4 * statistics.stdev(values) / math.sqrt(len(values))
    note = f"{release}; from {_VECTORS} vectors" + (f"; another trace, off by {offset / truth:.0%}" if wrong else "")
    return _PACKAGE, f"{cost / len(values) * vectors:.0f} G", f"{vectors}", f"{error / abs(truth):.1e}", "none", note
