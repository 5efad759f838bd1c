"""Metrics of `HessianTopEigenvalue` and `HessianTrace`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="HessianTopEigenvalue")
_keep_max = partial(_metric, extreme="max")
_limit = partial(_metric, panel="sharpness", role="limit", extreme="min")
_distance = partial(_metric, panel="edge_distance", extreme="min")
_residual = partial(_keep_max, panel="residuals", error_kind="bound")
_converged = partial(_metric, panel="converged", kind="flag", extreme="min")
_trace = partial(MetricInfo, callback="HessianTrace", panel="trace")

METRICS = (
    _keep_max(
        "hessian_lambda_max",
        "λ_max",
        "largest eigenvalue of the loss Hessian on the probe",
        "sharpness",
        "smoothness",
        column=True,
        row="λ_max of the Hessian",
        tex=r"$\lambda_{\max}(\nabla^2 L)$, limit of stability (dashed)",
    ),
    _residual(
        "hessian_lambda_max_residual",
        "residual of λ_max",
        "residual ‖Hv − λv‖: an eigenvalue is this close",
        error_of="hessian_lambda_max",
    ),
    _metric(
        "hessian_lambda_max_lower",
        "λ_max, at least",
        "lower end of an interval for λ_max of the training set, two standard errors below vᵀHv",
        "sharpness",
        role="lower",
        every=16,
    ),
    _metric(
        "hessian_lambda_max_upper",
        "λ_max, at most",
        "upper end of an interval for λ_max of the training set, two standard errors above the probe's λ_max",
        "sharpness",
        role="upper",
        every=16,
    ),
    _metric(
        "hessian_rayleigh_train",
        "vᵀHv",
        "curvature vᵀHv of the training set along the eigenvector of the probe, estimated from other samples",
        "rayleigh",
        every=16,
    ),
    _metric(
        "hessian_rayleigh_train_error",
        "error of vᵀHv",
        "standard error of that estimate",
        "sampling_error",
        error_of="hessian_rayleigh_train",
        every=16,
    ),
    _converged("hessian_lambda_max_converged", "λ_max converged", "1 if the residual of λ_max is within the tolerance"),
    _keep_max(
        "hessian_lambda_max_hvps", "products", "number of Hessian-vector products for λ_max", "hvps", kind="count"
    ),
    _keep_max("hessian_lambda_max_seconds", "Hessian", "seconds spent on λ_max", "cost", kind="seconds"),
    _limit("hessian_edge", "2/η", "edge of stability of plain gradient descent with the next step's η", column=True),
    _distance("hessian_edge_distance", "2/η − λ_max", "distance to the edge of stability, negative beyond it"),
    _limit(
        "hessian_stability_limit", "limit", "largest stable λ_max with the run's momentum and weight decay", column=True
    ),
    _distance("hessian_stability_limit_distance", "limit − λ_max", "distance to that limit, negative beyond it"),
    _limit("hessian_edge__*", "2/η", "edge of stability of a parameter group"),
    _distance("hessian_edge_distance__*", "2/η − λ_max", "distance to the edge of a parameter group"),
    _keep_max(
        "predictor_hessian_norm",
        "max ‖∇²f‖",
        "largest norm of the outputs' Hessian over samples",
        "predictor",
        every=16,
        row="max ‖∇²f‖",
    ),
    _residual(
        "predictor_hessian_norm_residual",
        "residual of ‖∇²f‖",
        "residual of ‖∇²f‖: an eigenvalue is this close",
        error_of="predictor_hessian_norm",
        every=16,
    ),
    _converged(
        "predictor_hessian_norm_converged", "‖∇²f‖ converged", "1 if that residual is within the tolerance", every=16
    ),
    _trace(
        "hessian_trace", "tr(∇²L)", "trace of the loss Hessian, estimated", extreme="max", row="trace of the Hessian"
    ),
    _trace(
        "hessian_trace_error",
        "error of tr(∇²L)",
        "standard error of tr(∇²L)",
        panel="trace_error",
        error_of="hessian_trace",
        extreme="max",
    ),
    _trace("hessian_trace_hvps", "products, trace", "number of products for the trace", panel="hvps", kind="count"),
    _trace("hessian_trace_seconds", "trace", "seconds spent on the trace", panel="cost", kind="seconds", extreme="max"),
    _trace("layers/hessian_trace__*", "tr", "trace of the layer's block of the Hessian", panel="layer_traces"),
    _trace(
        "layers/hessian_trace_error__*",
        "error",
        "standard error of that trace",
        panel="layer_trace_errors",
        error_of="layers/hessian_trace__*",
    ),
)
