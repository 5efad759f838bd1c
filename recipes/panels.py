"""What is shown where: the panels of the dashboard and of the report, every metric in at least one of them."""

from typing import Literal, NamedTuple

__all__ = ["HEADLINES", "PANELS", "SECTIONS", "Line", "Panel", "Role"]

Role = Literal["measured", "upper", "lower", "limit", "floor"]
# The five numbers that are shown large, and the panel that each is read from.
HEADLINES = {
    "min_weight_norm": "Smallest weight norm",
    "rsc_ratio": "Restricted strong convexity",
    "ntk_lambda_min": "Least eigenvalue of the tangent kernel",
    "hessian_lambda_max": "Sharpness and the edge of stability",
    "rademacher_bound": "Rademacher complexity",
}
SECTIONS = ("Overview", "Optimisation", "Curvature", "Kernel", "Generalisation", "Layers", "BatchNorm")


class Line(NamedTuple):
    """A metric in a panel.

    Args:
        metric: its name without prefix, as in `METRICS`.
        role: what it is to the others: what is measured, an upper or lower bound of that, a limit that it may cross, or
            the floor below which it means nothing.
    """

    metric: str
    role: Role = "measured"


class Panel(NamedTuple):
    """Lines over the epochs.

    Args:
        section: one of `SECTIONS`.
        title: a few words.
        lines: what is drawn.
        scale: of the vertical axis.
        about: what can be seen here, in a sentence.
        detail: whether it is for those who look closer.
    """

    section: str
    title: str
    lines: tuple[Line, ...]
    scale: Literal["log", "linear"]
    about: str
    detail: bool = False


_FLAG = "1 where it holds, 0 where it does not."

