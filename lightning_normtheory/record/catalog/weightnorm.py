"""Metrics of `WeightNormTheory`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="WeightNormTheory")
_keep_max = partial(_metric, extreme="max")

METRICS = (
    _keep_max(
        "weightnorm_displacement_v",
        "max ‖v−v₀‖",
        "largest distance of a direction of WeightNorm from the start",
        "directions_distance",
        row="max ‖v−v₀‖ of WeightNorm",
    ),
    _keep_max(
        "weightnorm_displacement_g",
        "max |g−g₀|",
        "largest distance of a length of WeightNorm from the start",
        "lengths_distance",
    ),
    _metric(
        "dgm_reach_v",
        "reach of v",
        "bound on ‖v−v₀‖ while training converges at DGM's rate (Lemma C.3)",
        "directions_distance",
        role="upper",
    ),
    _metric(
        "dgm_reach_g",
        "reach of g",
        "bound on |g−g₀| while training converges at DGM's rate (Lemma C.2)",
        "lengths_distance",
        role="upper",
    ),
    _metric(
        "dgm_radius_v",
        "R_v",
        "distance of v within which DGM keeps the kernel positive definite",
        "directions_distance",
        role="limit",
    ),
    _metric(
        "dgm_radius_g",
        "R_g",
        "distance of g within which DGM keeps the kernel positive definite",
        "lengths_distance",
        role="limit",
    ),
    _keep_max(
        "dgm_sign_changes",
        "sign changes",
        "share of sample-unit pairs whose ReLU has changed its side since the start",
        "sign_changes",
    ),
    _metric(
        "dgm_sign_changes_bound",
        "bound of sign changes",
        "share of those that a direction as far away as the farthest could change, Σ|S_i(R)|/(nm) (DGM, Appendix C)",
        "sign_changes",
        role="upper",
    ),
    _metric("dgm_rate_measured", "measured", "factor of ‖f−y‖² per step, mean since the start", "dgm_rate"),
    _metric(
        "dgm_rate",
        "guaranteed",
        "factor of ‖f−y‖² per step that DGM, Theorem 4.1 or 4.2, guarantees for wide networks and short steps",
        "dgm_rate",
        role="upper",
    ),
    _keep_max(
        "dgm_step", "η‖Λ‖", "step size times largest eigenvalue of the kernel; DGM, Theorem C.1: ≤ 1/3", "dgm_step"
    ),
    _metric(
        "dgm_step_v",
        "η‖V∞‖/α²",
        "step size of DGM, Theorem 4.1, which has to be below a constant that it does not name",
        "dgm_step",
    ),
    _metric(
        "dgm_rate_best",
        "at α*",
        "factor of ‖f−y‖² per step at the best scale α*, with the largest step of Theorem C.1, at infinite width",
        "dgm_best_rate",
    ),
    _metric(
        "dgm_rate_unnormalized",
        "without WeightNorm",
        "the same factor without WeightNorm",
        "dgm_best_rate",
    ),
    _metric(
        "dgm_alpha_best",
        "α*",
        "scale of the directions with the best rate (DGM, Proposition 2); 0 or infinite if it is a limit",
        "dgm_best_scale",
    ),
    _metric(
        "dgm_width_asked",
        "m of Theorem 4.1 or 4.2",
        "width in the theorem for this α, without its constant factor",
        "dgm_width",
    ),
    _metric(
        "dgm_width_asked_best",
        "m of Proposition 2",
        "width in the proposition, without its constant factor",
        "dgm_width",
    ),
)
