"""Metrics of `RademacherBound` and `ProgressiveBound`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="RademacherBound")
_keep_min = partial(_metric, extreme="min")
_keep_max = partial(_metric, extreme="max")
_upper = partial(_keep_min, role="upper")
_progressive = partial(MetricInfo, callback="ProgressiveBound")

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
    _progressive(
        "progressive_error_bound",
        "error bound, BN",
        "bound on the test error, averaged over the first pass (BN, Corollary E.3)",
        "progressive",
        role="upper",
        extreme="min",
        row="progressive error bound",
    ),
    _progressive(
        "progressive_error_bound_sharper",
        "error bound, sharper",
        "that bound by a better inequality",
        "progressive",
        role="upper",
        extreme="min",
    ),
    _progressive(
        "progressive_derivative",
        "1 − p_y",
        "average of 1 − exp(−loss) over the batches of the first pass, before training on each",
        "progressive",
        extreme="min",
    ),
    _progressive(
        "progressive_error_vacuous",
        "progressive bound vacuous",
        "1 if both bounds on the error are 1 or more",
        "vacuous",
        kind="flag",
        extreme="min",
    ),
    _progressive(
        "progressive_batches", "fresh batches", "number of batches in the bound", "fresh_batches", kind="count"
    ),
)
