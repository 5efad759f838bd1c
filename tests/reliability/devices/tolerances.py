"""How far apart a metric of the CPU and of a device may be: what float32 and the error that is logged with it allow.

Two kernels add the same numbers in another order and round differently: a sum of n numbers by up to n ε of the sum of
their magnitudes. From the inputs to a metric the longest chains here have about 2¹⁰ roundings: some ten layers, sums of
up to 75 terms, six steps of training. So a number may differ by `CHAIN` ε times its magnitude; a difference of two
numbers by `CHAIN` ε times the magnitude of these. The error that is logged with a metric, on each device, is added.
"""

import math
from collections.abc import Callable, Mapping

import torch

__all__ = ["agree"]

CHAIN = 2**10
ROUNDING = CHAIN * torch.finfo(torch.float32).eps

Row = Mapping[str, float]

# Costs, and errors themselves: finite on the device is enough.
FREE = ("seconds", "hvps", "_residual", "_floor", "_error")


def _magnitude(name: str) -> Callable[[str, Row], float]:
    """That of another metric of the same callback."""
    return lambda metric, row: abs(row.get(_beside(metric, name), 0.0) or 0.0)


def _one(metric: str, row: Row) -> float:
    return 1.0


def _losses(metric: str, row: Row) -> float:
    return sum(_magnitude(f"generalization_{which}_loss")(metric, row) for which in ("train", "validation"))


def _start(metric: str, row: Row) -> float:
    """‖θ₀‖: a distance is a difference of two θ."""
    relative = _magnitude("theta_distance_relative")(metric, row)
    return _magnitude("theta_distance")(metric, row) / relative if relative else 0.0


def _bound_of_change(metric: str, row: Row) -> float:
    """It is proportional to the distance."""
    relative = _magnitude("theta_distance_relative")(metric, row)
    return _magnitude("ntk_change_bound")(metric, row) / relative if relative else 0.0


def _beside(metric: str, name: str) -> str:
    return f"{metric.partition('/')[0].removesuffix('_layers')}/{name}"


# Differences of two larger numbers, or of a number and 1: the magnitude of these.
MAGNITUDES: dict[str, Callable[[str, Row], float]] = {
    "hessian_edge_distance": _magnitude("hessian_lambda_max"),
    "generalization_gap": _losses,
    "certificate_alpha": _magnitude("certificate_beta"),
    "certificate_rsc_margin": _magnitude("certificate_beta"),
    "rsc_alpha": _magnitude("certificate_beta"),
    "rsc_margin": _magnitude("rsc_threshold"),
    "rsc_kappa": _one,
    "certificate_rate": _one,
    "ntk_change": _one,
    "ntk_change_max": _one,
    "ntk_label_alignment": _one,
    "theta_distance": _start,
    "theta_distance_relative": _one,
    "ntk_change_bound": _bound_of_change,
}
# The metrics with a logged error, and that error.
ERRORS = {
    "hessian_lambda_max": "hessian_lambda_max_residual",
    "hessian_edge_distance": "hessian_lambda_max_residual",
    "predictor_hessian_norm": "predictor_hessian_norm_residual",
    "hessian_trace": "hessian_trace_error",
    "ntk_lambda_min": "ntk_lambda_min_floor",
    "ntk_direction_lambda_min": "ntk_lambda_min_floor",
    "ntk_length_lambda_min": "ntk_lambda_min_floor",
    "ntk_mean_grad_norm_sq_bound": "ntk_lambda_min_floor",
    "certificate_ntk_margin": "ntk_lambda_min_floor",
    "certificate_ntk_ratio_bound": "ntk_lambda_min_floor",
}
# Multiples of the norms of the predictor's Hessian, whose relative error is no larger than the relative residual.
HESSIANS = ("linearity_b", "linearity_kappa", "linearity_hessian_to_kernel")
# Quotients by these eigenvalues, whose relative errors add up.
QUOTIENTS = {
    "ntk_condition_number": ("ntk_lambda_min",),
    "ntk_crossover": ("ntk_direction_lambda_min", "ntk_length_lambda_min"),
}


def agree(metric: str, cpu: Row, device: Row) -> bool:
    """Whether the values of the CPU and of the device, both finite, are the same within the arithmetic."""
    name = metric.partition("/")[2]
    if name.endswith(FREE) or "_error_" in name:
        return math.isfinite(device[metric])
    a, b = cpu[metric], device[metric]
    allowed = ROUNDING * max(MAGNITUDES.get(name, _magnitude(name))(metric, row) for row in (cpu, device))
    if name.startswith(("hessian_trace__", "layers/")) or metric.partition("/")[0].endswith("_layers"):
        allowed = ROUNDING * max(abs(a), abs(b))
    if name in ERRORS:
        allowed += sum(_magnitude(ERRORS[name])(metric, row) for row in (cpu, device))
    if name in HESSIANS:
        allowed += abs(a) * sum(_residual_share(metric, row) for row in (cpu, device))
    if name in QUOTIENTS:
        allowed += abs(a) * sum(_floor_share(metric, row, least) for row in (cpu, device) for least in QUOTIENTS[name])
    return abs(a - b) <= allowed


def _residual_share(metric: str, row: Row) -> float:
    norm = _magnitude("predictor_hessian_norm")(metric, row)
    return _magnitude("predictor_hessian_norm_residual")(metric, row) / norm if norm else 0.0


def _floor_share(metric: str, row: Row, name: str) -> float:
    least = _magnitude(name)(metric, row)
    return _magnitude("ntk_lambda_min_floor")(metric, row) / least if least else math.inf
