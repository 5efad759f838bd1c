"""Metrics of `RSCRatio`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="RSCRatio")

METRICS = (
    _metric("loss", "L", "mean loss on the probe, dropout off", "loss", extreme="min", tex="loss $L$ on the probe"),
    _metric(
        "rsc_ratio",
        "R",
        "ratio ‖∇L‖²/L of restricted strong convexity, on the probe",
        "rsc",
        extreme="min",
        column=True,
        row="R = ‖∇L‖²/L",
        tex=r"$R = \|\nabla L\|^2 / L$",
    ),
    _metric("grad_norm_sq", "‖∇L‖²", "squared norm of the loss gradient", "gradient", extreme="min"),
    _metric(
        "mean_predictor_grad_norm_sq",
        "‖ḡ‖²",
        "squared norm of the mean gradient of the outputs over the probe",
        "mean_gradient",
        extreme="min",
        column=True,
    ),
    _metric("loss_ratio", "L_t/L_{t−1}", "loss divided by the loss measured before", "loss_ratio", extreme="max"),
)
