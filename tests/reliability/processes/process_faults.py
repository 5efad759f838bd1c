"""One process fails, in every diagnostic, at every place; the others must neither wait nor end."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch

from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.callbacks.batchnorm_theory import BatchNormTheoryDiagnostic
from lightning_normtheory.callbacks.convergence_certificate import ConvergenceCertificateDiagnostic
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.hessian_top_eigenvalue import HessianTopEigenvalueDiagnostic
from lightning_normtheory.callbacks.measurement import measurement
from lightning_normtheory.callbacks.min_weight_norm import MinWeightNormDiagnostic
from lightning_normtheory.callbacks.ntk_least_eigenvalue import NTKLeastEigenvalueDiagnostic
from lightning_normtheory.callbacks.rademacher_bound import RademacherBoundDiagnostic
from lightning_normtheory.callbacks.rsc_ratio import RSCRatioDiagnostic
from lightning_normtheory.measuring.progress import listening

from reliability.outcome import Outcome
from reliability.processes.process_cases import BATCH, SAMPLES, Still, data, strategy
from support.lit import rows, trainer

MAIN: dict[type[Diagnostic], str] = {
    MinWeightNormDiagnostic: "min_weight_norm",
    RSCRatioDiagnostic: "rsc_ratio",
    HessianTopEigenvalueDiagnostic: "hessian_lambda_max",
    NTKLeastEigenvalueDiagnostic: "ntk_lambda_min",
    RademacherBoundDiagnostic: "rademacher_bound",
    ConvergenceCertificateDiagnostic: "certificate_rate_measured",
}
BATCH_NORM_MAIN = {**MAIN, BatchNormTheoryDiagnostic: "batchnorm_epsilon"}
# A step that has not enough memory is taken again with less at once, so that the number is there.
RECOVERS = (RSCRatioDiagnostic, HessianTopEigenvalueDiagnostic, NTKLeastEigenvalueDiagnostic)


@dataclass
class Fault:
    """What goes wrong in one epoch.

    Attributes:
        diagnostic: where it goes wrong.
        place: ``"before"`` or ``"after"`` its measurement, or at a tick, by its number.
        error: what is raised.
        rank: in which process.
    """

    diagnostic: type[Diagnostic]
    place: str | int
    error: type[Exception]
    rank: int

    def __str__(self) -> str:
        return f"{self.error.__name__} in {self.diagnostic.__name__}, {self.place}, process {self.rank}"


class Saboteur(pl.Callback):
    """Lets the fault of each epoch happen; the first and the last epoch have none."""

    def __init__(self, faults: list[Fault]):
        self._faults: list[Fault | None] = [None, *faults, None]
        self._now: Fault | None = None
        self._rank = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._now, self._rank = self._faults[trainer.current_epoch], trainer.global_rank

    def around(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        def sabotaged(diagnostic: Diagnostic, view: Any) -> Any:
            fault = self._now
            if fault is None or fault.rank != self._rank or type(diagnostic) is not fault.diagnostic:
                return measure(diagnostic, view)
            if fault.place == "before":
                raise fault.error("sabotage")
            if fault.place == "after":
                measure(diagnostic, view)
                raise fault.error("sabotage")
            seen = []

            def tick(step: str) -> None:
                seen.append(step)
                if len(seen) == fault.place:
                    raise fault.error("sabotage")

            with listening(tick):
                return measure(diagnostic, view)

        return sabotaged


def faults_of(main: dict[type[Diagnostic], str], devices: int) -> list[Fault]:
    made = []
    for number, diagnostic in enumerate(main):
        places: tuple[str | int, ...] = ("before", "after")
        if diagnostic in RECOVERS:
            # A tick for each batch of a process, of which there are fewer in many processes.
            ticks = -(-SAMPLES // BATCH) // devices if diagnostic is RSCRatioDiagnostic else 3
            places += tuple(range(1, min(ticks, 3) + 1))
        made += [Fault(diagnostic, place, RuntimeError, (number + i) % devices) for i, place in enumerate(places)]
        if diagnostic in RECOVERS:
            made += [Fault(diagnostic, 1, MemoryError, rank) for rank in range(min(devices, 2))]
    return made


def sabotaged(folder: Path, devices: int, net: str, dtype: torch.dtype = torch.float64, **arguments: Any) -> Outcome:
    """A fit with a fault in every epoch: what is not hit is as in the first epoch, what is hit is NaN or as well."""
    main = BATCH_NORM_MAIN if net == "BatchNorm" else MAIN
    faults = faults_of(main, devices)
    saboteur = Saboteur(faults)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"max_epochs": len(faults) + 2, "default_root_dir": folder, **strategy(devices), **arguments}
        fit = trainer([saboteur, NormTheory(ntk_samples=20, hessian_tol=1e-7)], **options)
        patches = [patch.object(each, "measure", saboteur.around(each.measure)) for each in main]
        # R has passes of its own here, in which faults can happen.
        patches.append(patch.object(measurement, "sums_of_whole_batches", lambda *_, **__: None))
        for each in patches:
            each.start()
        try:
            fit.fit(Still(net).to(dtype), data(dtype=dtype))
        finally:
            for each in patches:
                each.stop()
    return _judged(rows(folder), faults, main, 1e-6 if dtype == torch.float64 else 1e-4)


def _judged(
    measured: dict[int, dict[str, float]], faults: list[Fault], main: dict[type[Diagnostic], str], tolerance: float
) -> Outcome:
    found = []
    if sorted(measured) != list(range(len(faults) + 2)):
        found.append(f"epochs {sorted(measured)}")
    for epoch, fault in enumerate(faults, 1):
        for diagnostic, name in main.items():
            value, usual = (measured.get(e, {}).get(f"normtheory/{name}", math.nan) for e in (epoch, 0))
            hit = fault.diagnostic is diagnostic
            # The batches of a BatchNorm cannot be halved; products need less memory without the graph of the gradient.
            whole = diagnostic is RSCRatioDiagnostic and main is BATCH_NORM_MAIN
            recovers = fault.error is MemoryError and diagnostic in RECOVERS and not whole
            expected = math.nan if hit and not recovers else usual
            if not (value == expected or abs(value - expected) <= tolerance * abs(expected)) and not (
                math.isnan(value) and math.isnan(expected)
            ):
                found.append(f"{fault}: {name} is {value!r}, not {expected!r}")
    last = measured.get(len(faults) + 1, {})
    for name in main.values():
        if not abs(last.get(f"normtheory/{name}", math.nan) - measured[0][f"normtheory/{name}"]) <= tolerance:
            found.append(f"{name} has not recovered")
    return Outcome(len(faults) * len(main), tuple(found))


RUNS = {
    f"{devices} processes, one fails, {net}": (devices, net)
    for devices, net in ((1, "WeightNorm"), (2, "WeightNorm"), (2, "BatchNorm"), (4, "WeightNorm"))
}
PROCESS_FAULTS: dict[str, Callable[[Path], Outcome]] = {
    name: lambda folder, d=devices, n=net: sabotaged(folder, d, n) for name, (devices, net) in RUNS.items()
}


def number_of_faults(name: str) -> int:
    devices, net = RUNS[name]
    return len(faults_of(BATCH_NORM_MAIN if net == "BatchNorm" else MAIN, devices))
