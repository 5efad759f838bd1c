"""The panels of the sections Curvature, Kernel and Layers."""

from functools import partial

from lightning_normtheory.view.panels.panel import HOLDS, Panel

__all__ = ["PANELS"]

_curvature = partial(Panel, section="Curvature")
_kernel = partial(Panel, section="Kernel")
_layers = partial(Panel, section="Layers")

PANELS = (
    _curvature(
        "sharpness",
        "Sharpness and the edge of stability",
        "λ_max of the loss Hessian. Above 2/η (with momentum, above its own limit) steps along the sharpest "
        "direction overshoot more each time.",
    ),
    _curvature(
        "edge_distance",
        "Distance to the edge",
        "The edge of stability minus λ_max; negative beyond the edge.",
        scale="linear",
        detail=True,
    ),
    _curvature(
        "trace",
        "Trace of the Hessian",
        "The sum of all eigenvalues of the loss Hessian, estimated with its standard error. Divided by the number of "
        "parameters, it is the mean curvature over all directions.",
        scale="linear",
    ),
    _curvature(
        "trace_error",
        "Standard error of the trace",
        "The trace is within three standard errors in about 98 % of draws.",
        detail=True,
    ),
    _curvature(
        "predictor",
        "Hessian of the predictor and its bounds",
        "max ‖∇²f‖ over samples, on a few or with HessianTopEigenvalue(predictor_samples=…) on more, and its bounds H̄.",
    ),
    _curvature(
        "gradient_bounds",
        "Gradients of the outputs and their bounds",
        "‖∂f/∂θ‖ on a few samples, the root mean square over the outputs on the kernel's samples (max √K_ii), and the "
        "bounds ϱ; those of WN and RSC are of each output.",
        detail=True,
    ),
    _curvature(
        "input_gradient",
        "Gradients in the input and their bound",
        "‖∂f/∂x‖ on a few samples, and the Lipschitz bound.",
        detail=True,
    ),
    _curvature(
        "residuals",
        "Residuals of λ_max and ‖∇²f‖",
        "The residual ‖Hv − λv‖: some eigenvalue is at most this far away.",
        detail=True,
    ),
    _curvature(
        "rayleigh",
        "Curvature along the eigenvector, on other samples",
        "vᵀHv of the training set, where v is the eigenvector of the probe: no more than its λ_max. The "
        "further it is below λ_max of the probe, the more that is a property of the samples of the probe.",
        detail=True,
    ),
    _curvature(
        "converged",
        "Converged",
        f"Whether the eigenvalue solver reached its tolerance. {HOLDS}",
        scale="linear",
        detail=True,
    ),
    _curvature(
        "hvps",
        "Hessian-vector products",
        "Number of products per measurement, each about as expensive as two gradients of the probe.",
        scale="linear",
        detail=True,
    ),
    _kernel(
        "kernel",
        "Least eigenvalue of the tangent kernel",
        "λ_min(K). Gradient descent can fit these samples as long as λ_min of the kernel of all outputs is positive. "
        "Below the floor it cannot be distinguished from zero.",
    ),
    _kernel(
        "decay",
        "Least eigenvalue by the number of samples",
        "λ_min of the kernel of all its samples, half and a quarter of them. It never grows with their number: each is "
        "an upper bound for the training set, and the distance between them shows how fast it falls.",
        detail=True,
    ),
    _kernel(
        "decay_exponent",
        "Decay of the least eigenvalue",
        "The exponent p of λ_min ∝ n^−p, from a quarter of the samples to all.",
        scale="linear",
        detail=True,
    ),
    _kernel(
        "threshold_distance",
        "Distance to DGM's threshold",
        "λ_min(K) minus the lower bound that the theorem guarantees.",
        scale="linear",
        detail=True,
    ),
    _kernel(
        "shares",
        "Length and direction: shares",
        "Shares in the kernel's trace of directions (WeightNorm's v, weights before a BatchNorm), lengths "
        "(WeightNorm's g, BatchNorm's γ) and all other parameters.",
        scale="linear",
    ),
    _kernel(
        "parts",
        "Length and direction: least eigenvalues",
        "Least eigenvalues of the directions' and the lengths' kernel. In DGM's network the larger one drives "
        "convergence.",
    ),
    _kernel(
        "crossover",
        "Length and direction: crossover",
        "√(λ_min(K_direction)/λ_min(K_length)): above 1 the directions dominate, below 1 the lengths.",
        detail=True,
    ),
    _kernel(
        "change",
        "Change of the kernel",
        "‖K − K₀‖/‖K₀‖, and ΔK, its largest value so far: near 0 the network trains like its linearization. The bound "
        "follows from the distance of the parameters from their start (LIN, Proposition 2.2).",
    ),
    _kernel(
        "linearity",
        "Curvature of the outputs against their gradients",
        "B = max ‖∇²f‖/‖∇f‖², κ_f = |f − y|·B, ‖∇²f‖/λ_max(K) and ‖∂f/∂α‖_∞ on a few samples: all small where the "
        "network is nearly linear in its parameters.",
    ),
    _kernel(
        "displacement",
        "Distance of all parameters from the start",
        "‖θ − θ₀‖, and in units of ‖θ₀‖: small while the network stays near its linearization at the start.",
    ),
    _kernel(
        "displacement_error",
        "Standard error of the distance",
        "Of a large model, ‖θ − θ₀‖ is estimated from a million random parameters.",
        detail=True,
    ),
    _kernel("kernel_lambda_max", "Largest eigenvalue", "λ_max of the tangent kernel.", detail=True),
    _kernel(
        "kernel_error",
        "Errors of the estimated kernel",
        "Standard errors of λ_min and λ_max of a kernel estimated from random directions.",
        detail=True,
    ),
    _kernel(
        "kernel_directions",
        "Random directions of the kernel",
        "From how many random directions of the outputs the kernel is estimated.",
        scale="linear",
        detail=True,
    ),
    _kernel(
        "condition_number",
        "Condition number",
        "λ_max/λ_min of the tangent kernel: how much slower the slowest direction is learned than the fastest.",
    ),
    _kernel(
        "effective_rank",
        "Effective rank",
        "(tr K)²/‖K‖_F², at most the number of samples: in how many directions the outputs move independently.",
        detail=True,
    ),
    _kernel(
        "alignment",
        "Alignment with the labels",
        "Cosine between the centered kernel and the kernel of the labels: it rises as the kernel learns the task.",
        scale="linear",
    ),
    _kernel(
        "dgm_constants",
        "Constants of DGM",
        "α at initialization, and the least eigenvalues λ₀ and μ₀ at infinite width.",
        detail=True,
    ),
    _layers(
        "layer_norms",
        "Smallest weight norm of each layer",
        "The smallest norm of a weight vector, for each layer.",
        scale="linear",
    ),
    _layers(
        "layer_shares", "Share of the tangent kernel", "Share of each layer in the kernel's trace.", scale="linear"
    ),
    _layers(
        "layer_directions",
        "Share of the directions",
        "Share in the kernel's trace of each layer's directions: under WeightNorm, or before a BatchNorm.",
        scale="linear",
        detail=True,
    ),
    _layers(
        "layer_lengths",
        "Share of the lengths",
        "Share in the kernel's trace of each layer's lengths: g of WeightNorm, γ of a BatchNorm.",
        scale="linear",
        detail=True,
    ),
    _layers(
        "layer_epsilon",
        "ε_N of each BatchNorm",
        "max 1/N over the features of each layer, from its running statistics: large where a feature hardly varies.",
    ),
    _layers(
        "layer_traces",
        "Trace of each layer's Hessian",
        "Trace of each layer's diagonal block of the loss Hessian, with HessianTrace(layers=True).",
        scale="linear",
    ),
    _layers(
        "layer_trace_errors", "Standard errors of the traces", "Standard error of each layer's trace.", detail=True
    ),
)
