"""The panels of the overview and of the optimization."""

from lightning_normtheory.view.panels.panel import HOLDS, Line, Panel

__all__ = ["PANELS"]

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
        "w_min, the smallest norm of a weight vector in a normalized layer: the bounds of WN grow as it falls. "
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
        "Optimization",
        "Restricted strong convexity",
        (Line("rsc_ratio"), Line("certificate_ntk_ratio_bound", "lower")),
        "log",
        "R = ‖∇L‖²/L: the larger it is, the more a step of gradient descent gains. The tangent kernel bounds it from "
        "below, on the samples of the kernel.",
    ),
    Panel(
        "Optimization",
        "α of restricted strong convexity",
        (Line("certificate_alpha"), Line("wn_alpha"), Line("rsc_alpha")),
        "linear",
        "Where α is positive, the theorem guarantees geometric decrease. It is pessimistic: at practical widths α is "
        "usually negative.",
    ),
    Panel(
        "Optimization",
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
        "Optimization",
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
        "Optimization",
        "Loss against the epoch before",
        (Line("loss_ratio"),),
        "linear",
        "L_t/L_{t−1}: below 1 the loss of the probe has fallen since it was last measured.",
    ),
    Panel(
        "Optimization",
        "Gradient of the loss",
        (Line("grad_norm_sq"),),
        "log",
        "‖∇L‖² over the trained parameters.",
        detail=True,
    ),
    Panel(
        "Optimization",
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
        "Optimization",
        "The step that is guaranteed",
        (Line("certificate_step"),),
        "log",
        "1/β, the step of gradient descent on the probe that cannot raise the loss.",
        detail=True,
    ),
    Panel(
        "Optimization",
        "The run's own step in units of 1/β",
        (Line("certificate_omega"),),
        "log",
        "ηβ of plain SGD: below 2 its step is guaranteed not to raise the loss of the probe.",
        detail=True,
    ),
    Panel(
        "Optimization",
        "Conditions that hold",
        (
            Line("certificate_rsc"),
            Line("certificate_ntk"),
            Line("certificate_dgm_v"),
            Line("certificate_dgm_g"),
        ),
        "linear",
        f"The sufficient conditions for convergence that can be tested on this network. {HOLDS}",
    ),
    Panel(
        "Optimization",
        "Margin: restricted strong convexity",
        (Line("certificate_rsc_margin"), Line("rsc_margin")),
        "linear",
        "By how much the condition holds; negative where it does not.",
        detail=True,
    ),
    Panel(
        "Optimization",
        "Margin: tangent kernel",
        (Line("certificate_ntk_margin"), Line("certificate_dgm_v_margin"), Line("certificate_dgm_g_margin")),
        "linear",
        "By how much the kernel's conditions hold; negative where they do not.",
        detail=True,
    ),
    Panel(
        "Optimization",
        "Distance from the start",
        (Line("rho"), Line("rho_1"), Line("certificate_rho_2")),
        "log",
        "How far hidden weights (ρ) and output weights (ρ₁) have moved, and how far the guaranteed step goes (ρ₂).",
        detail=True,
    ),
    Panel(
        "Optimization",
        "Constants of RSC",
        (Line("rsc_gamma"), Line("rsc_kappa")),
        "linear",
        "γ = max ‖W‖₂/√m, and κ, the cosine between the gradient of the loss and the mean gradient of the outputs.",
        detail=True,
    ),
)
