"""The panels of the sections Curvature and Kernel."""

from lightning_normtheory.view.panels.panel import HOLDS, Panel

__all__ = ["PANELS"]

PANELS = (
    Panel(
        "sharpness",
        "Curvature",
        "Sharpness and the edge of stability",
        "log",
        "λ_max of the loss Hessian. Above 2/η (with momentum, above its own limit) steps along the sharpest direction "
        "overshoot more each time.",
    ),
    Panel(
        "edge_distance",
        "Curvature",
        "Distance to the edge",
        "linear",
        "The edge of stability minus λ_max; negative beyond the edge.",
        detail=True,
    ),
    Panel(
        "predictor",
        "Curvature",
        "Hessian of the predictor and its bounds",
        "log",
        "max ‖∇²f‖ over samples, measured with HessianTopEigenvalue(predictor_samples=…), and its bounds H̄.",
    ),
    Panel(
        "gradient_bounds",
        "Curvature",
        "Bounds on the network's gradients",
        "log",
        "ϱ bounds the gradient with respect to the parameters, the Lipschitz bound that with respect to the input.",
        detail=True,
    ),
    Panel(
        "residuals",
        "Curvature",
        "Residuals of λ_max and ‖∇²f‖",
        "log",
        "The residual ‖Hv − λv‖: some eigenvalue is at most this far away.",
        detail=True,
    ),
    Panel(
        "converged",
        "Curvature",
        "Converged",
        "linear",
        f"Whether the eigenvalue solver reached its tolerance. {HOLDS}",
        detail=True,
    ),
    Panel(
        "hvps",
        "Curvature",
        "Hessian-vector products for λ_max",
        "linear",
        "Number of products per measurement, each about as expensive as two gradients of the probe.",
        detail=True,
    ),
    Panel(
        "kernel",
        "Kernel",
        "Least eigenvalue of the tangent kernel",
        "log",
        "λ_min(K). Gradient descent can fit these samples as long as λ_min of the kernel of all outputs is positive. "
        "Below the floor it cannot be distinguished from zero.",
    ),
    Panel(
        "threshold_distance",
        "Kernel",
        "Distance to DGM's threshold",
        "linear",
        "λ_min(K) minus the lower bound that the theorem guarantees.",
        detail=True,
    ),
    Panel(
        "shares",
        "Kernel",
        "Length and direction: shares",
        "linear",
        "Shares of WeightNorm's directions, its lengths and all other parameters in the kernel's trace.",
    ),
    Panel(
        "parts",
        "Kernel",
        "Length and direction: least eigenvalues",
        "log",
        "Least eigenvalues of the directions' and the lengths' kernel. The larger one drives convergence.",
    ),
    Panel(
        "crossover",
        "Kernel",
        "Length and direction: crossover",
        "log",
        "√(λ_min(K_direction)/λ_min(K_length)): above 1 the directions dominate, below 1 the lengths.",
        detail=True,
    ),
    Panel(
        "change",
        "Kernel",
        "Change of the kernel",
        "log",
        "‖K − K₀‖/‖K₀‖, and ΔK, its largest value so far: near 0 the network trains like its linearization.",
    ),
    Panel("kernel_lambda_max", "Kernel", "Largest eigenvalue", "log", "λ_max of the tangent kernel.", detail=True),
    Panel(
        "condition_number",
        "Kernel",
        "Condition number",
        "log",
        "λ_max/λ_min of the tangent kernel: how much slower the slowest direction is learned than the fastest.",
    ),
    Panel(
        "effective_rank",
        "Kernel",
        "Effective rank",
        "log",
        "(tr K)²/‖K‖_F², at most the number of samples: in how many directions the outputs move independently.",
        detail=True,
    ),
    Panel(
        "alignment",
        "Kernel",
        "Alignment with the labels",
        "linear",
        "Cosine between the centered kernel and the kernel of the labels: it rises as the kernel learns the task.",
    ),
    Panel(
        "dgm_constants",
        "Kernel",
        "Constants of DGM",
        "log",
        "α at initialization, and the least eigenvalues λ₀ and μ₀ at infinite width.",
        detail=True,
    ),
)