PANELS: tuple[Panel, ...] = (
    Panel(
        "Overview",
        "Loss on the probe",
        (Line("loss"), Line("wn_loss_bound", "upper")),
        "log",
        "The mean loss of the samples that everything is measured on, with dropout off.",
    ),
    Panel(
        "Overview",
        "Smallest weight norm",
        (Line("min_weight_norm"),),
        "linear",
        "w_min, the smallest norm of a weight vector in a normalised layer: the bounds of WN grow as it falls. "
        "Plain gradient descent cannot make it fall in WeightNorm layers.",
    ),
    Panel(
        "Overview",
        "What measuring costs",
        (Line("seconds"), Line("hessian_lambda_max_seconds"), Line("ntk_seconds")),
        "linear",
        "Seconds that a measurement took.",
        detail=True,
    ),
    Panel(
        "Overview",
        "Skipped measurements",
        (Line("skipped"),),
        "linear",
        "1 for an epoch that max_overhead skipped.",
        detail=True,
    ),
    Panel(
        "Optimisation",
        "Restricted strong convexity",
        (Line("rsc_ratio"), Line("certificate_ntk_ratio_bound", "lower")),
        "log",
        "R = ‖∇L‖²/L: the larger it is, the more a step of gradient descent gains. The tangent kernel bounds it from "
        "below, on the samples of the kernel.",
    ),
    Panel(
        "Optimisation",
        "α of restricted strong convexity",
        (Line("certificate_alpha"), Line("wn_alpha"), Line("rsc_alpha")),
        "linear",
        "Where α is positive, the theorem guarantees geometric decrease. It is pessimistic: at practical widths α is "
        "usually negative.",
    ),
    Panel(
        "Optimisation",
        "Smoothness: λ_max and its bound β",
        (
            Line("hessian_lambda_max"),
            Line("certificate_beta", "upper"),
            Line("wn_beta", "upper"),
            Line("rsc_beta", "upper"),
        ),
        "log",
        "β bounds the Hessian along a step; the nearer it is to λ_max, the less is lost in the guaranteed step 1/β.",
    ),
    Panel(
        "Optimisation",
        "Rate per step: measured and guaranteed",
        (
            Line("certificate_rate_measured"),
            Line("certificate_rate", "upper"),
            Line("certificate_own_rate", "upper"),
        ),
        "linear",
        "L⁺/L of a step: what the run does, and what is guaranteed for gradient descent on the probe from the same "
        "point, with the step 1/β and, where ηβ < 2, with the run's own step.",
    ),
    Panel(
        "Optimisation",
        "Loss against the epoch before",
        (Line("loss_ratio"),),
        "linear",
        "L_t/L_{t−1}: below 1 the loss of the probe has fallen since it was last measured.",
    ),
    Panel(
        "Optimisation",
        "Gradient of the loss",
        (Line("grad_norm_sq"),),
        "log",
        "‖∇L‖² over the trained parameters.",
        detail=True,
    ),
    Panel(
        "Optimisation",
        "Mean gradient of the outputs",
        (
            Line("mean_predictor_grad_norm_sq"),
            Line("ntk_mean_grad_norm_sq"),
            Line("ntk_mean_grad_norm_sq_bound", "lower"),
            Line("rsc_threshold", "limit"),
        ),
        "log",
        "‖ḡ‖², which RSC asks to be above its threshold, and what the tangent kernel knows of it.",
    ),
    Panel(
        "Optimisation",
        "The step that is guaranteed",
        (Line("certificate_step"),),
        "log",
        "1/β, the step of gradient descent on the probe that cannot raise the loss.",
        detail=True,
    ),
    Panel(
        "Optimisation",
        "The run's own step in units of 1/β",
        (Line("certificate_omega"),),
        "log",
        "ηβ of plain SGD: below 2 its step is guaranteed not to raise the loss of the probe.",
        detail=True,
    ),
    Panel(
        "Optimisation",
        "Conditions that hold",
        (
            Line("certificate_rsc"),
            Line("certificate_ntk"),
            Line("certificate_dgm_v"),
            Line("certificate_dgm_g"),
        ),
        "linear",
        f"The sufficient conditions for convergence that can be tested on this network. {_FLAG}",
    ),
    Panel(
        "Optimisation",
        "Margin: restricted strong convexity",
        (Line("certificate_rsc_margin"), Line("rsc_margin")),
        "linear",
        "By how much the condition holds; negative where it does not.",
        detail=True,
    ),
    Panel(
        "Optimisation",
        "Margin: tangent kernel",
        (Line("certificate_ntk_margin"), Line("certificate_dgm_v_margin"), Line("certificate_dgm_g_margin")),
        "linear",
        "By how much the kernel's conditions hold; negative where they do not.",
        detail=True,
    ),
    Panel(
        "Optimisation",
        "Distance from the start",
        (Line("rho"), Line("rho_1"), Line("certificate_rho_2")),
        "log",
        "How far hidden weights (ρ) and output weights (ρ₁) have moved, and how far the guaranteed step goes (ρ₂).",
        detail=True,
    ),
    Panel(
        "Optimisation",
        "Constants of RSC",
        (Line("rsc_gamma"), Line("rsc_kappa")),
        "linear",
        "γ = max ‖W‖₂/√m, and κ, the cosine between the gradient of the loss and the mean gradient of the outputs.",
        detail=True,
    ),
    Panel(
        "Curvature",
        "Sharpness and the edge of stability",
        (
            Line("hessian_lambda_max"),
            Line("hessian_edge", "limit"),
            Line("hessian_stability_limit", "limit"),
            Line("hessian_edge__*", "limit"),
        ),
        "log",
        "λ_max of the loss's Hessian. Above 2/η (with momentum, above its own limit) steps along the sharpest "
        "direction overshoot more each time.",
    ),
    Panel(
        "Curvature",
        "Distance to the edge",
        (
            Line("hessian_edge_distance"),
            Line("hessian_stability_limit_distance"),
            Line("hessian_edge_distance__*"),
        ),
        "linear",
        "The edge minus λ_max: negative beyond the edge.",
        detail=True,
    ),
    Panel(
        "Curvature",
        "The predictor's Hessian and its bounds",
        (
            Line("predictor_hessian_norm"),
            Line("certificate_hessian_bound", "upper"),
            Line("wn_hessian_bound", "upper"),
        ),
        "log",
        "max ‖∇²f‖ over samples, measured with HessianTopEigenvalue(predictor_samples=…), and the bounds H̄ of it.",
    ),
    Panel(
        "Curvature",
        "Bounds of the network's gradients",
        (
            Line("certificate_gradient_bound", "upper"),
            Line("wn_gradient_bound", "upper"),
            Line("certificate_lipschitz_bound", "upper"),
        ),
        "log",
        "ϱ bounds the gradient in the parameters, the Lipschitz bound the one in the input.",
        detail=True,
    ),
    Panel(
        "Curvature",
        "How well λ_max is known",
        (Line("hessian_lambda_max_residual"), Line("predictor_hessian_norm_residual")),
        "log",
        "The residual ‖Hv − λv‖: some eigenvalue lies that near.",
        detail=True,
    ),
    Panel(
        "Curvature",
        "Converged",
        (Line("hessian_lambda_max_converged"), Line("predictor_hessian_norm_converged")),
        "linear",
        f"Whether the eigenvalue was found to the tolerance that was asked for. {_FLAG}",
        detail=True,
    ),
    Panel(
        "Curvature",
        "Products for λ_max",
        (Line("hessian_lambda_max_hvps"),),
        "linear",
        "Hessian-vector products that it took, each about two gradients of the probe.",
        detail=True,
    ),
    Panel(
        "Kernel",
        "Least eigenvalue of the tangent kernel",
        (Line("ntk_lambda_min"), Line("ntk_lambda_min_floor", "floor"), Line("ntk_threshold", "limit")),
        "log",
        "λ_min(K). Gradient descent can fit these samples as long as that of the kernel of all outputs is positive. "
        "Below the floor it cannot be told from zero.",
    ),
    Panel(
        "Kernel",
        "Distance to DGM's threshold",
        (Line("ntk_threshold_distance"),),
        "linear",
        "λ_min(K) minus what the theorem says it stays above.",
        detail=True,
    ),
    Panel(
        "Kernel",
        "Length and direction: shares",
        (Line("ntk_direction_share"), Line("ntk_length_share"), Line("ntk_rest_share")),
        "linear",
        "What the directions and the lengths of WeightNorm, and all other parameters, add to the kernel's trace.",
    ),
    Panel(
        "Kernel",
        "Length and direction: least eigenvalues",
        (Line("ntk_direction_lambda_min"), Line("ntk_length_lambda_min")),
        "log",
        "The larger one carries the convergence.",
    ),
    Panel(
        "Kernel",
        "Length and direction: crossover",
        (Line("ntk_crossover"),),
        "log",
        "√(λ_min(K_direction)/λ_min(K_length)): above 1 the directions dominate, below 1 the lengths.",
        detail=True,
    ),
    Panel(
        "Kernel",
        "Change of the kernel",
        (Line("ntk_change"), Line("ntk_change_max")),
        "log",
        "‖K − K₀‖/‖K₀‖, and ΔK, the largest so far: near 0 the network trains as its linearisation does.",
    ),
    Panel(
        "Kernel", "Largest eigenvalue", (Line("ntk_lambda_max"),), "log", "λ_max of the tangent kernel.", detail=True
    ),
    Panel(
        "Kernel",
        "Condition number",
        (Line("ntk_condition_number"),),
        "log",
        "λ_max/λ_min of the tangent kernel: by how much the slowest direction is slower than the fastest.",
    ),
    Panel(
        "Kernel",
        "Effective rank",
        (Line("ntk_effective_rank"), Line("ntk_samples", "upper")),
        "log",
        "(tr K)²/‖K‖_F², at most the number of samples: in how many directions the outputs move independently.",
        detail=True,
    ),
    Panel(
        "Kernel",
        "Alignment with the labels",
        (Line("ntk_label_alignment"),),
        "linear",
        "The cosine between the centred kernel and that of the labels: it rises as the kernel learns the task.",
    ),
    Panel(
        "Kernel",
        "Constants of DGM",
        (Line("ntk_alpha"), Line("ntk_lambda_0"), Line("ntk_mu_0")),
        "log",
        "α of the start, and the least eigenvalues λ₀ and μ₀ at infinite width.",
        detail=True,
    ),
    Panel(
        "Generalisation",
        "Generalisation gap and its bounds",
        (
            Line("generalization_gap"),
            Line("generalization_bound", "upper"),
            Line("generalization_bound_fixed_radii", "upper"),
        ),
        "log",
        "Validation loss − training loss, beside what the theorem says it stays below.",
    ),
    Panel(
        "Generalisation",
        "Loss on new samples and its bound",
        (
            Line("generalization_validation_loss"),
            Line("generalization_train_loss"),
            Line("population_loss_bound", "upper"),
        ),
        "log",
        "The loss on validation samples, beside the bound of the expected loss.",
    ),
    Panel(
        "Generalisation",
        "Rademacher complexity",
        (Line("rademacher_bound", "upper"),),
        "log",
        "A bound for all networks of this structure with norms no larger than now.",
    ),
    Panel(
        "Generalisation",
        "Vacuous bounds",
        (Line("generalization_bound_vacuous"), Line("batchnorm_error_vacuous")),
        "linear",
        "1 where a bound says no more than what a network of zeros achieves.",
        detail=True,
    ),
    Panel(
        "Generalisation",
        "Norm of the inputs",
        (Line("rademacher_x_norm"),),
        "linear",
        "The largest ‖x‖, which every bound is proportional to.",
        detail=True,
    ),
    Panel(
        "Layers",
        "Smallest weight norm of each layer",
        (Line("layers/weight_norm__*"),),
        "linear",
        "The smallest norm of a weight vector, layer by layer.",
    ),
    Panel(
        "Layers",
        "Share of the tangent kernel",
        (Line("layers/ntk_share__*"),),
        "linear",
        "What each layer adds to the kernel's trace.",
    ),
    Panel(
        "Layers",
        "Share of the directions",
        (Line("layers/ntk_direction_share__*"),),
        "linear",
        "What the directions of each WeightNorm layer add to the kernel's trace.",
        detail=True,
    ),
    Panel(
        "Layers",
        "Share of the lengths",
        (Line("layers/ntk_length_share__*"),),
        "linear",
        "What the lengths of each WeightNorm layer add to the kernel's trace.",
        detail=True,
    ),
    Panel(
        "Layers",
        "ε_N of each BatchNorm",
        (Line("layers/batchnorm_epsilon__*"),),
        "log",
        "max 1/N over the features of each layer, from its running statistics: large where a feature hardly varies.",
    ),
    Panel(
        "BatchNorm",
        "ε_N",
        (Line("batchnorm_epsilon"), Line("batchnorm_epsilon_start")),
        "log",
        "max 1/N over all features: the bounds of BN grow with its powers.",
    ),
    Panel(
        "BatchNorm",
        "Margins at the start",
        (Line("batchnorm_gamma_a"), Line("batchnorm_gamma_c"), Line("batchnorm_gamma_gap", "floor")),
        "log",
        "γ_a through the output weights and γ_c through BatchNorm's scales.",
    ),
    Panel(
        "BatchNorm",
        "Way of the output weights",
        (Line("batchnorm_displacement_u"), Line("batchnorm_radius_u", "upper")),
        "log",
        "‖U − U₀‖ beside the radius of BN, Theorem 2.1.",
    ),
    Panel(
        "BatchNorm",
        "Way of the hidden weights",
        (Line("batchnorm_displacement_v"), Line("batchnorm_radius_v", "upper")),
        "log",
        "‖V − V₀‖ beside the radius of BN, Theorem 2.1.",
    ),
    Panel(
        "BatchNorm",
        "Conditions of BN, Theorem 2.1",
        (Line("batchnorm_within_radii"), Line("batchnorm_width_ok")),
        "linear",
        _FLAG,
        detail=True,
    ),
    Panel(
        "BatchNorm",
        "Width that is needed",
        (Line("batchnorm_width_needed", "lower"),),
        "log",
        "The least width of BN, Theorem 2.1: at practical widths it is out of reach.",
        detail=True,
    ),
    Panel(
        "BatchNorm",
        "Error bound",
        (Line("batchnorm_error_bound", "upper"),),
        "log",
        "BN, Theorem 2.1, eq. (2).",
        detail=True,
    ),
    Panel(
        "BatchNorm",
        "Assumptions about the data and the shift",
        (Line("batchnorm_input_norm"), Line("batchnorm_shift")),
        "linear",
        "The theory takes max ‖x̄‖ to be at most 1, and the shift to be 0.",
        detail=True,
    ),
)
