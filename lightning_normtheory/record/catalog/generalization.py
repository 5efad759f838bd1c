"""Metrics of `RademacherBound`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="RademacherBound")
_keep_min = partial(_metric, extreme="min")
_keep_max = partial(_metric, extreme="max")
_upper = partial(_keep_min, role="upper")

METRICS = (
    _keep_max("generalization_gap", "gap", "measured validation loss − training loss", "gap", row="generalization gap"),
    _upper("generalization_bound", "bound", "bound on the gap, with probability 1 − δ", "gap"),
    _upper(
        "generalization_bound_fixed_radii", "bound, fixed radii", "that bound for norms fixed before training", "gap"
    ),
    _keep_min(
        "generalization_bound_vacuous",
        "bound vacuous",
        "1 if the bound is no better than a zero network",
        "vacuous",
        kind="flag",
    ),
    _keep_min("generalization_validation_loss", "validation loss", "loss on as many validation samples", "population"),
    _keep_min("generalization_train_loss", "training loss", "loss on the probe, in evaluation mode", "population"),
    _upper("population_loss_bound", "L + bound", "bound on the expected loss, with probability 1 − δ", "population"),
    _upper(
        "rademacher_bound",
        "Rademacher",
        "bound on the Rademacher complexity of networks with these norms",
        "rademacher",
        row="Rademacher bound",
    ),
    _keep_max("rademacher_x_norm", "max ‖x‖", "largest input norm that the bound holds for", "input_norm"),
)
