"""Metrics of `RSCRatio`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="RSCRatio")
_keep_min = partial(_metric, extreme="min")
_keep_max = partial(_metric, extreme="max")

METRICS = (
    _keep_min("loss", "L", "mean loss on the probe, dropout off", "loss", tex="loss $L$ on the probe"),
    _keep_min(
        "rsc_ratio",
        "R",
        "ratio ‖∇L‖²/L of restricted strong convexity, on the probe",
        "rsc",
        column=True,
        row="R = ‖∇L‖²/L",
        tex=r"$R = \|\nabla L\|^2 / L$",
    ),
    _keep_min("grad_norm_sq", "‖∇L‖²", "squared norm of the loss gradient", "gradient"),
    _keep_min(
        "mean_predictor_grad_norm_sq",
        "‖ḡ‖²",
        "squared norm of the mean gradient of the outputs over the probe",
        "mean_gradient",
        column=True,
    ),
    _keep_max("loss_ratio", "L_t/L_{t−1}", "loss divided by the loss measured before", "loss_ratio"),
)
