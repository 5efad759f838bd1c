"""Metrics of `MinWeightNorm`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="MinWeightNorm")

METRICS = (
    _metric(
        "min_weight_norm",
        "w_min",
        "smallest norm of a weight vector in a normalized layer",
        "weight_norm",
        extreme="min",
        digits=5,
        column=True,
        row="w_min",
        tex=r"$w_{\min}$",
    ),
    _metric(
        "layers/weight_norm__*", "w_min", "smallest norm of a weight vector in the layer", "layer_norms", extreme="min"
    ),
)
