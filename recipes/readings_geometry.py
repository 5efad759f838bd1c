"""What the panels of curvature and tangent kernel say."""

import math

from lightning_normtheory.callbacks.history import History
from lightning_normtheory.recipes.reading import Reading, number, percent, since, times, trend

__all__ = ["READINGS"]


def _sharpness(history: History) -> Reading | None:
    top = history.series("hessian_lambda_max")
    if not top:
        return None
    if any(name != "SGD" for name in history.optimizers):
        names = " and ".join(dict.fromkeys(history.optimizers))
        text = f"λ_max {trend(top)}. {names} rescales the gradient: 2/η, which is shown, is not its limit."
        return Reading("λ_max has no limit that is known for this optimizer.", text)
    for name, symbol in (("hessian_stability_limit", "the limit of stability"), ("hessian_edge", "2/η")):
        limit = history.series(name)
        if limit:
            return _against(top, limit, symbol)
    return Reading("λ_max is known.", f"λ_max {trend(top)}.")


def _against(top: dict[int, float], limit: dict[int, float], symbol: str) -> Reading:
    epochs = {epoch: value for epoch, value in top.items() if epoch in limit and math.isfinite(value)}
    if not epochs:
        return Reading("λ_max could not be measured.", "It is undefined in every epoch.", "bad")
    beyond = {epoch: value > limit[epoch] for epoch, value in epochs.items()}
    last = max(epochs)
    values = f"{number(epochs[last])} against {number(limit[last])}"
    start = since(epochs, beyond)
    if start is not None:
        return Reading(
            f"λ_max has crossed {symbol}.",
            f"λ_max has crossed {symbol}: {values} at last, beyond it since epoch {start}. Steps along the sharpest "
            "direction overshoot more each time, until the loss jumps or the curvature falls. Where training goes on "
            "nevertheless it is at the edge of stability; if the loss jumps, lower η.",
            "bad",
        )
    if any(beyond.values()):
        count = sum(beyond.values())
        return Reading(
            f"λ_max was beyond {symbol} and is below it now.",
            f"λ_max was beyond {symbol} in {count} of {len(epochs)} epochs, and is below it now: {values}.",
        )
    if epochs[last] > 0.9 * limit[last]:
        return Reading(f"λ_max is near {symbol}.", f"λ_max is near {symbol}: {values}. It may cross it soon.", "note")
    text = f"λ_max has stayed below {symbol}: {values} at last. Plain steps on a quadratic would be stable."
    return Reading(f"λ_max has stayed below {symbol}.", text, "good")


def _predictor(history: History) -> Reading | None:
    bounds = [history.last(name) for name in ("certificate_hessian_bound", "wn_hessian_bound")]
    known = [bound for bound in bounds if math.isfinite(bound)]
    norm = history.last("predictor_hessian_norm")
    if not known:
        return None if math.isnan(norm) else Reading("‖∇²f‖ has no bound here.", f"max ‖∇²f‖ is {number(norm)}.")
    if math.isnan(norm):
        text = f"The bound is {number(min(known))}. HessianTopEigenvalue(predictor_samples=8) measures what it bounds."
        return Reading("‖∇²f‖ is bounded and was not measured.", text)
    if norm > min(known):
        text = f"max ‖∇²f‖ is {number(norm)} and its bound {number(min(known))}. Please report it."
        return Reading("The bound of ‖∇²f‖ does not hold.", text, "bad")
    much = f", {times(min(known) / norm)} as much" if norm > 0 else ""
    text = f"max ‖∇²f‖ is {number(norm)}, the bound {number(min(known))}{much}."
    return Reading("The bound of ‖∇²f‖ holds.", text, "good")


