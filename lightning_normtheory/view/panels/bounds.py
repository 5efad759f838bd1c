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
        "distance_u", "Distance of the output weights from the start", "‖U − U₀‖, and the radius of BN, Theorem 2.1."
    ),
    _batchnorm(
        "distance_v", "Distance of the hidden weights from the start", "‖V − V₀‖, and the radius of BN, Theorem 2.1."
    ),
    _batchnorm("bn_conditions", "Conditions of BN, Theorem 2.1", HOLDS, scale="linear", detail=True),
    _batchnorm(
        "width",
        "Required width",
        "The smallest width that BN, Theorem 2.1, admits; out of reach in practice.",
        detail=True,
    ),
    _batchnorm("bn_error", "Error bound", "BN, Theorem 2.1, eq. (2).", detail=True),
    _batchnorm(
        "bn_assumptions",
        "Assumptions on inputs and shift",
        "BN assumes max ‖x̄‖ ≤ 1 and no shift.",
        scale="linear",
        detail=True,
    ),
)
