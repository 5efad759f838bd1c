"""Out of memory: in chunks where the samples are independent, else a number that is missing, and never a run."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory, NTKLeastEigenvalue, RSCRatio
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic

from reliability.faults.fault_process import start
from reliability.faults.fault_runs import SAMPLES, Comparison, fit, undisturbed
from reliability.faults.faults_errors import DIAGNOSTICS
from reliability.outcome import Outcome
from support.lit import Classifier, loader

ERRORS: dict[str, Callable[[], Exception]] = {
    "of a device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "of python": lambda: MemoryError(),
    "of the CPU": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 8388608000 bytes. Error code 12 (Cannot allocate memory)"
    ),
}


class Limited:
    """A loss or predictor that fails on larger batches."""

    def __init__(self, most: int, error: Callable[[], Exception], *, loss: bool) -> None:
        self.most, self.error, self.loss = most, error, loss

    def __call__(self, module, batch):
        if len(batch[0]) > self.most:
            raise self.error()
        outputs = module(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1]) if self.loss else outputs


def one_batch():
    return loader(SAMPLES, SAMPLES)


def chunks(folder: Path, ours: Callable, name: str, error: str, most: int, rel: float, net: str = "wn") -> Outcome:
    """As many samples as fit give the number of all at once; if not even one fits, or they depend on each other, none.

    Args:
        rel: how far two computations of the number may be apart.
    """
    check = Comparison()
    limit = "loss" if ours is HessianTopEigenvalue else "predict"
    arguments = {"module": partial(Classifier, net), "data": one_batch}
    limited = Limited(most, ERRORS[error], loss=limit == "loss")
    watched = fit(folder / "watched", [ours(**{limit: limited})], **arguments)
    whole = fit(folder / "whole", [ours(on_error="raise")], **arguments)
    bare = fit(folder / "bare", **arguments)
    check.training(watched, bare)
    check.equal("the epochs in the file", sorted(watched.rows), [0, 1, 2])
    if most and net == "wn":
        for epoch, row in watched.rows.items():
            check.close(f"epoch {epoch}, {name}", row[name], whole.rows[epoch][name], rel)
    else:
        for epoch, row in watched.rows.items():
            check.holds(f"epoch {epoch}, {name} is {row[name]}", math.isnan(row[name]))
        check.reports(watched, " failed and is logged as NaN")
    check.resumed(watched, bare, lambda: [ours(**{limit: limited})], **arguments)
    return check.outcome


def in_one_epoch(folder: Path, diagnostic: type[Diagnostic], error: str) -> Outcome:
    """A diagnostic runs out of memory once, and measures again in the next epoch."""
    check = Comparison()
    reference, bare = undisturbed("bn")
    known, original = DIAGNOSTICS[diagnostic], diagnostic.measure

    def measure(self, view):
        if view.trainer.current_epoch == 1:
            raise ERRORS[error]()
        return original(self, view)

    with mock.patch.object(diagnostic, "measure", measure):
        watched = fit(folder / "watched", [NormTheory()], module=partial(Classifier, "bn"))
    check.training(watched, bare)
    check.holds(f"epoch 1, {known.name} is a number", math.isnan(watched.rows[1][known.name]))
    expected = reference.rows
    expected[1] = {name: value for name, value in expected[1].items() if not name.startswith(known.own)}
    check.rows(watched.rows, expected, without=known.memory)
    check.reports(watched, f"normtheory/{known.name} failed")
    check.resumed(watched, bare, lambda: [NormTheory()], module=partial(Classifier, "bn"))
    return check.outcome


def at_the_start(folder: Path, error: str) -> Outcome:
    """Nothing fits, from the first trial on: no mistake of the set-up, and no number."""
    check = Comparison()
    watched = fit(folder / "watched", [RSCRatio(predict=Limited(0, ERRORS[error], loss=False))])
    bare = fit(folder / "bare")
    check.training(watched, bare)
    check.equal("R of each epoch", [str(row["rsc_ratio"]) for row in watched.rows.values()], ["nan"] * 3)
    check.reports(watched, "normtheory/rsc_ratio failed")
    return check.outcome


def real(folder: Path) -> Outcome:
    """A process that the system gives too little memory for the Hessian of a wide network, and enough to train it."""
    check = Comparison()
    # What is freed goes back to the system: kept by the allocator, it would serve for the Hessian.
    process = start(folder, {"task": "memory"}, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    _, errors = process.communicate(timeout=300)
    check.equal(f"how the process ended ({errors[-300:]})", process.returncode, 0)
    if check.differences:
        return check.outcome
    found = json.loads((folder / "result.json").read_text())
    check.equal("the weights at the end", found["watched"], found["bare"])
    check.equal("λ_max is a number, by epoch", found["finite"], [True, False, False])
    check.equal("w_min is a number, by epoch", found["others"], [True, True, True])
    check.equal("the failures reported", found["reports"], 1)
    return check.outcome


CASES: dict[str, Callable[[Path], Outcome]] = {
    **{
        f"memory {error}: {most} of 24 samples fit, {ours.__name__}": partial(
            chunks, ours=ours, name=name, error=error, most=most, rel=rel
        )
        # A sum of 24 products in another order; power iterations that end within 1e-2 of each other's residual.
        for ours, name, rel in (
            (NTKLeastEigenvalue, "ntk_lambda_max", 1e-5),
            (HessianTopEigenvalue, "hessian_lambda_max", 1e-2),
        )
        for error, most in (
            ("of a device", 12),
            ("of python", 5),
            ("of the CPU", 5),
            ("of the CPU", 2),
            ("of python", 0),
        )
    },
    "memory of the CPU: 12 of 24 samples fit, batch statistics": partial(
        chunks, ours=HessianTopEigenvalue, name="hessian_lambda_max", error="of the CPU", most=12, rel=0.0, net="bn"
    ),
    **{
        f"memory {error}: {diagnostic.title} in epoch 1": partial(in_one_epoch, diagnostic=diagnostic, error=error)
        for diagnostic, error in zip(DIAGNOSTICS, 3 * list(ERRORS))
    },
    **{f"memory {error}: nothing fits from the start": partial(at_the_start, error=error) for error in ERRORS},
    "memory of the process is limited by the system": real,
}
