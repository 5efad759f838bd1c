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

# What is also estimated for the training set, in the order of `RSCTrain`.
_ESTIMATED = ("rsc_ratio", "grad_norm_sq", "mean_predictor_grad_norm_sq")


class RSCRatioDiagnostic(Diagnostic):
    """R, its parts, ‖ḡ‖², and the loss relative to the previous measurement."""

    title = "restricted strong convexity"
    key = "rsc_ratio"
    metrics = (
        key,
        "rsc_ratio_train",
        "rsc_ratio_train_error",
        "loss",
        "grad_norm_sq",
        "grad_norm_sq_train",
        "grad_norm_sq_train_error",
        "mean_predictor_grad_norm_sq",
        "mean_predictor_grad_norm_sq_train",
        "mean_predictor_grad_norm_sq_train_error",
        "loss_ratio",
    )
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
        for name, estimate in zip(_ESTIMATED, measurement.rsc_train or ()):
            if name in metrics:
                metrics[f"{name}_train"], metrics[f"{name}_train_error"] = estimate
                reasons.update({f"{name}_train": reasons.get(name, ""), f"{name}_train_error": reasons.get(name, "")})
        if self._last_loss is not None:
            defined = self._last_loss > 0 and rsc.loss >= 0
            metrics["loss_ratio"] = rsc.loss / self._last_loss if defined else math.nan
            reasons["loss_ratio"] = why_no_ratio(rsc.loss, self._last_loss)
        self.reasons = {name: why for name, why in reasons.items() if why and math.isnan(metrics[name])}
        if measurement.why_no_rsc_train:
            self.reasons |= {f"{name}_train": measurement.why_no_rsc_train for name in _ESTIMATED if name in metrics}
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
    * ``normtheory/rsc_ratio_train``, ``…_error``, ``normtheory/grad_norm_sq_train``, ``…_error``,
      ``normtheory/mean_predictor_grad_norm_sq_train``, ``…_error``: the same with its standard error of the whole
      training set, estimated from the probe (`rsc_ratio_train`). The probe's own values are larger on average: they
      contain the noise of few samples. The errors come from the spread of batches: at least 8 or, where samples are
      independent, parts of batches. Not logged for a probe of one batch that cannot be divided, and under a sampler
      with weights;
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
