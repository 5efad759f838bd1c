"""The glossary of the report and of docs/glossary.md."""

__all__ = ["GLOSSARY"]

# (term, explanation), papers first, then terms, then symbols.
GLOSSARY: tuple[tuple[str, str], ...] = (
    ("WN", "the paper “Optimization and Generalization Guarantees for Weight Normalization”"),
    (
        "RSC",
        "Banerjee, Cisneros-Velarde, Zhu, Belkin (2023), “Restricted Strong Convexity of Deep Learning Models with "
        "Smooth Activations”",
    ),
    (
        "BN",
        "the paper “Test Error Guarantees for Batch-Normalized Shallow ReLU Networks Trained with Gradient Descent”",
    ),
    (
        "DGM",
        "Dukler, Gu, Montúfar (2020), “Optimization Theory for ReLU Neural Networks Trained with Normalization Layers”",
    ),
    (
        "LIN",
        "Liu, Zhu, Belkin (2020), “On the Linearity of Large Non-linear Models: When and Why the Tangent Kernel is "
        "Constant”",
    ),
    ("probe", "fixed samples of the training set on which everything is measured"),
    (
        "tangent kernel",
        "K, with entries ⟨∂f(x)/∂θ, ∂f(x′)/∂θ⟩: how a step for one sample changes the output of another",
    ),
    ("floor", "error bound of λ_min(K) from rounding; an eigenvalue below it cannot be distinguished from zero"),
    ("certificate", "a sufficient condition for convergence, checked on the current weights"),
    ("generalized", "an assumption of the theorem fails, and the bound shown is a form that does not need it"),
    ("vacuous", "of a bound: no better than what a network with all outputs zero achieves"),
    ("edge of stability", "2/η; if λ_max is above it, plain gradient descent overshoots along the sharpest direction"),
    ("restricted strong convexity", "a lower bound on the loss along the step; it guarantees geometric decrease"),
    ("Rademacher complexity", "how well a class of networks can fit random signs; it bounds the generalization gap"),
    (
        "progressive bound",
        "a bound on the test error from losses on batches before they are trained on: in the first pass, each is new",
    ),
    ("generalization gap", "validation loss − training loss"),
    (
        "length, direction",
        "WeightNorm writes a weight as length times direction, w = g·v/‖v‖; with BatchNorm its scale γ is the length, "
        "the weight before it the direction",
    ),
    ("residual", "‖Hv − λv‖ of a computed eigenpair; some eigenvalue is at most this far from λ"),
    (
        "at least, at most (≥, ≤)",
        "the value itself is not known, only this bound of it: an iteration that has not converged, or the end of an "
        "interval",
    ),
    ("reach", "bound on how far WeightNorm's directions or lengths move while training converges at DGM's rate"),
    ("L", "mean loss on the probe"),
    ("f", "the network as a function: its outputs"),
    ("θ", "the trained parameters"),
    ("η", "learning rate"),
    ("w_min", "smallest norm of a weight vector in a normalized layer"),
    ("R", "‖∇L‖²/L, the ratio of restricted strong convexity"),
    ("ḡ", "gradient of the outputs, averaged over samples and outputs"),
    ("λ_max", "largest eigenvalue of the loss Hessian, the sharpness"),
    ("tr(∇²L)", "trace of the loss Hessian, the sum of its eigenvalues; estimated, with its standard error"),
    ("λ_min(K)", "least eigenvalue of the tangent kernel"),
    ("ΔK", "largest relative change ‖K − K₀‖/‖K₀‖ of the tangent kernel so far"),
    ("α, β", "constants of restricted strong convexity and smoothness; 1/β is the guaranteed step size"),
    ("L⁺/L", "loss after a step divided by the loss before it"),
    ("H̄, ϱ", "bounds on ‖∇²f‖ and ‖∂f/∂θ‖"),
    ("B", "‖∇²f‖/‖∇f‖², the curvature of an output against its gradient, the largest over a few samples (LIN)"),
    ("κ_f", "B times the residual f − y, in size; small where training is nearly that of the linearization (LIN)"),
    ("α*", "scale of WeightNorm's directions at which DGM's rate is best; 0 or infinite if that is a limit"),
    ("Λ", "tangent kernel V/α² + G of DGM's network: directions V/α², lengths G"),
    ("R_v, R_g", "distances of directions and lengths from their start within which DGM keeps Λ positive definite"),
    ("ε_N", "maximum of 1/N over the features of BatchNorm, with N = √(variance + eps)"),
    ("γ_a, γ_c", "margins through the output weights and through BatchNorm's scales at fit start"),
    ("γ(W)", "normalized margin of the network itself: smallest y·f(x)/(‖a‖‖c‖)"),
    ("Δ_V", "distance of the hidden weights from the start, each row relative to its N, in root mean square"),
    ("p_y", "probability that the network gives to the label"),
    ("δ", "probability with which a generalization bound, or a theorem of DGM, may fail"),
)
