"""Every metric that a callback logs: what it is called, what it is, and which extreme of it is worth keeping."""

import re
from functools import cache
from typing import NamedTuple

__all__ = ["METRICS", "Metric", "find"]


class Metric(NamedTuple):
    """A quantity as people read it.

    Args:
        name: without the prefix; those of a layer begin with ``layers/``, and a star stands for a layer or a group.
        symbol: short, for a legend.
        meaning: a phrase that completes "this is …".
        summary: what W&B shows of all epochs: ``"min,last"``, ``"max,last"``, or ``"last"`` where an extreme says
            nothing.
    """

    name: str
    symbol: str
    meaning: str
    summary: str = "last"


_LOW, _HIGH = "min,last", "max,last"

METRICS: tuple[Metric, ...] = (
    # MinWeightNorm
    Metric("min_weight_norm", "w_min", "the smallest norm of a weight vector in a normalized layer", _LOW),
    Metric("layers/weight_norm__*", "w_min", "the smallest norm of a weight vector of the layer", _LOW),
    # RSCRatio
    Metric("loss", "L", "the mean loss of the probe, dropout off", _LOW),
    Metric("rsc_ratio", "R", "‖∇L‖²/L, the ratio of restricted strong convexity", _LOW),
    Metric("grad_norm_sq", "‖∇L‖²", "the squared norm of the loss's gradient", _LOW),
    Metric(
        "mean_predictor_grad_norm_sq", "‖ḡ‖²", "the squared norm of the outputs' mean gradient over the probe", _LOW
    ),
    Metric("loss_ratio", "L_t/L_{t−1}", "the loss divided by the one measured before", _HIGH),
    # HessianTopEigenvalue
    Metric("hessian_lambda_max", "λ_max", "the largest eigenvalue of the loss's Hessian", _HIGH),
    Metric("hessian_lambda_max_residual", "residual of λ_max", "‖Hv − λv‖: an eigenvalue lies that near", _HIGH),
    Metric("hessian_lambda_max_converged", "λ_max converged", "1 if the residual is within the tolerance", _LOW),
    Metric("hessian_lambda_max_hvps", "products", "Hessian-vector products that λ_max took", _HIGH),
    Metric("hessian_lambda_max_seconds", "Hessian", "seconds that λ_max took", _HIGH),
    Metric("hessian_edge", "2/η", "the edge of stability of plain gradient descent with the next step's η", _LOW),
    Metric("hessian_edge_distance", "2/η − λ_max", "the distance to the edge of stability, negative beyond it", _LOW),
    Metric("hessian_edge__*", "2/η", "the edge of stability of a parameter group", _LOW),
    Metric("hessian_edge_distance__*", "2/η − λ_max", "the distance to the edge of a parameter group", _LOW),
    Metric("hessian_stability_limit", "limit", "the limit of stability with momentum and weight decay", _LOW),
    Metric("hessian_stability_limit_distance", "limit − λ_max", "the distance to that limit, negative beyond it", _LOW),
    Metric("predictor_hessian_norm", "max ‖∇²f‖", "the largest norm of the outputs' Hessian over samples", _HIGH),
    Metric("predictor_hessian_norm_residual", "residual of ‖∇²f‖", "what the norm is off by, at least", _HIGH),
    Metric("predictor_hessian_norm_converged", "‖∇²f‖ converged", "1 if the residual is within the tolerance", _LOW),
    # NTKLeastEigenvalue
    Metric("ntk_lambda_min", "λ_min(K)", "the least eigenvalue of the tangent kernel", _LOW),
    Metric("ntk_lambda_min_floor", "floor", "what λ_min(K) can be off by", _HIGH),
    Metric("ntk_lambda_max", "λ_max(K)", "the largest eigenvalue of the tangent kernel", _HIGH),
    Metric("ntk_condition_number", "λ_max/λ_min", "the kernel's condition number, infinite below the floor", _HIGH),
    Metric("ntk_effective_rank", "effective rank", "(tr K)²/‖K‖_F²", _LOW),
    Metric("ntk_samples", "samples", "the number of samples of the kernel"),
    Metric("ntk_seconds", "tangent kernel", "seconds that the tangent kernel took", _HIGH),
    Metric("ntk_change", "‖K−K₀‖/‖K₀‖", "the kernel's change since the start", _HIGH),
    Metric("ntk_change_max", "ΔK", "the largest change of the kernel so far"),
    Metric("ntk_label_alignment", "alignment", "the cosine between the centered kernel and that of the labels", _HIGH),
    Metric("ntk_direction_share", "directions", "the share of WeightNorm's directions in the kernel's trace"),
    Metric("ntk_length_share", "lengths", "the share of WeightNorm's lengths in the kernel's trace"),
    Metric("ntk_rest_share", "rest", "the share of all other parameters in the kernel's trace"),
    Metric("ntk_direction_lambda_min", "λ_min(K_direction)", "the least eigenvalue of the directions' kernel", _LOW),
    Metric("ntk_length_lambda_min", "λ_min(K_length)", "the least eigenvalue of the lengths' kernel", _LOW),
    Metric("ntk_crossover", "crossover", "√(λ_min(K_direction)/λ_min(K_length)): above 1, directions dominate"),
    Metric("ntk_alpha", "α", "the scale of the directions at the start, in DGM's form"),
    Metric("ntk_lambda_0", "λ₀", "λ_min of the directions' kernel at infinite width"),
    Metric("ntk_mu_0", "μ₀", "λ_min of the lengths' kernel at infinite width"),
    Metric("ntk_threshold", "threshold", "what λ_min(K) stays above by DGM's theorems"),
    Metric("ntk_threshold_distance", "λ_min(K) − threshold", "the distance to DGM's threshold, negative below", _LOW),
    Metric("layers/ntk_share__*", "share", "the layer's share of the kernel's trace"),
    Metric("layers/ntk_direction_share__*", "direction", "the share of the layer's directions"),
    Metric("layers/ntk_length_share__*", "length", "the share of the layer's lengths"),
    # RademacherBound
    Metric("rademacher_bound", "Rademacher", "a bound of the network's Rademacher complexity, at its norms", _LOW),
    Metric("rademacher_x_norm", "max ‖x‖", "the largest norm of an input that the bound is for", _HIGH),
    Metric("generalization_bound", "bound", "what the gap stays below, with probability 1 − δ", _LOW),
    Metric("generalization_bound_fixed_radii", "bound, fixed radii", "the same for norms fixed before training", _LOW),
    Metric("population_loss_bound", "L + bound", "what the expected loss stays below, with probability 1 − δ", _LOW),
    Metric("generalization_bound_vacuous", "bound vacuous", "1 if the bound says no more than a zero network", _LOW),
    Metric("generalization_gap", "gap", "validation loss − training loss, as measured", _HIGH),
    Metric("generalization_train_loss", "training loss", "the loss of the probe, as the network predicts", _LOW),
    Metric("generalization_validation_loss", "validation loss", "the loss of as many validation samples", _LOW),
    # ConvergenceCertificate
    Metric("certificate_rsc", "restricted strong convexity", "1 if α > 0 (WN, Lemma 5.1, generalized)", _LOW),
    Metric("certificate_rsc_margin", "margin α", "by how much that condition holds", _LOW),
    Metric("certificate_ntk", "kernel positive definite", "1 if λ_min of the full kernel is above its floor", _LOW),
    Metric("certificate_ntk_margin", "margin λ_min − floor", "by how much that condition holds", _LOW),
    Metric("certificate_dgm_v", "DGM, Theorem 4.1", "1 if λ_min of the kernel is above λ₀/(2α²)", _LOW),
    Metric("certificate_dgm_v_margin", "margin of Theorem 4.1", "by how much that condition holds", _LOW),
    Metric("certificate_dgm_g", "DGM, Theorem 4.2", "1 if λ_min of the kernel is above μ₀/2", _LOW),
    Metric("certificate_dgm_g_margin", "margin of Theorem 4.2", "by how much that condition holds", _LOW),
    Metric("certificate_alpha", "α", "the constant of restricted strong convexity; negative: no guarantee", _HIGH),
    Metric("certificate_beta", "β", "a bound of the Hessian along the guaranteed step", _LOW),
    Metric("certificate_step", "1/β", "the step of gradient descent that is guaranteed", _HIGH),
    Metric("certificate_rho_2", "ρ₂", "how far that step goes", _HIGH),
    Metric("certificate_hessian_bound", "H̄", "a bound of ‖∇²f‖", _LOW),
    Metric("certificate_gradient_bound", "ϱ", "a bound of ‖∂f/∂θ‖", _LOW),
    Metric("certificate_lipschitz_bound", "Lipschitz bound", "a bound of ‖∂f/∂x‖", _LOW),
    Metric("certificate_rate", "guaranteed, step 1/β", "the guaranteed L⁺/L of the step 1/β", _LOW),
    Metric("certificate_omega", "ηβ", "the run's own step in units of 1/β: guaranteed below 2", _HIGH),
    Metric("certificate_own_rate", "guaranteed, own step", "the guaranteed L⁺/L of the run's own step", _LOW),
    Metric("certificate_rate_measured", "measured", "L⁺/L per step, the mean since the last measurement", _HIGH),
    Metric("certificate_ntk_ratio_bound", "(4s/n)·λ_min", "what R is at least, on the kernel's samples", _LOW),
    Metric("ntk_mean_grad_norm_sq", "‖ḡ‖², kernel's samples", "‖ḡ‖² of the kernel's samples", _LOW),
    Metric("ntk_mean_grad_norm_sq_bound", "λ_min/(nk)", "what the kernel says ‖ḡ‖² is at least", _LOW),
    Metric("rho", "ρ", "the largest spectral distance of a hidden weight from its start", _HIGH),
    Metric("rho_1", "ρ₁", "the largest distance of an output weight from its start", _HIGH),
    Metric("wn_alpha", "α of WN", "the paper's α, for its own network", _HIGH),
    Metric("wn_beta", "β of WN", "the paper's β, for its own network", _LOW),
    Metric("wn_hessian_bound", "H̄ of WN", "the paper's bound of ‖∇²f‖ (WN, Theorem 4.1)", _LOW),
    Metric("wn_gradient_bound", "ϱ of WN", "the paper's bound of ‖∂f/∂θ‖ (WN, Lemma 4.1)", _LOW),
    Metric("wn_loss_bound", "φ̄ of WN", "the paper's bound of the loss", _LOW),
    Metric("rsc_gamma", "γ of RSC", "the largest ‖W‖₂/√m", _HIGH),
    Metric("rsc_kappa", "κ of RSC", "|cos(∇L, ḡ)|", _LOW),
    Metric("rsc_alpha", "α of RSC", "the paper's α, for its own network", _HIGH),
    Metric("rsc_beta", "β of RSC", "the paper's β, for its own network", _LOW),
    Metric("rsc_threshold", "threshold of RSC", "what ‖ḡ‖² has to exceed (RSC, Theorem 5.1)", _LOW),
    Metric("rsc_margin", "‖ḡ‖² − threshold", "by how much the condition of RSC, Theorem 5.1, holds", _LOW),
    # BatchNormTheory
    Metric("batchnorm_epsilon", "ε_N", "max 1/N over all features, from the running statistics", _HIGH),
    Metric("layers/batchnorm_epsilon__*", "ε_N", "max 1/N over the layer's features", _HIGH),
    Metric("batchnorm_epsilon_start", "ε_N at the start", "max 1/N at fit start, on the probe"),
    Metric("batchnorm_input_norm", "max ‖x̄‖", "the largest norm of a centered input; the theory takes it to be ≤ 1"),
    Metric("batchnorm_shift", "shift", "the largest bias behind the normalization; the theory has none", _HIGH),
    Metric("batchnorm_displacement_u", "‖U−U₀‖", "how far output weights and scales have moved", _HIGH),
    Metric("batchnorm_displacement_v", "‖V−V₀‖", "how far the hidden weights have moved", _HIGH),
    Metric("batchnorm_gamma_a", "γ_a", "the margin through the output weights at the start"),
    Metric("batchnorm_gamma_c", "γ_c", "the margin through BatchNorm's scales at the start"),
    Metric("batchnorm_gamma_gap", "error of γ", "what γ_a + γ_c can be off by"),
    Metric("batchnorm_radius_u", "radius of U", "what ‖U−U₀‖ stays below by BN, Theorem 2.1"),
    Metric("batchnorm_radius_v", "radius of V", "what ‖V−V₀‖ stays below by BN, Theorem 2.1"),
    Metric("batchnorm_within_radii", "within the radii", "1 while both stay below", _LOW),
    Metric("batchnorm_width_needed", "width needed", "the least width that the theorem asks for"),
    Metric("batchnorm_width_ok", "wide enough", "1 if the width is what the theorem asks for", _LOW),
    Metric("batchnorm_error_bound", "error bound", "BN, Theorem 2.1, eq. (2), after the steps so far", _LOW),
    Metric("batchnorm_error_vacuous", "error bound vacuous", "1 if that bound is 1 or more", _LOW),
    # every callback
    Metric("seconds", "all", "seconds that the whole measurement took", _HIGH),
    Metric("skipped", "skipped", "1 for an epoch whose measurement would have exceeded max_overhead", _HIGH),
)


@cache
def find(name: str) -> Metric:
    """The metric of a name without prefix, such as ``hessian_edge__head`` or ``layers/weight_norm__net_0``; of a
    quantity that is not ours, one whose symbol is its name.

    Example:
        >>> find("hessian_lambda_max").symbol, find("layers/weight_norm__net_0").name
        ('λ_max', 'layers/weight_norm__*')
        >>> find("something_else")
        Metric(name='something_else', symbol='something_else', meaning='', summary='last')
    """
    for metric in METRICS:
        if re.fullmatch(re.escape(metric.name).replace(r"\*", ".+"), name):
            return metric
    return Metric(name, name, "")
