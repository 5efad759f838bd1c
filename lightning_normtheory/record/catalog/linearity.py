"""Metrics of `Linearity`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

# NormTheory measures on a few samples in every 16th measurement.
_metric = partial(MetricInfo, callback="Linearity", extreme="max")
_seldom = partial(_metric, every=16)

METRICS = (
    _metric(
        "theta_distance",
        "‖θ−θ₀‖",
        "distance of all parameters from their start",
        "displacement",
        row="‖θ − θ₀‖",
    ),
    _metric("theta_distance_relative", "‖θ−θ₀‖/‖θ₀‖", "that distance in units of ‖θ₀‖", "displacement"),
    _metric(
        "theta_distance_error",
        "error of ‖θ−θ₀‖",
        "standard error of that distance where it is estimated from random entries",
        "displacement_error",
        error_of="theta_distance",
    ),
    _metric(
        "ntk_change_bound",
        "bound of ‖K−K₀‖/‖K₀‖",
        "bound of the kernel's change from ‖θ − θ₀‖ (LIN, Proposition 2.2)",
        "change",
        role="upper",
    ),
    _seldom("predictor_gradient_norm", "max ‖∂f/∂θ‖", "largest norm of the outputs' Jacobian in θ", "gradient_bounds"),
    _seldom(
        "predictor_input_gradient_norm", "max ‖∂f/∂x‖", "largest norm of the outputs' Jacobian in x", "input_gradient"
    ),
    _seldom("linearity_b", "B", "curvature ratio max ‖∇²f‖/‖∇f‖² (LIN, eq. (16))", "linearity"),
    _seldom("linearity_kappa", "κ_f", "B times the residual: max |f − y|·‖∇²f‖/‖∇f‖² (LIN, eq. (16))", "linearity"),
    _seldom("linearity_hessian_to_kernel", "‖H‖/‖K‖", "ratio max ‖∇²f‖/λ_max(K) (LIN, eq. (21))", "linearity"),
    _seldom(
        "linearity_hidden_gradient",
        "‖∂f/∂α‖_∞",
        "largest derivative of an output in a hidden value (LIN, Theorem 3.1)",
        "linearity",
    ),
)
