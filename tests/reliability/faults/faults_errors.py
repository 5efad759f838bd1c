"""Exceptions in our own code: in a diagnostic, in what it has for file and checkpoint, in displays."""

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytorch_lightning as pl

from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.callbacks.batchnorm_theory import BatchNormTheoryDiagnostic
from lightning_normtheory.callbacks.convergence_certificate import ConvergenceCertificateDiagnostic
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.hessian_top_eigenvalue import HessianTopEigenvalueDiagnostic
from lightning_normtheory.callbacks.min_weight_norm import MinWeightNormDiagnostic
from lightning_normtheory.callbacks.ntk_least_eigenvalue import NTKLeastEigenvalueDiagnostic
from lightning_normtheory.callbacks.output import fit_end, progress_bar
from lightning_normtheory.callbacks.progressive_bound import ProgressiveBoundDiagnostic
from lightning_normtheory.callbacks.rademacher_bound import RademacherBoundDiagnostic
from lightning_normtheory.callbacks.rsc_ratio import RSCRatioDiagnostic

from reliability.faults.fault_runs import Comparison, Rows, Run, fit, undisturbed
from reliability.outcome import Outcome
from support.lit import Classifier

MODULE = partial(Classifier, "bn")


class OnPurposeError(RuntimeError):
    def __init__(self) -> None:
        super().__init__("on purpose")


def fail(*args: Any, **kwargs: Any) -> Any:
    raise OnPurposeError


class Known(NamedTuple):
    """A diagnostic.

    Attributes:
        name: a metric that it always has.
        own: how the names of its metrics begin.
        memory: those that compare with the measurement before.
    """

    name: str
    own: tuple[str, ...]
    memory: tuple[str, ...] = ()


# Not 2/η, which needs no Hessian.
CURVATURE = (
    "hessian_lambda_max",
    "hessian_rayleigh_train",
    "hessian_edge_distance",
    "hessian_stability_limit_distance",
)
CONDITION = ("rsc_kappa", "rsc_alpha", "rsc_threshold", "rsc_margin")
DIAGNOSTICS: dict[type[Diagnostic], Known] = {
    MinWeightNormDiagnostic: Known("min_weight_norm", ("min_weight_norm", "layers/weight_norm")),
    RSCRatioDiagnostic: Known(
        "rsc_ratio", ("rsc_ratio", "loss", "grad_norm_sq", "mean_predictor_grad_norm_sq"), ("loss_ratio",)
    ),
    HessianTopEigenvalueDiagnostic: Known("hessian_lambda_max", CURVATURE, CURVATURE),
    NTKLeastEigenvalueDiagnostic: Known(
        "ntk_lambda_min", ("ntk", "layers/ntk", "linearity_hessian_to_kernel"), ("ntk_change",)
    ),
    BatchNormTheoryDiagnostic: Known("batchnorm_epsilon", ("batchnorm", "layers/batchnorm")),
    RademacherBoundDiagnostic: Known("rademacher_bound", ("rademacher", "generalization", "population")),
    ProgressiveBoundDiagnostic: Known("progressive_error_bound", ("progressive",)),
    ConvergenceCertificateDiagnostic: Known(
        "certificate_rate_measured", ("certificate", "rho", *CONDITION), ("certificate_rate", "rho")
    ),
}


def in_epochs(original: Callable, epochs: tuple[int, ...]) -> Callable:
    """A `measure` that fails in some epochs."""

    def measure(self: Diagnostic, view: Any) -> dict[str, float]:
        return fail() if view.trainer.current_epoch in epochs else original(self, view)

    return measure


def with_fault(folder: Path, fault: contextlib.AbstractContextManager) -> tuple[Comparison, Run, Rows, Run]:
    """A run with a fault that does not concern the user: training as in the bare run without the fault.

    Returns:
        The comparison, the run, what an undisturbed one measures, and the bare run.
    """
    check = Comparison()
    reference, bare = undisturbed("bn")
    with fault:
        watched = fit(folder, [NormTheory()], module=MODULE)
    check.training(watched, bare)
    return check, watched, reference.rows, bare


