"""The panels of the sections Overview and Optimization."""

from lightning_normtheory.view.panels.panel import HOLDS, Panel

__all__ = ["PANELS"]

PANELS = (
    Panel(
        "loss",
        "Overview",
        "Loss on the probe",
        "log",
        "Mean loss on the probe, the fixed samples that everything is measured on, with dropout off.",
    ),
    Panel(
        "weight_norm",
        "Overview",
        "Smallest weight norm",
        "linear",
        "w_min, the smallest norm of a weight vector in a normalized layer: the bounds of WN grow as it falls. "
        "Plain gradient descent cannot make it fall in WeightNorm layers.",
    ),
    Panel("cost", "Overview", "Measurement time", "linear", "Seconds that each measurement took.", detail=True),
    Panel(
        "skipped",
        "Overview",
        "Skipped measurements",
        "linear",
        "1 for an epoch that max_overhead skipped.",
        detail=True,
    ),
    Panel(
        "rsc",
        "Optimization",
        "Restricted strong convexity",
        "log",
        "R = ‖∇L‖²/L: the larger it is, the more a step of gradient descent reduces the loss. The tangent kernel gives "
        "a lower bound on the samples of the kernel.",
    ),
    Panel(
        "alpha",
        "Optimization",
        "α of restricted strong convexity",
        "linear",
        "Where α is positive, the theorem guarantees geometric decrease. It is pessimistic: at practical widths α is "
        "usually negative.",
    ),
    Panel(
        "smoothness",
        "Optimization",
        "Smoothness: λ_max and its bound β",
        "log",
        "β bounds the Hessian along a step. The closer it is to λ_max, the larger is the guaranteed step 1/β.",
    ),
    Panel(
        "rate",
        "Optimization",
        "Rate per step: measured and guaranteed",
        "linear",
        "L⁺/L of one step: measured, and guaranteed for gradient descent on the probe from the same point, with the "
        "step 1/β and, where ηβ < 2, with the run's own η.",
    ),
    Panel(
        "loss_ratio",
        "Optimization",
        "Loss relative to the previous measurement",
        "linear",
        "L_t/L_{t−1}: below 1 the loss on the probe has fallen since the previous measurement.",
    ),
    Panel("gradient", "Optimization", "Gradient of the loss", "log", "‖∇L‖² over the trained parameters.", detail=True),
    Panel(
        "mean_gradient",
        "Optimization",
        "Mean gradient of the outputs",
        "log",
        "‖ḡ‖², which RSC requires to exceed its threshold, and the lower bound from the tangent kernel.",
    ),
    Panel(
        "step",
        "Optimization",
        "Guaranteed step size",
        "log",
        "1/β: a step of gradient descent on the probe with this size cannot raise the loss.",
        detail=True,
    ),
    Panel(
        "omega",
        "Optimization",
        "Learning rate in units of 1/β",
        "log",
        "ηβ of plain SGD: below 2, a full-batch step on the probe is guaranteed not to raise the loss.",
        detail=True,
    ),
    Panel(
        "conditions",
        "Optimization",
        "Convergence conditions",
        "linear",
        f"Sufficient conditions for convergence that can be tested on this network. {HOLDS}",
    ),
    Panel(
        "rsc_margin",
        "Optimization",
        "Margin: restricted strong convexity",
        "linear",
        "Margin by which the condition holds; negative where it fails.",
        detail=True,
    ),
    Panel(
        "kernel_margin",
        "Optimization",
        "Margin: tangent kernel",
        "linear",
        "Margins by which the conditions on the kernel hold; negative where they fail.",
        detail=True,
    ),
    Panel(
        "distance",
        "Optimization",
        "Distance from the start",
        "log",
        "Distance of the hidden weights (ρ) and output weights (ρ₁) from fit start, and length of the guaranteed step "
        "(ρ₂).",
        detail=True,
    ),
    Panel(
        "rsc_constants",
        "Optimization",
        "Constants of RSC",
        "linear",
        "γ = max ‖W‖₂/√m, and κ, the cosine between the gradient of the loss and the mean gradient of the outputs.",
        detail=True,
    ),
)
