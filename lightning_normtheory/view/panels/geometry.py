"""The panels of curvature and tangent kernel."""

from lightning_normtheory.view.panels.panel import HOLDS, Line, Panel

__all__ = ["PANELS"]

PANELS: tuple[Panel, ...] = (
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
        f"Whether the eigenvalue was found to the tolerance that was asked for. {HOLDS}",
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
        "‖K − K₀‖/‖K₀‖, and ΔK, the largest so far: near 0 the network trains as its linearization does.",
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
        "The cosine between the centered kernel and that of the labels: it rises as the kernel learns the task.",
    ),
    Panel(
        "Kernel",
        "Constants of DGM",
        (Line("ntk_alpha"), Line("ntk_lambda_0"), Line("ntk_mu_0")),
        "log",
        "α of the start, and the least eigenvalues λ₀ and μ₀ at infinite width.",
        detail=True,
    ),
)