def failing_measure(folder: Path, diagnostic: type[Diagnostic], epochs: tuple[int, ...]) -> Outcome:
    known = DIAGNOSTICS[diagnostic]
    fault = mock.patch.object(diagnostic, "measure", in_epochs(diagnostic.measure, epochs))
    check, watched, expected, bare = with_fault(folder / "watched", fault)
    rows = watched.rows
    for epoch in epochs:
        own = {name: value for name, value in rows[epoch].items() if name.startswith(known.own)}
        check.holds(f"epoch {epoch} has no {known.name}", known.name in own)
        check.holds(f"epoch {epoch} has numbers of what failed: {own}", all(map(math.isnan, own.values())))
        if epoch - 1 not in (*epochs, -1):
            before = {name for name in expected[epoch] if name.startswith(known.own)}
            check.equal(f"the names of epoch {epoch} that are missing", before - {*own}, set())
        expected[epoch] = {k: v for k, v in expected[epoch].items() if not k.startswith(known.own)}
    check.rows(rows, expected, without=known.memory)
    check.reports(watched, "on purpose")
    check.resumed(watched, bare, lambda: [NormTheory()], module=MODULE)
    return check.outcome


def failing_start(folder: Path, diagnostic: type[Diagnostic]) -> Outcome:
    # Once: a diagnostic that has not started may start when it first measures.
    failures, original = iter([OnPurposeError()]), diagnostic.start

    def start(self: Diagnostic, view: Any) -> None:
        for failure in failures:
            raise failure
        original(self, view)

    check, watched, expected, bare = with_fault(folder / "watched", mock.patch.object(diagnostic, "start", start))
    check.rows(watched.rows, expected, without=DIAGNOSTICS[diagnostic].memory)
    check.reports(watched, "on purpose")
    check.resumed(watched, bare, lambda: [NormTheory()], module=MODULE)
    return check.outcome


def failing_hook(folder: Path, diagnostic: type[Diagnostic], hook: str) -> Outcome:
    """`notes` for the file, `state_dict` for the checkpoint: neither the file, the checkpoint nor the run is lost."""
    reference, bare = undisturbed("bn")
    with mock.patch.object(diagnostic, hook, fail):
        check = Comparison()
        save = pl.callbacks.ModelCheckpoint(folder, save_last=True)
        arguments = {"module": MODULE, "enable_checkpointing": True}
        watched = fit(folder / "watched", [NormTheory()], users=[save], **arguments)
        check.training(watched, bare)
        check.rows(watched.rows, reference.rows)
        check.reports(watched, "on purpose")
        check.holds("there is no last.ckpt", (folder / "last.ckpt").exists())
        watched.save()
    check.resumed(watched, bare, lambda: [NormTheory()], module=MODULE)
    return check.outcome


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """A display from the first moment on, to nowhere."""
    with (
        mock.patch.object(progress_bar, "_PATIENCE", -1.0),
        mock.patch.object(progress_bar, "_PAUSE", -1.0),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield


def failing_display(folder: Path, method: str) -> Outcome:
    check = Comparison()
    reference, bare = undisturbed("bn")
    terminal = mock.patch.object(progress_bar, "_can_redraw", return_value=True)
    with impatient(), terminal, mock.patch.object(progress_bar._TqdmLine, method, fail):
        users = [pl.callbacks.TQDMProgressBar()]
        arguments = {"module": MODULE, "enable_progress_bar": True}
        watched = fit(folder / "watched", [NormTheory()], users=users, **arguments)
    check.training(watched, bare)
    check.rows(watched.rows, reference.rows)
    check.reports(watched, "on purpose")
    return check.outcome


def failing_end(folder: Path, function: str) -> Outcome:
    fault = mock.patch.object(fit_end, function, fail)
    check, watched, expected, bare = with_fault(folder / "watched", fault)
    check.rows(watched.rows, expected)
    check.reports(watched, "on purpose")
    check.resumed(watched, bare, lambda: [NormTheory()], module=MODULE)
    return check.outcome


CASES: dict[str, Callable[[Path], Outcome]] = {
    **{
        f"{diagnostic.title}: measure fails in {'all epochs' if len(epochs) > 1 else f'epoch {epochs[0]}'}": partial(
            failing_measure, diagnostic=diagnostic, epochs=epochs
        )
        for diagnostic in DIAGNOSTICS
        for epochs in ((1,), (0, 1, 2))
    },
    **{f"{each.title}: start fails": partial(failing_start, diagnostic=each) for each in DIAGNOSTICS},
    **{
        f"{each.title}: state_dict fails": partial(failing_hook, diagnostic=each, hook="state_dict")
        for each in (RSCRatioDiagnostic, NTKLeastEigenvalueDiagnostic)
    },
    "certificate: notes fails": partial(failing_hook, diagnostic=ConvergenceCertificateDiagnostic, hook="notes"),
    **{
        f"progress display: {method} fails": partial(failing_display, method=method)
        for method in ("__init__", "draw", "close")
    },
    "end table fails": partial(failing_end, function="end_table"),
    "end table cannot be printed": partial(failing_end, function="show"),
}
