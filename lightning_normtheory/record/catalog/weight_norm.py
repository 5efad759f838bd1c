"""Metrics of `MinWeightNorm`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="MinWeightNorm")
_keep_min = partial(_metric, extreme="min")

METRICS = (
    _keep_min(
        "min_weight_norm",
        "w_min",
        "smallest norm of a weight vector in a normalized layer",
        "weight_norm",
        digits=5,
        column=True,
        row="w_min",
        tex=r"$w_{\min}$",
    ),
    _keep_min("layers/weight_norm__*", "w_min", "smallest norm of a weight vector in the layer", "layer_norms"),
)
