"""The panels of the sections Overview and Optimization."""

from functools import partial

from lightning_normtheory.view.panels.panel import HOLDS, Panel

__all__ = ["PANELS"]

_overview = partial(Panel, section="Overview")
_optimization = partial(Panel, section="Optimization")

PANELS = (
    _overview(
        "loss",
        "Loss on the probe",
        "Mean loss on the probe, the fixed samples that everything is measured on, with dropout off.",
    ),
    _overview(
        "weight_norm",
        "Smallest weight norm",
        "w_min, the smallest norm of a weight vector in a normalized layer: the bounds of WN grow as it falls. Plain "
        "gradient descent cannot make it fall in WeightNorm layers.",
        scale="linear",
    ),
    _overview("cost", "Measurement time", "Seconds that each measurement took.", scale="linear", detail=True),
    _overview(
        "skipped", "Skipped measurements", "1 if max_overhead skipped the measurement.", scale="linear", detail=True
    ),
    _optimization(
        "rsc",
        "Restricted strong convexity",
        "R = ‖∇L‖²/L: the larger it is, the more a step of gradient descent reduces the loss. The tangent kernel "
        "gives a lower bound on the samples of the kernel. On few samples R also contains their noise; the "
        "estimate for the training set does not.",
    ),
    _optimization(
        "alpha",
        "α of restricted strong convexity",
        "Where α is positive, the theorem guarantees geometric decrease. It is pessimistic: at practical widths α is "
        "usually negative.",
        scale="linear",
    ),
    _optimization(
        "smoothness",
        "Smoothness: λ_max and its bound β",
        "β bounds the Hessian along a step. The closer it is to λ_max, the larger is the guaranteed step 1/β.",
    ),
    _optimization(
        "rate",
        "Rate per step: measured and guaranteed",
        "L⁺/L of one step: measured, and guaranteed for gradient descent on the probe from the same point, with the "
        "step 1/β and, where ηβ < 2, with the run's own η.",
        scale="linear",
    ),
    _optimization(
        "loss_ratio",
        "Loss relative to the previous measurement",
        "L_t/L_{t−1}: below 1 the loss on the probe has fallen since the previous measurement.",
        scale="linear",
    ),
    _optimization(
        "gradient",
        "Gradient of the loss",
        "‖∇L‖² over the trained parameters: on the probe, and estimated for the training set.",
        detail=True,
    ),
    _optimization(
        "sampling_error",
        "Errors of the estimates for the training set",
        "Standard errors of R, ‖∇L‖², ‖ḡ‖² and vᵀHv of the training set, by the draw of the samples: ± 2 errors hold "
        "the value of the whole set in about 95 % of draws.",
        detail=True,
    ),
    _optimization(
        "mean_gradient",
        "Mean gradient of the outputs",
        "‖ḡ‖², which RSC requires to exceed its threshold, and the lower bound from the tangent kernel.",
    ),
    _optimization(
        "step",
        "Guaranteed step size",
        "1/β: a step of gradient descent on the probe with this size cannot raise the loss.",
        detail=True,
    ),
    _optimization(
        "omega",
        "Learning rate in units of 1/β",
        "ηβ of plain SGD: below 2, a full-batch step on the probe is guaranteed not to raise the loss.",
        detail=True,
    ),
    _optimization(
        "theorems",
        "Theorems whose network this is",
        "Whether the run fits them, too: gradient descent on the whole training set, the step, α > 0. The table of the "
        f"theorems has every assumption. {HOLDS}",
        scale="linear",
    ),
    _optimization(
        "conditions",
        "Convergence conditions",
        f"Sufficient conditions for convergence that can be tested on this network. {HOLDS}",
        scale="linear",
    ),
    _optimization(
        "rsc_margin",
        "Margin: restricted strong convexity",
        "Margin by which the condition holds; negative where it fails.",
        scale="linear",
        detail=True,
    ),
    _optimization(
        "kernel_margin",
        "Margin: tangent kernel",
        "Margins by which the conditions on the kernel hold; negative where they fail.",
        scale="linear",
        detail=True,
    ),
    _optimization(
        "distance",
        "Distance from the start",
        "Distance of the hidden weights (ρ) and output weights (ρ₁) from fit start, and length of the guaranteed "
        "step (ρ₂).",
        detail=True,
    ),
    _optimization(
        "rsc_constants",
        "Constants of RSC",
        "γ = max ‖W‖₂/√m, and κ, the cosine between the gradient of the loss and the mean gradient of the outputs.",
        scale="linear",
        detail=True,
    ),
)
