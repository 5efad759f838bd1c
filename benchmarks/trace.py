"""The trace of the loss's Hessian: our cost beside that of Hutchinson's method in PyHessian, at equal error."""

import copy
import math
import statistics

import torch

from benchmarks.hessian import Subject, loss_function
from benchmarks.peers import installed
from benchmarks.results import record
from benchmarks.timing import in_gradients
from lightning_normtheory.hessian import hessian_trace

__all__ = ["measure"]

_PRODUCTS = 30
# Vectors from which the spread of a single one is estimated, to within √(1/(2·60)), 9 %.
_VECTORS = 60
_PACKAGE = "pyhessian"


def measure(name: str, runs: int) -> None:
    """Record both on one network, from several seeds. The spread of our values is the error to be equaled."""
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
    table = f"{name}: tr(∇²L) = {truth.value:.4g} ± {truth.standard_error:.2g}"
    for each in timed:
        record(table, "ours", "cost", each.cost)
    record(table, "ours", "products", _PRODUCTS, "count")
    record(table, "ours", "relative error", error / abs(truth.value), "error")
    record(table, "ours", "stated", stated / abs(truth.value), "error")
    _hutchinson(table, subject, truth.value, error)


def _hutchinson(table: str, subject: Subject, truth: float, error: float) -> None:
    """Record PyHessian's trace with as many vectors as our error takes, from the spread of single ones."""
    release = installed(_PACKAGE)
    if release is None:
        record(table, _PACKAGE, "cost", "not installed")
        return
    from pyhessian import hessian

    row = f"{_PACKAGE} {release}"
    torch.manual_seed(0)
    model = copy.deepcopy(subject.model)

    def run() -> list[float]:
        return hessian(model, loss_function, data=(subject.x, subject.y), cuda=False).trace(maxIter=_VECTORS, tol=0)

    try:
        cost, values = in_gradients(subject.gradient, run)
    except Exception as failure:  # noqa: BLE001  # what a peer cannot do belongs into the table
        record(table, row, "cost", f"{type(failure).__name__}: {str(failure).splitlines()[0][:60]}")
        return
    vectors = math.ceil(statistics.variance(values) / error**2)
    offset = statistics.mean(values) - truth
    wrong = abs(offset) > 4 * statistics.stdev(values) / math.sqrt(len(values))
    record(table, row, "cost", cost / len(values) * vectors)
    record(table, row, "products", vectors, "count")
    record(table, row, "relative error", error / abs(truth), "error")
    record(table, row, "stated", "none" + (f"; another trace, off by {offset / truth:.0%}" if wrong else ""))
