"""Compare the metrics of two fits, in units of what rounding explains."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Comparison", "compare", "not_finite"]

# What only says how a value was found: seconds, products, and the errors that are stated with a value.
_ABOUT_VALUES = re.compile(r"(_residual|_error|_floor|_hvps|seconds|_converged|gamma_gap)(__.*)?$")

# Quotients by eigenvalues of the kernel, whose relative errors add up.
_QUOTIENTS = {
    "ntk_condition_number": ("ntk_lambda_min",),
    "ntk_crossover": ("ntk_direction_lambda_min", "ntk_length_lambda_min"),
}


class Comparison(NamedTuple):
    """The result for one training.

    Attributes:
        compared: the number of metrics.
        missing: those that are finite on one side only.
        largest: the largest difference in units of its tolerance, and the metric that has it.
        different: those that differ by more, in words.
    """

    compared: int
    missing: list[str]
    largest: tuple[float, str]
    different: list[str]


def compare(cpu: Mapping[str, float], device: Mapping[str, float], eps: float, random: bool) -> Comparison:
    """Compare all metrics.

    Args:
        eps: that of the operands of products on the device, 0 if they are not rounded.
        random: whether the training draws numbers on the device, which are others than on the CPU; then only whether
            metrics are finite is compared.

    A few steps of training and a product in another order change float32 numbers by less than 10⁻³, and numbers from
    TF32 by less than 20 ε. Eigenvalues may also differ by what their floor or residual says on both sides.
    """
    relative = max(1e-3, 20 * eps)
    missing, different = [], []
    largest = (0.0, "")
    names = sorted(set(cpu) | set(device))
    for name in names:
        a, b = cpu.get(name, math.nan), device.get(name, math.nan)
        if math.isfinite(a) != math.isfinite(b):
            missing.append(f"{name}: {a:.6g} on the CPU, {b:.6g} on the device")
        elif math.isfinite(a) and not random and not _ABOUT_VALUES.search(name):
            tolerance = relative * max(abs(a), abs(b)) + _stated(name, cpu, a) + _stated(name, device, b)
            units = abs(a - b) / tolerance if tolerance else 0.0
            largest = max(largest, (units, name))
            if units > 1:
                different.append(f"{name}: {a:.6g} on the CPU, {b:.6g} on the device, {units:.1f} tolerances apart")
    return Comparison(len(names), missing, largest, different)


def not_finite(row: Mapping[str, float], reference: Mapping[str, float]) -> list[str]:
    """Return the metrics that are finite in the reference only."""
    finite = (name for name, value in reference.items() if math.isfinite(value))
    return [name for name in finite if not math.isfinite(row.get(name, math.nan))]


def _stated(name: str, row: Mapping[str, float], value: float) -> float:
    """The error of a metric that the row itself states, or that of the numbers of which it is a difference."""
    prefix, _, metric = name.partition("/")

    def beside(other: str) -> float:
        return abs(row.get(f"{prefix}/{other}", 0.0))

    floor = beside("ntk_lambda_min_floor")
    if "hessian_trace" in metric:
        return beside(metric.replace("hessian_trace", "hessian_trace_error"))
    if metric.startswith("predictor_hessian"):
        return beside("predictor_hessian_norm_residual")
    if metric.startswith("hessian_"):
        return beside("hessian_lambda_max_residual")
    if metric == "generalization_gap":
        return 1e-3 * beside("generalization_train_loss")
    if metric in _QUOTIENTS:
        leasts = [beside(name) for name in _QUOTIENTS[metric]]
        return abs(value) * sum(floor / least for least in leasts) if all(leasts) else 0.0
    return floor if "lambda_min" in metric or metric == "certificate_ntk_margin" else 0.0
