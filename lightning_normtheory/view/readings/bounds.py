"""Readings of the sections Generalization and BatchNorm."""

import math
from collections.abc import Callable

from lightning_normtheory.record.history import History
from lightning_normtheory.record.wording import sentence
from lightning_normtheory.view.readings.phrases import Reading, at, number, percent, times, trend

__all__ = ["READINGS"]


def _gap(history: History) -> Reading | None:
    now = history.latest("generalization_gap", "generalization_bound") or history.latest("generalization_bound")
    now = now or history.latest("generalization_gap")
    gap, bound = now.get("generalization_gap", math.nan), now.get("generalization_bound", math.nan)
    vacuous = now.get("generalization_bound_vacuous") == 1
    if math.isnan(bound):
        if math.isnan(gap):
            return None
        why = history.reason("generalization_bound")
        text = sentence(f"The gap is {number(gap)}; there is no bound for this run{f': {why}' if why else ''}")
        return Reading("There is no bound on the gap.", text)
    measured = "The gap was not measured" if math.isnan(gap) else f"The gap is {number(gap)}"
    if gap > bound:
        text = f"{measured}, above its bound {number(bound)}, which should hold with probability 1 − δ."
        return Reading("The gap exceeds its bound.", text, "bad")
    if vacuous:
        why = "as such bounds usually are: all-zero outputs do better"
        text = f"{measured}. The bound {number(bound)} is vacuous, {why}."
        return Reading("The generalization bound is vacuous.", text)
    return Reading("The generalization bound is not vacuous.", f"{measured}, the bound {number(bound)}.", "good")


def _new_samples(history: History) -> Reading | None:
    losses = {e: v for e, v in history.series("generalization_validation_loss").items() if math.isfinite(v)}
    if not losses:
        return None
    best = min(losses, key=losses.__getitem__)
    last = losses[max(losses)]
    if last > losses[best] + 0.05 * abs(losses[best]) and best != max(losses):
        text = f"The validation loss is {number(last)}, up from {number(losses[best])} {at(best, history)}."
        return Reading("The validation loss has passed its minimum.", text, "bad")
    return Reading("The validation loss has not passed its minimum.", f"The validation loss {trend(losses)}.", "good")


def _rademacher(history: History) -> Reading | None:
    series = history.series("rademacher_bound")
    if not series:
        return None
    if math.isnan(history.last("rademacher_bound")):
        why = history.reason("rademacher_bound")
        text = sentence(f"There is no bound{f': {why}' if why else ' for this network'}")
        return Reading("There is no bound on the complexity.", text)
    first, *_, last = (*series.values(), *series.values())
    text = f"The bound {trend(series)}: it follows the norms of the layers."
    if len(series) == 1:
        return Reading("The complexity bound was measured once.", text)
    return Reading(
        "The complexity bound grows." if last > 1.01 * first else "The complexity bound does not grow.", text
    )


def _progressive(history: History) -> Reading | None:
    now = history.latest("progressive_error_bound", "progressive_error_bound_sharper", "progressive_derivative")
    if not now:
        return None
    printed, sharper = now["progressive_error_bound"], now["progressive_error_bound_sharper"]
    bound = min(printed, sharper)
    if math.isnan(bound):
        return None
    batches = now.get("progressive_batches", math.nan)
    measured = f"The average of 1 − p_y on {batches:.0f} fresh batches is {number(now['progressive_derivative'])}"
    if bound >= 1:
        text = f"{measured}; the bound on the error, {number(bound)}, is not below 1."
        return Reading("The bound on the error of the first pass is vacuous.", text)
    text = f"{measured}: with probability 1 − δ, the weights of the first pass err in at most {percent(bound)} of new"
    text += " samples on average, if batches are independent draws and no sample of that pass was repeated; of streams"
    text += " and custom samplers this is not checked."
    return Reading("The bound on the error of the first pass is not vacuous.", text, "good")


def _epsilon(history: History) -> Reading | None:
    series = history.series("batchnorm_epsilon")
    if not series:
        return None
    return Reading("ε_N was measured.", f"ε_N {trend(series)}: the least varying feature is scaled by this.")


def _margins(history: History) -> Reading | None:
    a, c = history.last("batchnorm_gamma_a"), history.last("batchnorm_gamma_c")
    if math.isnan(a) or math.isnan(c):
        return None
    gap = history.last("batchnorm_gamma_gap")
    if a + c <= gap:
        text = f"γ_a is {number(a)} and γ_c {number(c)}, not above their error {number(gap)}."
        return Reading("There is no margin at the start.", text)
    ratio = f", {times(a / c)} γ_c" if c > 0 else ""
    return Reading("The features at the start separate the classes.", f"γ_a is {number(a)}{ratio}.", "good")


def _margin(history: History) -> Reading | None:
    series = history.series("batchnorm_margin")
    if not series or math.isnan(history.last("batchnorm_margin")):
        return None
    text = f"γ(W) {trend(series)}."
    if history.last("batchnorm_margin") > 0:
        return Reading("The network separates the classes of the probe.", text, "good")
    return Reading("The network errs on samples of the probe.", text)


def _delta_v(history: History) -> Reading | None:
    now = history.latest("batchnorm_delta_v", "batchnorm_delta_v_allowed")
    if not now:
        return None
    moved, allowed = now["batchnorm_delta_v"], now["batchnorm_delta_v_allowed"]
    text = f"Δ_V is {number(moved)}, γ/32 is {number(allowed)}"
    if moved <= allowed:
        return Reading("The hidden weights are allowed as reference weights.", f"{text}.", "good")
    text += ": what the features have gained since the start does not count for γ."
    return Reading("The hidden weights are too far for reference weights.", text)


class _Way:
    """Compare a distance with its radius."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __call__(self, history: History) -> Reading | None:
        series = history.series(f"batchnorm_displacement_{self._part}")
        if not series:
            return None
        now = history.latest(f"batchnorm_displacement_{self._part}")
        distance = now[f"batchnorm_displacement_{self._part}"]
        radius = now.get(f"batchnorm_radius_{self._part}", math.nan)
        if math.isnan(radius):
            return Reading("The weights have moved.", f"The distance from the start {trend(series)}.")
        sizes = f"The distance is {number(distance)}, the radius {number(radius)}"
        if distance <= radius:
            return Reading("The weights are within the theorem's radius.", f"{sizes}.", "good")
        return Reading("The weights are beyond the theorem's radius.", f"{sizes}: the theorem does not cover this.")


READINGS: dict[str, Callable[[History], Reading | None]] = {
    "gap": _gap,
    "population": _new_samples,
    "rademacher": _rademacher,
    "progressive": _progressive,
    "epsilon": _epsilon,
    "margins": _margins,
    "bn_margin": _margin,
    "delta_v": _delta_v,
    "distance_u": _Way("u"),
    "distance_v": _Way("v"),
}
