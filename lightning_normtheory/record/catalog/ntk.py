"""Metrics of `NTKLeastEigenvalue`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="NTKLeastEigenvalue")
_keep_min = partial(_metric, extreme="min")
_keep_max = partial(_metric, extreme="max")

METRICS = (
    _keep_min(
        "ntk_lambda_min",
        "λ_min(K)",
        "least eigenvalue of the tangent kernel K of its samples, an upper bound for the training set",
        "kernel",
        "decay",
        column=True,
        row="λ_min of the kernel",
        tex=r"$\lambda_{\min}(K)$",
    ),
    _metric("ntk_lambda_min_half", "λ_min, n/2", "least eigenvalue of the kernel of half of its samples", "decay"),
    _metric("ntk_lambda_min_quarter", "λ_min, n/4", "least eigenvalue of the kernel of a quarter of them", "decay"),
    _metric(
        "ntk_lambda_min_decay",
        "exponent",
        "exponent p of λ_min(K) ∝ n^−p, from a quarter of the samples to all",
        "decay_exponent",
    ),
    _keep_max("ntk_lambda_min_floor", "floor", "error bound of λ_min(K)", "kernel", role="floor"),
    _keep_max("ntk_lambda_max", "λ_max(K)", "largest eigenvalue of the tangent kernel", "kernel_lambda_max"),
    _keep_max(
        "ntk_condition_number",
        "λ_max/λ_min",
        "condition number of the kernel, infinite below the floor",
        "condition_number",
    ),
    _keep_max(
        "ntk_gradient_norm",
        "max √K_ii",
        "largest ‖∇f(x_i)‖ on the kernel's samples, root mean square over the outputs",
        "gradient_bounds",
    ),
    _keep_min("ntk_effective_rank", "effective rank", "effective rank (tr K)²/‖K‖_F²", "effective_rank"),
    _metric("ntk_samples", "samples", "number of samples of the kernel", "effective_rank", role="upper", kind="count"),
    _keep_max(
        "ntk_lambda_min_error",
        "error of λ_min",
        "standard error of λ_min(K) of an estimated kernel",
        "kernel_error",
        error_of="ntk_lambda_min",
    ),
    _keep_max(
        "ntk_lambda_max_error",
        "error of λ_max",
        "standard error of λ_max(K) of an estimated kernel",
        "kernel_error",
        error_of="ntk_lambda_max",
    ),
    _metric(
        "ntk_directions",
        "random directions",
        "number of random directions of an estimated kernel",
        "kernel_directions",
        kind="count",
    ),
    _keep_max("ntk_seconds", "tangent kernel", "seconds spent on the kernel", "cost", kind="seconds"),
    _keep_max(
        "ntk_change",
        "‖K−K₀‖/‖K₀‖",
        "relative change of the kernel since fit start or a restart",
        "change",
    ),
    _metric(
        "ntk_change_max", "ΔK", "largest relative change of the tangent kernel so far", "change", column=True, row="ΔK"
    ),
    _keep_max(
        "ntk_label_alignment",
        "alignment",
        "cosine between the centered kernel and the kernel of the labels",
        "alignment",
    ),
    _metric(
        "ntk_direction_share",
        "directions",
        "share of WeightNorm's v, and of the weights before BatchNorm, in the kernel's trace",
        "shares",
    ),
    _metric("ntk_length_share", "lengths", "share of WeightNorm's g and BatchNorm's γ in the kernel's trace", "shares"),
    _metric("ntk_rest_share", "rest", "share of all other parameters in the kernel's trace", "shares"),
    _keep_min("ntk_direction_lambda_min", "λ_min(K_direction)", "least eigenvalue of the directions' kernel", "parts"),
    _keep_min("ntk_length_lambda_min", "λ_min(K_length)", "least eigenvalue of the lengths' kernel", "parts"),
    _metric(
        "ntk_crossover",
        "crossover",
        "ratio √(λ_min(K_direction)/λ_min(K_length)): above 1, directions dominate",
        "crossover",
    ),
    _metric("ntk_alpha", "α", "scale α of the directions at initialization (DGM)", "dgm_constants"),
    _metric("ntk_lambda_0", "λ₀", "λ_min of the directions' kernel at infinite width", "dgm_constants"),
    _metric("ntk_mu_0", "μ₀", "λ_min of the lengths' kernel at infinite width", "dgm_constants"),
    _metric("ntk_threshold", "threshold", "lower bound that DGM guarantees for λ_min(K)", "kernel", role="limit"),
    _keep_min(
        "ntk_threshold_distance",
        "λ_min(K) − threshold",
        "distance to DGM's threshold, negative below it",
        "threshold_distance",
    ),
    _metric("layers/ntk_share__*", "share", "share of the layer in the kernel's trace", "layer_shares"),
    _metric("layers/ntk_direction_share__*", "direction", "share of the layer's directions", "layer_directions"),
    _metric("layers/ntk_length_share__*", "length", "share of the layer's lengths", "layer_lengths"),
)
