"""Metrics of `ConvergenceCertificate`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="ConvergenceCertificate")
_keep_min = partial(_metric, extreme="min")
_keep_max = partial(_metric, extreme="max")
_flag = partial(_keep_min, panel="conditions", kind="flag")
_upper = partial(_keep_min, role="upper")

METRICS = (
    _flag("certificate_rsc", "restricted strong convexity", "1 if α > 0 (WN, Lemma 5.1, generalized)"),
    _keep_min("certificate_rsc_margin", "margin α", "margin of certificate_rsc, negative if it fails", "rsc_margin"),
    _flag("certificate_ntk", "kernel positive definite", "1 if λ_min of the full kernel is above its floor"),
    _keep_min(
        "certificate_ntk_margin",
        "margin λ_min − floor",
        "margin of certificate_ntk, negative if it fails",
        "kernel_margin",
    ),
    _flag("certificate_dgm_v", "DGM, Theorem 4.1", "1 if λ_min of the kernel is above λ₀/(2α²)"),
    _keep_min(
        "certificate_dgm_v_margin",
        "margin of Theorem 4.1",
        "margin of certificate_dgm_v, negative if it fails",
        "kernel_margin",
    ),
    _flag("certificate_dgm_g", "DGM, Theorem 4.2", "1 if λ_min of the kernel is above μ₀/2"),
    _keep_min(
        "certificate_dgm_g_margin",
        "margin of Theorem 4.2",
        "margin of certificate_dgm_g, negative if it fails",
        "kernel_margin",
    ),
    _keep_min(
        "theorem__*",
        "applies",
        "1 if network and run fit the theorem, as far as can be checked",
        "theorems",
        kind="flag",
    ),
    _keep_max(
        "certificate_alpha",
        "α",
        "constant α of restricted strong convexity (WN, Lemma 5.1, generalized); no guarantee if negative",
        "alpha",
        row="α of strong convexity",
    ),
    _upper("certificate_beta", "β", "bound on the Hessian along the guaranteed step", "smoothness"),
    _keep_max("certificate_step", "1/β", "guaranteed step size of gradient descent", "step"),
    _keep_max("rho", "ρ", "largest spectral distance of a hidden weight from its start", "distance"),
    _keep_max("rho_1", "ρ₁", "largest distance of an output weight from its start", "distance"),
    _keep_max("certificate_rho_2", "ρ₂", "length of the guaranteed step", "distance"),
    _upper("certificate_hessian_bound", "H̄", "bound on ‖∇²f‖", "predictor"),
    _upper("certificate_gradient_bound", "ϱ", "bound on ‖∂f/∂θ‖", "gradient_bounds"),
    _keep_max(
        "certificate_rate_measured",
        "measured",
        "L⁺/L per step, averaged since the last measurement",
        "rate",
        digits=6,
        row="L⁺/L per step",
    ),
    _upper("certificate_rate", "guaranteed, step 1/β", "guaranteed L⁺/L of a step 1/β", "rate"),
    _upper("certificate_own_rate", "guaranteed, own step", "guaranteed L⁺/L of a step with the run's η", "rate"),
    _keep_max("certificate_omega", "ηβ", "learning rate in units of 1/β; guaranteed below 2", "omega"),
    _keep_min(
        "certificate_ntk_ratio_bound", "(4s/n)·λ_min", "lower bound of R on the kernel's samples", "rsc", role="lower"
    ),
    _keep_min("ntk_mean_grad_norm_sq", "‖ḡ‖², kernel's samples", "‖ḡ‖² on the kernel's samples", "mean_gradient"),
    _keep_min(
        "ntk_mean_grad_norm_sq_bound",
        "λ_min/(nk)",
        "lower bound of that ‖ḡ‖² from the kernel",
        "mean_gradient",
        role="lower",
    ),
    _keep_max("wn_alpha", "α of WN", "α of WN, for the paper's own network", "alpha"),
    _upper("wn_beta", "β of WN", "β of WN, for the paper's own network", "smoothness"),
    _upper("wn_hessian_bound", "H̄ of WN", "bound on ‖∇²f‖ of WN, Theorem 4.1", "predictor"),
    _upper("wn_gradient_bound", "ϱ of WN", "bound on ‖∂f/∂θ‖ of WN, Lemma 4.1", "gradient_bounds"),
    _upper("certificate_lipschitz_bound", "Lipschitz bound", "bound on ‖∂f/∂x‖", "input_gradient"),
    _upper("wn_loss_bound", "φ̄ of WN", "bound on the loss of WN", "loss"),
    _keep_max("rsc_gamma", "γ of RSC", "largest ‖W‖₂/√m", "rsc_constants"),
    _upper("rsc_hessian_bound", "c_H/√m of RSC", "bound on ‖∇²f‖ of RSC, Theorem 4.1", "predictor"),
    _upper("rsc_gradient_bound", "ϱ of RSC", "bound on ‖∂f/∂θ‖ of RSC, Lemma 4.1", "gradient_bounds"),
    _upper("rsc_loss_bound", "c of RSC", "bound on the loss of RSC, Lemma 4.2", "loss"),
    _keep_min("rsc_kappa", "κ of RSC", "cosine |cos(∇L, ḡ)|", "rsc_constants"),
    _keep_max(
        "rsc_alpha", "α of RSC", "α of RSC, Theorem 5.1; generalized for networks other than the paper's", "alpha"
    ),
    _upper("rsc_beta", "β of RSC", "β of RSC, for the paper's own network", "smoothness"),
    _keep_min(
        "rsc_threshold",
        "threshold of RSC",
        "value that ‖ḡ‖² must exceed (RSC, Theorem 5.1, or generalized)",
        "mean_gradient",
        role="limit",
    ),
    _keep_min(
        "rsc_margin",
        "‖ḡ‖² − threshold",
        "margin of RSC, Theorem 5.1, or generalized; negative if it fails",
        "rsc_margin",
    ),
)