def _least_eigenvalue(history: History) -> Reading | None:
    value, floor = history.last("ntk_lambda_min"), history.last("ntk_lambda_min_floor")
    if math.isnan(value) or math.isnan(floor):
        return None
    kind = {"trace": ", averaged over the outputs,", "sum": " of the sum of the outputs"}
    outputs = next((each["ntk_outputs"] for each in history.settings if "ntk_outputs" in each), "full")
    samples = number(history.last("ntk_samples"))
    if value <= floor:
        return Reading(
            "λ_min(K) cannot be told from zero.",
            f"λ_min(K) is {number(value)}, not above its floor {number(floor)}: the kernel of {samples} samples is "
            "singular, up to rounding, and some combination of their outputs does not move.",
            "bad",
        )
    text = (
        f"The kernel{kind.get(outputs, '')} is positive definite on {samples} samples: λ_min(K) is {number(value)}, "
        f"{times(value / floor) if floor > 0 else 'above'} its floor."
    )
    threshold = history.last("ntk_threshold")
    if math.isnan(threshold):
        return Reading("The tangent kernel is positive definite.", text, "good")
    above = value >= threshold
    text += f" It is {'above' if above else 'below'} DGM's threshold {number(threshold)}."
    finding = f"λ_min(K) is {'above' if above else 'below'} DGM's threshold."
    return Reading(finding, text, "good" if above else "bad")


def _shares(history: History) -> Reading | None:
    parts = {part: history.last(f"ntk_{part}_share") for part in ("direction", "length", "rest")}
    if any(map(math.isnan, parts.values())):
        return None
    names = {"direction": "the directions", "length": "the lengths", "rest": "other parameters"}
    text = ", ".join(f"{percent(share)} comes from {names[part]}" for part, share in parts.items())
    largest = max(parts, key=parts.__getitem__)
    return Reading(f"Most of the kernel comes from {names[largest]}.", f"Of the kernel's trace, {text}.")


def _parts(history: History) -> Reading | None:
    direction, length = history.last("ntk_direction_lambda_min"), history.last("ntk_length_lambda_min")
    if math.isnan(direction) or math.isnan(length):
        return None
    winner, loser = ("directions", "lengths") if direction >= length else ("lengths", "directions")
    high, low = max(direction, length), min(direction, length)
    # A kernel that is singular has an eigenvalue of rounding errors, of either sign.
    much = f"{times(high / low)} that of" if low > 0 and high / low < 1e9 else "above that of"
    text = f"λ_min of the {winner}' kernel is {number(high)}, {much} the {loser}' ({number(low)})."
    return Reading(f"The {winner} carry the convergence.", text)


def _change(history: History) -> Reading | None:
    change = history.last("ntk_change_max")
    if math.isnan(change):
        return None
    size = f"The kernel has changed by up to {percent(change) if change < 1 else f'{times(change)} its size'}"
    if change < 0.1:
        return Reading("The kernel hardly changes.", f"{size}: the network trains as its linearisation would.")
    if change < 0.5:
        return Reading("The kernel changes.", f"{size}: between linear training and learning of features.")
    return Reading(
        "The kernel changes much.", f"{size}: the network learns features, theories of linear training end here."
    )


def _condition_number(history: History) -> Reading | None:
    series = history.series("ntk_condition_number")
    if not series:
        return None
    last = history.last("ntk_condition_number")
    if not math.isfinite(last):
        return Reading("The condition number is infinite.", "λ_min(K) is below its floor.", "bad")
    return Reading("The condition number is finite.", f"λ_max/λ_min of the kernel {trend(series)}.")


def _alignment(history: History) -> Reading | None:
    series = history.series("ntk_label_alignment")
    if not series:
        return None
    first, *_, last = (*series.values(), *series.values())
    rises = last > first
    finding = "The kernel aligns with the labels." if rises else "The kernel does not align further with the labels."
    return Reading(finding, f"The alignment {trend(series)}.", "good" if rises else "note")


READINGS = {
    "Sharpness and the edge of stability": _sharpness,
    "The predictor's Hessian and its bounds": _predictor,
    "Least eigenvalue of the tangent kernel": _least_eigenvalue,
    "Length and direction: shares": _shares,
    "Length and direction: least eigenvalues": _parts,
    "Change of the kernel": _change,
    "Condition number": _condition_number,
    "Alignment with the labels": _alignment,
}
