"""All metrics that the callbacks log. Each is declared once, in `lightning_normtheory.record.catalog`."""

import math
import re
from collections.abc import Mapping
from functools import cache

from lightning_normtheory.record.catalog import (
    batchnorm,
    certificate,
    common,
    generalization,
    hessian,
    linearity,
    ntk,
    rsc,
    weight_norm,
    weightnorm,
)
from lightning_normtheory.record.metric_info import MetricInfo, Role

__all__ = ["METRICS", "MetricInfo", "Role", "find_error", "find_metric", "standard_error"]

# Tables and legends follow this order.
_CATALOG = (common, weight_norm, rsc, certificate, hessian, ntk, linearity, weightnorm, batchnorm, generalization)
METRICS: tuple[MetricInfo, ...] = tuple(metric for module in _CATALOG for metric in module.METRICS)


@cache
def find_metric(name: str) -> MetricInfo:
    """Return the declaration that a name without prefix matches.

    Args:
        name: such as ``hessian_edge__head`` or ``layers/weight_norm__net_0``. For an unknown name the result is a
            declaration whose symbol is the name.

    Example:
        >>> find_metric("hessian_lambda_max").symbol, find_metric("layers/weight_norm__net_0").name
        ('λ_max', 'layers/weight_norm__*')
        >>> find_metric("something_else").symbol
        'something_else'
    """
    for metric in METRICS:
        if re.fullmatch(re.escape(metric.name).replace(r"\*", ".+"), name):
            return metric
    return MetricInfo(name, name, "", "")


@cache
def find_error(name: str) -> tuple[str, MetricInfo] | None:
    """Return the name of the metric that is the error of another one, and its declaration.

    Args:
        name: of the other one, without prefix.

    Example:
        >>> found = find_error("layers/hessian_trace__net_0")
        >>> found[0], found[1].band
        ('layers/hessian_trace_error__net_0', 2.0)
        >>> find_error("loss") is None
        True
    """
    of = find_metric(name).name
    which = name.removeprefix(of.removesuffix("*"))
    for metric in METRICS:
        if metric.error_of == of:
            return metric.name.replace("*", which), metric
    return None


def standard_error(name: str, row: Mapping[str, float]) -> float:
    """Return the standard error of a metric among the metrics of its row; NaN if it has none.

    Example:
        >>> standard_error("hessian_trace", {"hessian_trace": 2.0, "hessian_trace_error": 0.5})
        0.5
    """
    found = find_error(name)
    return row.get(found[0], math.nan) if found and found[1].error_kind == "standard" else math.nan
