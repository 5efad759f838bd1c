"""`RSCRatio`: the ratio ‖∇L‖²/L of restricted strong convexity."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.cost import FORWARD, Sizes
from lightning_normtheory.callbacks.engine.diagnostic import LOSS_SETTINGS, Diagnostic
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.rsc import why_no_ratio

__all__ = ["RSCRatio"]


class RSCRatioDiagnostic(Diagnostic):
    """R, its parts, ‖ḡ‖², and the loss relative to the previous measurement."""

    title = "restricted strong convexity"
    key = "rsc_ratio"
    metrics = (key, "loss", "grad_norm_sq", "mean_predictor_grad_norm_sq", "loss_ratio")
    shared = ("rsc",)
    since_start = ("loss_ratio",)

    def __init__(self) -> None:
        self._last_loss: float | None = None

    def start_cost(self, sizes: Sizes) -> float:
        return FORWARD

    def start(self, measurement: Measurement) -> None:
        self._last_loss = measurement.loss

    def measure(self, measurement: Measurement) -> dict[str, float]:
        rsc = measurement.rsc
        metrics = {
            "rsc_ratio": rsc.ratio,
            "loss": rsc.loss,
            "grad_norm_sq": rsc.grad_norm_sq,
        }
        reasons = {"rsc_ratio": why_no_ratio(rsc.loss)}
        if not measurement.function.findings.outputs_problem:
            metrics["mean_predictor_grad_norm_sq"] = rsc.mean_predictor_grad_norm_sq
            reasons["mean_predictor_grad_norm_sq"] = measurement.outputs_failure
        if self._last_loss is not None:
            defined = self._last_loss > 0 and rsc.loss >= 0
            metrics["loss_ratio"] = rsc.loss / self._last_loss if defined else math.nan
            reasons["loss_ratio"] = why_no_ratio(rsc.loss, self._last_loss)
        self.reasons = {name: why for name, why in reasons.items() if why and math.isnan(metrics[name])}
        self._last_loss = rsc.loss
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"last_loss": self._last_loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_loss = state.get("last_loss")

    def forget(self, changed: Collection[str]) -> str:
        if self._last_loss is None or not LOSS_SETTINGS & set(changed):
            return ""
        self._last_loss = None
        return "the previous loss, for loss_ratio,"


class RSCRatio(DiagnosticCallback):
    """Logs R(θ) = ‖∇L‖²/L (WN, Lemma 5.1) and ‖ḡ‖² (RSC, Theorem 5.1) on the probe, for any model.

    Logged after every n-th epoch or step:

    * ``normtheory/rsc_ratio``: R = ‖∇L‖²/L;
    * ``normtheory/loss``: L, the mean loss of the probe, with dropout off;
    * ``normtheory/grad_norm_sq``: ‖∇L‖² over the trainable parameters;
    * ``normtheory/mean_predictor_grad_norm_sq``: ‖ḡ‖², ḡ = (1/(nk)) Σ_i Σ_h ∇f_h(x_i);
    * ``normtheory/loss_ratio``: L divided by the L of the previous measurement, at first that before training; with an
      iterable dataset, that before the step of the batch that completes the probe;
    * ``normtheory/seconds``: the time of the measurement.

    L is the loss of the module's own `training_step`, so R scales with it: the papers' square loss sums over outputs
    where `torch.nn.MSELoss` averages. Where the loss is not positive, as SI-SDR, an ELBO or a cosine can be, R and the
    ratio of losses are NaN; ‖∇L‖² is defined everywhere.

    Raises:
        ValueError: at fit start, if ``loss=`` or ``predict=`` fails on a batch, or the loader is empty.

    The arguments are those of `DiagnosticCallback`.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[RSCRatio(probe=256, every_n_epochs=5)], logger=False)
    """

    diagnostics = (RSCRatioDiagnostic,)
