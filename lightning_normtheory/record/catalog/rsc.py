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
    _metric(
        "rsc_ratio_train",
        "R, training set",
        "ratio ‖∇L‖²/L of the whole training set, estimated from the probe without the noise of few samples",
        "rsc",
    ),
    _metric(
        "rsc_ratio_train_error",
        "error of R",
        "standard error of that estimate, by the draw of the probe",
        "sampling_error",
        error_of="rsc_ratio_train",
    ),
    _keep_min("grad_norm_sq", "‖∇L‖²", "squared norm of the loss gradient on the probe", "gradient"),
    _metric(
        "grad_norm_sq_train",
        "‖∇L‖², training set",
        "squared norm of the loss gradient of the whole training set, estimated from the probe",
        "gradient",
    ),
    _metric(
        "grad_norm_sq_train_error",
        "error of ‖∇L‖²",
        "standard error of that estimate",
        "sampling_error",
        error_of="grad_norm_sq_train",
    ),
    _keep_min(
        "mean_predictor_grad_norm_sq",
        "‖ḡ‖²",
        "squared norm of the mean gradient of the outputs over the probe",
        "mean_gradient",
        column=True,
    ),
    _metric(
        "mean_predictor_grad_norm_sq_train",
        "‖ḡ‖², training set",
        "squared norm of the mean gradient of the outputs over the whole training set, estimated from the probe",
        "mean_gradient",
    ),
    _metric(
        "mean_predictor_grad_norm_sq_train_error",
        "error of ‖ḡ‖²",
        "standard error of that",
        "sampling_error",
        error_of="mean_predictor_grad_norm_sq_train",
    ),
    _keep_max("loss_ratio", "L_t/L_{t−1}", "loss divided by the loss measured before", "loss_ratio"),
)
