"""The panels of the section WeightNorm."""

from functools import partial

from lightning_normtheory.view.panels.panel import Panel

__all__ = ["PANELS"]

_weightnorm = partial(Panel, section="WeightNorm")

PANELS = (
    _weightnorm(
        "directions_distance",
        "Distance of the directions from the start",
        "max ‖v − v₀‖ over all units. For DGM's network also how far training at its rate can go, and R_v, within "
        "which its proof keeps the kernel positive definite.",
    ),
    _weightnorm(
        "lengths_distance",
        "Distance of the lengths from the start",
        "max |g − g₀| over all units. For DGM's network also how far training at its rate can go, and R_g.",
    ),
    _weightnorm(
        "sign_changes",
        "Sign changes of the ReLU",
        "Share of the pairs of a sample and a unit that are on the other side of the ReLU than at the start, and of "
        "those near enough to the boundary to change.",
    ),
    _weightnorm(
        "dgm_rate",
        "Contraction per step: measured and guaranteed",
        "Factor of ‖f − y‖² per step: the mean since the start, and what DGM guarantees for wide networks.",
        scale="linear",
    ),
    _weightnorm(
        "dgm_step",
        "Step size of DGM's theorems",
        "η‖Λ‖ of gradient descent on ½Σ(f − y)²: Theorem C.1 asks for at most 1/3.",
        scale="linear",
    ),
    _weightnorm(
        "dgm_best_rate",
        "Best rate and rate without WeightNorm",
        "1 − λ_min/(3λ_max) of the infinite-width kernels with the best α and without WeightNorm (DGM, Proposition 2).",
        scale="linear",
        detail=True,
    ),
    _weightnorm(
        "dgm_best_scale",
        "Best scale α*",
        "The α with the smallest condition number of V∞/α² + G∞; 0 or infinite if that is a limit.",
        scale="linear",
        detail=True,
    ),
    _weightnorm(
        "dgm_width",
        "Width in DGM's theorems",
        "What the theorems ask for, without the constant factor that they do not name; out of reach in practice.",
        detail=True,
    ),
)
