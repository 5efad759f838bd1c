"""The panels of the sections Generalization and BatchNorm."""

from lightning_normtheory.view.panels.panel import HOLDS, Panel

__all__ = ["PANELS"]

PANELS = (
    Panel(
        "gap",
        "Generalization",
        "Generalization gap and its bounds",
        "log",
        "Validation loss − training loss, and the theorem's upper bounds.",
    ),
    Panel(
        "population",
        "Generalization",
        "Validation loss and its bound",
        "log",
        "Loss on validation samples, and the upper bound of the expected loss.",
    ),
    Panel(
        "rademacher",
        "Generalization",
        "Rademacher complexity",
        "log",
        "Upper bound for all networks of this architecture whose norms are no larger than the current ones.",
    ),
    Panel(
        "vacuous",
        "Generalization",
        "Vacuous bounds",
        "linear",
        "1 where a bound is no better than what a network of zeros achieves.",
        detail=True,
    ),
    Panel(
        "input_norm",
        "Generalization",
        "Input norm",
        "linear",
        "The largest ‖x‖; every bound is proportional to it.",
        detail=True,
    ),
    Panel("epsilon", "BatchNorm", "ε_N", "log", "max 1/N over all features: the bounds of BN grow with its powers."),
    Panel(
        "margins",
        "BatchNorm",
        "Margins at fit start",
        "log",
        "γ_a through the output weights and γ_c through BatchNorm's scales.",
    ),
    Panel(
        "distance_u",
        "BatchNorm",
        "Distance of the output weights from the start",
        "log",
        "‖U − U₀‖, and the radius of BN, Theorem 2.1.",
    ),
    Panel(
        "distance_v",
        "BatchNorm",
        "Distance of the hidden weights from the start",
        "log",
        "‖V − V₀‖, and the radius of BN, Theorem 2.1.",
    ),
    Panel("bn_conditions", "BatchNorm", "Conditions of BN, Theorem 2.1", "linear", HOLDS, detail=True),
    Panel(
        "width",
        "BatchNorm",
        "Required width",
        "log",
        "The smallest width that BN, Theorem 2.1, admits; out of reach in practice.",
        detail=True,
    ),
    Panel("bn_error", "BatchNorm", "Error bound", "log", "BN, Theorem 2.1, eq. (2).", detail=True),
    Panel(
        "bn_assumptions",
        "BatchNorm",
        "Assumptions on inputs and shift",
        "linear",
        "BN assumes max ‖x̄‖ ≤ 1 and no shift.",
        detail=True,
    ),
)
