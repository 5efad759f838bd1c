"""`NormTheory`: every diagnostic in one callback."""

from typing import Any

from lightning_normtheory.callbacks.batchnorm_theory import BatchNormTheoryDiagnostic
from lightning_normtheory.callbacks.convergence_certificate import ConvergenceCertificateDiagnostic
from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.hessian_top_eigenvalue import (
    EdgeOfStabilityDiagnostic,
    HessianTopEigenvalueDiagnostic,
    hessian_settings,
)
from lightning_normtheory.callbacks.hessian_trace import HessianTraceDiagnostic
from lightning_normtheory.callbacks.linearity import DisplacementDiagnostic, LinearityDiagnostic
from lightning_normtheory.callbacks.min_weight_norm import MinWeightNormDiagnostic
from lightning_normtheory.callbacks.ntk_least_eigenvalue import NTKLeastEigenvalueDiagnostic, ntk_settings
from lightning_normtheory.callbacks.progressive_bound import ProgressiveBoundDiagnostic
from lightning_normtheory.callbacks.rademacher_bound import RademacherBoundDiagnostic
from lightning_normtheory.callbacks.rsc_ratio import RSCRatioDiagnostic
from lightning_normtheory.callbacks.theorem_verdicts import TheoremVerdictsDiagnostic
from lightning_normtheory.callbacks.weightnorm_theory import WeightNormTheoryDiagnostic
from lightning_normtheory.hessian.eigenvalues import Method
from lightning_normtheory.hessian.operator import Memory
from lightning_normtheory.ntk.result import Outputs

__all__ = ["NormTheory"]

# The names of the diagnostics' arguments here, for messages.
_NAMES = {
    "method": "hessian_method",
    "tol": "hessian_tol",
    "samples": "ntk_samples",
    "outputs": "ntk_outputs",
    "directions": "ntk_directions",
}
# Derivatives on a few samples are measured in every n-th measurement only, so that they hardly cost anything.
_FEW_SAMPLES = 16
# Nobody has asked for these in particular.
_EXTRAS = frozenset(
    {
        "rsc_ratio_train",
        "grad_norm_sq_train",
        "mean_predictor_grad_norm_sq_train",
        "hessian_lambda_max_lower",
        "hessian_lambda_max_upper",
        "progressive_error_bound",
    }
)


class NormTheory(DiagnosticCallback):
    """Logs everything that `MinWeightNorm`, `RSCRatio`, `HessianTopEigenvalue`, `NTKLeastEigenvalue`, `Linearity`,
    `WeightNormTheory`, `BatchNormTheory`, `RademacherBound`, `ProgressiveBound` and `ConvergenceCertificate` log, on
    request also the trace of `HessianTrace`; shared quantities are computed once. Derivatives on a few samples
    (`Linearity`) are measured in every 16th measurement, from the first on, second ones of models with up to four
    million parameters.

    A diagnostic that does not apply to the model (the weight norms of a model without normalized layers) is left out
    with a warning at fit start. The arguments that are not listed are those of `DiagnosticCallback`.

    Args:
        hessian_method: ``"lanczos"``, which needs fewer products, or ``"power"`` iteration, which stores fewer vectors,
            as in `HessianTopEigenvalue`.
        hessian_tol: the relative residual at which it stops.
        max_hvps: the largest number of Hessian-vector products.
        memory: ``"high"`` keeps the graph of the probe's gradient for all products if it needs about as much memory as
            a training step; else, and with ``"low"``, it is built again for each, batch by batch.
        trace_hvps: the number of Hessian-vector products for the trace of the Hessian, as in `HessianTrace`; 0: not
            measured.
        ntk_samples: the number of samples of the probe for the tangent kernel, as in `NTKLeastEigenvalue`.
        ntk_outputs: the kernel of all outputs, ``"full"``, its average ``"trace"``, or that of their ``"sum"``.
        ntk_directions: the number of random directions over the outputs; ``None``: chosen by the cost.
        delta: the probability that the generalization bound fails, as in `RademacherBound`; likewise that of
            `ProgressiveBound`; also δ of DGM's theorems.
        x_norm: a norm that no input exceeds; ``None``: the largest on the probe.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[NormTheory()], logger=False)
    """

    _silent = _EXTRAS

    def __init__(
        self,
        *args: Any,
        hessian_method: Method = "lanczos",
        hessian_tol: float = 1e-2,
        max_hvps: int = 100,
        memory: Memory = "high",
        trace_hvps: int = 0,
        ntk_samples: int = 128,
        ntk_outputs: Outputs = "trace",
        ntk_directions: int | None = None,
        delta: float = 0.05,
        x_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._hessian: dict[str, Any] = {
            "method": hessian_method,
            "tol": hessian_tol,
            "max_hvps": max_hvps,
            "memory": memory,
        }
        self.trace_hvps = trace_hvps
        self._ntk: dict[str, Any] = {"samples": ntk_samples, "outputs": ntk_outputs, "directions": ntk_directions}
        self._rademacher: dict[str, Any] = {"delta": delta, "x_norm": x_norm}
        super().__init__(*args, **kwargs)

    def make_diagnostics(self) -> list[Diagnostic]:
        kernel, distance = NTKLeastEigenvalueDiagnostic(**self._ntk, names=_NAMES), DisplacementDiagnostic()
        return [
            MinWeightNormDiagnostic(),
            EdgeOfStabilityDiagnostic(),
            HessianTopEigenvalueDiagnostic(**self._hessian, names=_NAMES),
            *([HessianTraceDiagnostic(self.trace_hvps, memory=self._hessian["memory"])] if self.trace_hvps else []),
            RSCRatioDiagnostic(),  # after the Hessian, whose graph also gives the gradients
            kernel,
            distance,
            LinearityDiagnostic(kernel, distance, every=_FEW_SAMPLES),
            BatchNormTheoryDiagnostic(),
            WeightNormTheoryDiagnostic(self._ntk["samples"], self._rademacher["delta"]),
            RademacherBoundDiagnostic(**self._rademacher),
            ProgressiveBoundDiagnostic(self._rademacher["delta"], alone=False),
            ConvergenceCertificateDiagnostic(self._ntk["samples"]),
            TheoremVerdictsDiagnostic(self._ntk["samples"], self._rademacher["delta"]),
        ]

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            **hessian_settings(self._hessian),
            "trace_hvps": self.trace_hvps,
            **ntk_settings(self._ntk),
            **self._rademacher,
        }
