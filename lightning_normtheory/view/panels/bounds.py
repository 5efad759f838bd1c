"""The panels of the sections Generalization and BatchNorm."""

from functools import partial

from lightning_normtheory.view.panels.panel import HOLDS, Panel

__all__ = ["PANELS"]

_generalization = partial(Panel, section="Generalization")
_batchnorm = partial(Panel, section="BatchNorm")

PANELS = (
    _generalization(
        "gap", "Generalization gap and its bounds", "Validation loss − training loss, and the theorem's upper bounds."
    ),
    _generalization(
        "population",
        "Validation loss and its bound",
        "Loss on validation samples, and the upper bound of the expected loss.",
    ),
    _generalization(
        "rademacher",
        "Rademacher complexity",
        "Upper bound for all networks of this architecture whose norms are no larger than the current ones.",
    ),
    _generalization(
        "progressive",
        "Test error in the first pass",
        "Bounds on the error, averaged over the weights of the first pass; measured, 1 − exp(−loss) on fresh batches.",
    ),
    _generalization(
        "fresh_batches",
        "Fresh batches",
        "How many batches the bound on the error of the first pass counts.",
        scale="linear",
        detail=True,
    ),
    _generalization(
        "vacuous",
        "Vacuous bounds",
        "1 where a bound is no better than what a network of zeros achieves.",
        scale="linear",
        detail=True,
    ),
    _generalization(
        "input_norm", "Input norm", "The largest ‖x‖; every bound is proportional to it.", scale="linear", detail=True
    ),
    _batchnorm("epsilon", "ε_N", "max 1/N over all features: the bounds of BN grow with its powers."),
    _batchnorm("margins", "Margins at fit start", "γ_a through the output weights and γ_c through BatchNorm's scales."),
    _batchnorm(
        "bn_margin",
        "Normalized margin",
        "γ(W) = min y·f(x)/(‖a‖‖c‖): positive once every sample of the probe is right.",
    ),
    _batchnorm(
        "distance_u",
        "Distance of the output weights from the start",
        "‖U − U₀‖, and the radii of BN, Theorem 2.1, and of Theorem 2.2, as printed, unproved.",
    ),
    _batchnorm(
        "distance_v", "Distance of the hidden weights from the start", "‖V − V₀‖, and the radius of BN, Theorem 2.1."
    ),
    _batchnorm(
        "delta_v",
        "Distance of the hidden weights, relative to N",
        "Δ_V, and γ/32: how far the reference weights of BN, Assumption 1.2, may be from the start.",
        detail=True,
    ),
    _batchnorm("bn_conditions", "Conditions of BN, Theorem 2.1", HOLDS, scale="linear", detail=True),
    _batchnorm(
        "width",
        "Required width",
        "The smallest width that BN, Theorem 2.1, admits; out of reach in practice.",
        detail=True,
    ),
    _batchnorm(
        "bn_error",
        "Error bound",
        "BN, Theorem 2.1, eq. (2), and Theorem 2.2, eq. (6), as printed, unproved.",
        detail=True,
    ),
    _batchnorm(
        "bn_assumptions",
        "Assumptions on inputs and shift",
        "BN assumes max ‖x̄‖ ≤ 1 and no shift.",
        scale="linear",
        detail=True,
    ),
)
