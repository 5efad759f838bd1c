"""Readings of the panels about WeightNorm's distance from the start and DGM's theorems."""

import math
from collections.abc import Callable

from lightning_normtheory.record.history import History
from lightning_normtheory.view.readings.phrases import Reading, number, percent, trend

__all__ = ["READINGS"]


class _Way:
    """Compare the distance of the directions (v) or the lengths (g) with DGM's reach and radius."""

    def __init__(self, part: str, words: str) -> None:
        self._part, self._words = part, words

    def __call__(self, history: History) -> Reading | None:
        name = f"weightnorm_displacement_{self._part}"
        series = history.series(name)
        if not series:
            return None
        now = history.latest(name)
        reach, radius = (now.get(f"dgm_{kind}_{self._part}", math.nan) for kind in ("reach", "radius"))
        if math.isnan(radius):
            return Reading(f"The {self._words} have moved.", f"The largest distance from the start {trend(series)}.")
        sizes = f"The largest distance is {number(now[name])}, DGM's radius {number(radius)}"
        if now[name] > reach:
            text = f"{sizes}. Training at the theorem's rate would have stayed within {number(reach)}."
            return Reading(f"The {self._words} are farther than at the theorem's rate.", text, "bad")
        if now[name] <= radius:
            return Reading(f"The {self._words} are within DGM's radius.", f"{sizes}.", "good")
        return Reading(
            f"The {self._words} are beyond DGM's radius.",
            f"{sizes}: its proof needs a wider network, the run does not.",
        )


def _sign_changes(history: History) -> Reading | None:
    now = history.latest("dgm_sign_changes")
    share, bound = now.get("dgm_sign_changes", math.nan), now.get("dgm_sign_changes_bound", math.nan)
    if math.isnan(share) or math.isnan(bound):
        return None
    text = (
        f"{percent(share)} of the pairs of a sample and a unit have changed sides; {percent(bound)} were near enough."
    )
    if share < 0.05:
        return Reading("Few units have changed their side of the ReLU.", text, "good")
    return Reading("Many units have changed their side of the ReLU.", f"{text} DGM's proof is about few.")


def _rate(history: History) -> Reading | None:
    now = history.latest("dgm_rate_measured", "dgm_rate")
    measured, guaranteed = now.get("dgm_rate_measured", math.nan), now.get("dgm_rate", math.nan)
    if math.isnan(measured) or math.isnan(guaranteed):
        return None
    text = (
        f"A step has multiplied ‖f − y‖² by {number(measured, 4)} in the mean; DGM's rate is {number(guaranteed, 4)}."
    )
    if measured <= guaranteed:
        return Reading("It contracts at least as fast as DGM's theorem says.", text, "good")
    return Reading("It contracts more slowly than DGM's theorem says.", text, "bad")


def _step(history: History) -> Reading | None:
    series = history.series("dgm_step")
    if not series:
        return None
    last = history.last("dgm_step")
    text = f"η‖Λ‖ is {number(last)}; Theorem C.1 asks for at most 1/3."
    if last <= 1 / 3:
        return Reading("The step is as short as DGM asks.", text, "good")
    if last < 2:
        return Reading("The step is longer than DGM asks.", f"{text} A linear model is stable up to 2.")
    return Reading("The step is too long.", f"{text} Even a linear model is unstable from 2 on.", "bad")


def _best_rate(history: History) -> Reading | None:
    now = history.latest("dgm_rate_best", "dgm_rate_unnormalized")
    best, plain = now.get("dgm_rate_best", math.nan), now.get("dgm_rate_unnormalized", math.nan)
    if math.isnan(best) or math.isnan(plain):
        return None
    text = f"The factor per step is {number(best, 4)} with the best α and {number(plain, 4)} without WeightNorm"
    alpha = now.get("dgm_alpha_best", math.nan)
    where = {0.0: "α → 0", math.inf: "α → ∞"}.get(alpha, f"α = {number(alpha)}")
    if best < plain:
        return Reading("WeightNorm can be faster on these samples.", f"{text}; the best is {where}.")
    return Reading("WeightNorm is not faster on these samples.", f"{text}.")


READINGS: dict[str, Callable[[History], Reading | None]] = {
    "directions_distance": _Way("v", "directions"),
    "lengths_distance": _Way("g", "lengths"),
    "sign_changes": _sign_changes,
    "dgm_rate": _rate,
    "dgm_step": _step,
    "dgm_best_rate": _best_rate,
}
