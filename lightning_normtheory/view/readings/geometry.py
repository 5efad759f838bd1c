"""Readings of the sections Curvature, Kernel and Layers."""

import math
from collections.abc import Callable

from lightning_normtheory.record.history import History
from lightning_normtheory.view.readings.phrases import Reading, at, number, percent, since, times, trend

__all__ = ["READINGS"]


def _sharpness(history: History) -> Reading | None:
    reading = _top_eigenvalue(history)
    return reading and reading._replace(text=reading.text + _interval(history))


def _interval(history: History) -> str:
    """State the last interval for λ_max of the training set, which few measurements have."""
    lower, upper = (history.series(f"hessian_lambda_max_{end}") for end in ("lower", "upper"))
    known = [e for e in lower if math.isfinite(lower[e]) and lower[e] < upper.get(e, math.nan) < math.inf]
    if not known:
        return ""
    last = max(known)
    ends = f"between {number(lower[last])} and {number(upper[last])}, up to two standard errors"
    return f" Of the training set it was {ends}, {at(last, history)}."


def _top_eigenvalue(history: History) -> Reading | None:
    top = {e: value for e, value in history.series("hessian_lambda_max").items() if not math.isnan(value)}
    if not top:
        return None
    if any(name != "SGD" for name in history.optimizers):
        names = " and ".join(dict.fromkeys(history.optimizers))
        text = f"λ_max {trend(top)}. The panel shows 2/η, the limit of plain SGD; that of {names} is not known."
        return Reading("The stability limit of this optimizer is not known.", text)
    for name, symbol in (("hessian_stability_limit", "the limit of stability"), ("hessian_edge", "2/η")):
        limit = history.series(name)
        both = {e: (v, limit[e]) for e, v in top.items() if not math.isnan(limit.get(e, math.nan))}
        if both:
            return _against(both, symbol, history)
    return Reading("λ_max was measured without a limit.", f"λ_max {trend(top)}.")


def _against(both: dict[int, tuple[float, float]], symbol: str, history: History) -> Reading:
    """λ_max and its limit, by epoch or step."""
    beyond = {position: top > limit for position, (top, limit) in both.items()}
    top, limit = both[max(both)]
    values = f"{number(top)} against {number(limit)}"
    start = since(beyond)
    if start is not None:
        return Reading(
            f"λ_max has crossed {symbol}.",
            f"λ_max has crossed {symbol}: {values} at last, beyond it since {history.axis} {start}. Steps along the "
            "sharpest direction overshoot more each time, until the loss jumps or the curvature falls. If the loss "
            "still falls, training is at the edge of stability; if it jumps, lower η.",
            "bad",
        )
    if any(beyond.values()):
        count = sum(beyond.values())
        return Reading(
            f"λ_max was beyond {symbol} and is below it now.",
            f"λ_max was beyond {symbol} in {count} of {len(both)} {history.unit}s, and is below it now: {values}.",
        )
    if top > 0.9 * limit:
        return Reading(f"λ_max is near {symbol}.", f"λ_max is near {symbol}: {values}. It may cross it soon.")
    text = f"λ_max has stayed below {symbol}: {values} at last. If the loss were quadratic, the steps would be stable."
    return Reading(f"λ_max has stayed below {symbol}.", text, "good")


def _trace(history: History) -> Reading | None:
    now = history.latest("hessian_trace")
    value, error = now.get("hessian_trace", math.nan), now.get("hessian_trace_error", math.nan)
    if math.isnan(value):
        return None
    text = f"tr(∇²L) is {number(value)}" + ("." if math.isnan(error) else f" ± {number(error)} (standard error).")
    if abs(value) <= 3 * error or value == 0:
        text += " More products give a smaller error: hvps, in NormTheory trace_hvps." if error > 0 else ""
        return Reading("The trace of the Hessian cannot be told from zero.", text)
    if value < 0:
        return Reading("Negative curvature outweighs positive: the trace of the Hessian is negative.", text)
    top = now.get("hessian_lambda_max", math.nan)
    if top > 0:
        text += f" λ_max alone is {percent(top / value)} of it."
    return Reading("The trace of the Hessian is positive.", text)


class _Bounded:
    """Compare a norm with the smallest of its bounds, in the last row that has both."""

    def __init__(self, symbol: str, measured: tuple[str, ...], bounds: tuple[str, ...], remedy: str = "") -> None:
        self._symbol, self._measured, self._bounds, self._remedy = symbol, measured, bounds, remedy

    def __call__(self, history: History) -> Reading | None:
        found = ((name, bound) for name in self._measured for bound in self._bounds if history.latest(bound, name))
        name, bound = next(found, ("", ""))
        if not name:
            return self._alone(history)
        now = history.latest(bound, name)
        norm = now[name]
        smallest = min(
            (now[each] for each in self._bounds if not math.isnan(now.get(each, math.nan))), default=math.nan
        )
        if math.isnan(smallest) or math.isnan(norm):
            return None
        if norm > smallest * (1 + 1e-3):  # the norm has an error, too
            least = "at least " if now.get(f"{name}_converged") == 0 else ""
            text = f"max {self._symbol} is {least}{number(norm)} and its bound {number(smallest)}. Please report it."
            return Reading(f"The bound of {self._symbol} does not hold.", text, "bad")
        if now.get(f"{name}_converged") == 0:
            text = f"max {self._symbol} is at least {number(norm)} (not converged), the bound {number(smallest)}."
            return Reading(f"The bound of {self._symbol} is not exceeded, as far as is known.", text)
        much = f", {times(smallest / norm)} as much" if norm > 0 else ""
        text = f"max {self._symbol} is {number(norm)}, the bound {number(smallest)}{much}."
        return Reading(f"The bound of {self._symbol} holds.", text, "good")

    def _alone(self, history: History) -> Reading | None:
        """Give the norm or the bound, if there is only one of them."""
        for name in self._measured:
            norm = history.last(name)
            if not math.isnan(norm):
                least = "at least " if history.latest(name).get(f"{name}_converged") == 0 else ""
                return Reading(f"{self._symbol} has no bound here.", f"max {self._symbol} is {least}{number(norm)}.")
        known = [history.last(name) for name in self._bounds if math.isfinite(history.last(name))]
        text = f"{self._symbol} is at most {number(min(known, default=math.nan))}.{self._remedy}"
        return Reading(f"{self._symbol} is bounded and was not measured.", text) if known else None


_predictor = _Bounded(
    "‖∇²f‖",
    ("predictor_hessian_norm",),
    ("certificate_hessian_bound", "wn_hessian_bound", "rsc_hessian_bound"),
    " HessianTopEigenvalue(predictor_samples=8) measures it.",
)
# The papers' own ϱ bound the gradient of each output, not the Jacobian of several.
_gradient = _Bounded("‖∂f/∂θ‖", ("predictor_gradient_norm", "ntk_gradient_norm"), ("certificate_gradient_bound",))
_input_gradient = _Bounded("‖∂f/∂x‖", ("predictor_input_gradient_norm",), ("certificate_lipschitz_bound",))


def _linearity(history: History) -> Reading | None:
    now = history.latest("linearity_b")
    ratio, kappa = now.get("linearity_b", math.nan), now.get("linearity_kappa", math.nan)
    if math.isnan(ratio):
        return None
    # All are proportional to ‖∇²f‖.
    from_below = now.get("predictor_hessian_norm_converged") == 0
    least = "at least " if from_below else ""
    text = f"B = ‖∇²f‖/‖∇f‖² is {least}{number(ratio)} on a few samples"
    if math.isnan(kappa) and from_below:
        return Reading("The outputs' curvature is known from below.", f"{text}: ‖∇²f‖ has not converged.")
    if math.isnan(kappa):
        return Reading(
            "The outputs' curvature was measured.", f"{text}: f bends little while it changes by much less than 1/B."
        )
    text += f", and κ_f, with the residuals, {least}{number(kappa)}"
    if kappa < 1 and from_below:
        return Reading("κ_f is known from below.", f"{text}: ‖∇²f‖ has not converged, so κ_f may be larger.")
    if kappa < 0.1:
        return Reading("κ_f is small.", f"{text}: near these parameters the network trains like its linearization.")
    if kappa < 1:
        return Reading("κ_f is neither small nor large.", f"{text}: between linear training and feature learning.")
    return Reading("κ_f is large.", f"{text}: its linearization does not describe how the network fits these samples.")


def _displacement(history: History) -> Reading | None:
    series, relative = history.series("theta_distance"), history.last("theta_distance_relative")
    if not series or math.isnan(history.last("theta_distance")):
        return None
    text = f"‖θ − θ₀‖ {trend(series)}"
    text += "." if math.isnan(relative) else f", {percent(relative) if relative < 1 else times(relative)} of ‖θ₀‖."
    return Reading("The parameters have moved." if history.last("theta_distance") > 0 else "Nothing has moved.", text)


def _least_eigenvalue(history: History) -> Reading | None:
    now = history.latest("ntk_lambda_min", "ntk_lambda_min_floor")
    value, floor = now.get("ntk_lambda_min", math.nan), now.get("ntk_lambda_min_floor", math.nan)
    if math.isnan(value) or math.isnan(floor):
        return None
    outputs = next((each["ntk_outputs"] for each in history.settings if "ntk_outputs" in each), "full")
    of = {"trace": ", averaged over the outputs,", "sum": " of the sum of the outputs"}.get(outputs, "")
    of = "" if history.outputs == 1 else of
    n = now.get("ntk_samples", math.nan)
    samples = number(n, 15)
    if value <= floor:
        return Reading(
            "λ_min(K) cannot be distinguished from zero.",
            f"λ_min(K) is {number(value)}, not above its floor {number(floor)}: the kernel{of} of {samples} samples is "
            "singular up to rounding, and some combination of their outputs does not move.",
            "bad",
        )
    text = (
        f"The kernel{of} is positive definite on {samples} samples: λ_min(K) is {number(value)}, "
        f"{times(value / floor) if floor > 0 else 'above'} its floor."
    )
    decay = now.get("ntk_lambda_min_decay", math.nan)
    if not math.isnan(decay):
        whole = n == history.training_samples
        set_ = "These are the training set" if whole else "Over the training set λ_min is at most that"
        text += f" {set_}: from a quarter of the samples to all it falls like n^−{number(decay)}."
    if "ntk_directions" in now:
        m, error = now["ntk_directions"], now.get("ntk_lambda_min_error", math.nan)
        known = "" if math.isnan(error) else f", with standard error {number(error)}"
        text += f" It is an estimate from {number(m)} random direction{'s' * (m > 1)} of the outputs{known}."
    threshold = now.get("ntk_threshold", math.nan)
    if not math.isnan(threshold):
        side = "above" if value >= threshold else "below"
        text += f" It is {side} DGM's threshold {number(threshold)}."
        return Reading(f"λ_min(K) is {side} DGM's threshold.", text, "good" if side == "above" else "bad")
    if of and now.get("certificate_ntk") == 1:
        text += " The kernel of all outputs is, too, on fewer samples."
    if not of or now.get("certificate_ntk") == 1:
        return Reading("The tangent kernel is positive definite.", text, "good")
    text += " The kernel of all outputs, which the theory needs, may still be singular."
    return Reading(f"The kernel{of.rstrip(',')}{',' * of.startswith(',')} is positive definite.", text)


def _shares(history: History) -> Reading | None:
    now = history.latest("ntk_direction_share")
    parts = {part: now.get(f"ntk_{part}_share", math.nan) for part in ("direction", "length", "rest")}
    if any(map(math.isnan, parts.values())):
        return None
    names = {"direction": "the directions", "length": "the lengths", "rest": "other parameters"}
    text = ", ".join(f"{percent(share)} comes from {names[part]}" for part, share in parts.items())
    largest = max(parts, key=parts.__getitem__)
    return Reading(f"The largest part of the kernel comes from {names[largest]}.", f"Of the kernel's trace, {text}.")


def _parts(history: History) -> Reading | None:
    now = history.latest("ntk_direction_lambda_min", "ntk_length_lambda_min")
    direction = now.get("ntk_direction_lambda_min", math.nan)
    length = now.get("ntk_length_lambda_min", math.nan)
    if math.isnan(direction) or math.isnan(length):
        return None
    winner, loser = ("directions", "lengths") if direction >= length else ("lengths", "directions")
    high, low = max(direction, length), min(direction, length)
    # The eigenvalue of a singular kernel is a rounding error, of either sign.
    if high <= now.get("ntk_lambda_min_floor", 0.0):
        text = f"λ_min of the directions' kernel is {number(direction)}, that of the lengths' {number(length)}."
        return Reading("Neither part alone is positive definite.", text)
    much = f"{times(high / low)} that of" if low > 0 and high / low < 1e9 else "above that of"
    text = f"λ_min of the {winner}' kernel is {number(high)}, {much} the {loser}' ({number(low)})."
    # DGM's theorems are about its own network.
    finding = "drive convergence" if "ntk_alpha" in now else "have the larger least eigenvalue"
    return Reading(f"The {winner} {finding}.", text)


def _change(history: History) -> Reading | None:
    change = history.last("ntk_change_max")
    if math.isnan(change):
        return None
    size = f"The kernel has changed by up to {percent(change) if change < 1 else f'{times(change)} its size'}"
    bound = history.last("ntk_change_bound")
    size += "" if math.isnan(bound) else f" (by LIN, Proposition 2.2, now at most {number(bound)})"
    if change < 0.1:
        return Reading("The kernel hardly changes.", f"{size}: the network trains like its linearization.")
    if change < 0.5:
        return Reading("The kernel changes.", f"{size}: between linear training and feature learning.")
    return Reading("The kernel changes much.", f"{size}: theories of linear training do not describe this run.")


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
    text = f"The alignment {trend(series)}."
    if last > 1.01 * first:
        return Reading("The kernel aligns with the labels.", text, "good")
    return Reading(
        "The kernel does not align further with the labels." if len(series) > 1 else "It was measured once.", text
    )


class _Layers:
    """Name the layer with the largest or smallest last value."""

    def __init__(self, quantity: str, words: str, *, smallest: bool = False) -> None:
        self._start, self._words, self._smallest = f"layers/{quantity}__", words, smallest

    def __call__(self, history: History) -> Reading | None:
        names = [name for name in history.names() if name.startswith(self._start)]
        values = {name.removeprefix(self._start): history.last(name) for name in names}
        known = {layer: value for layer, value in values.items() if math.isfinite(value)}
        if not known:
            return None
        layer = (min if self._smallest else max)(known, key=known.__getitem__)
        finding = f"{layer} has the {self._words}."
        if len(known) == 1:
            return Reading("There is one layer.", f"{layer} is the only such layer: {number(known[layer])}.")
        return Reading(finding, f"{layer} has the {self._words} of {len(known)} layers, {number(known[layer])}.")


READINGS: dict[str, Callable[[History], Reading | None]] = {
    "sharpness": _sharpness,
    "trace": _trace,
    "predictor": _predictor,
    "gradient_bounds": _gradient,
    "input_gradient": _input_gradient,
    "linearity": _linearity,
    "displacement": _displacement,
    "kernel": _least_eigenvalue,
    "shares": _shares,
    "parts": _parts,
    "change": _change,
    "condition_number": _condition_number,
    "alignment": _alignment,
    "layer_norms": _Layers("weight_norm", "smallest weight vector", smallest=True),
    "layer_shares": _Layers("ntk_share", "largest share of the kernel"),
    "layer_directions": _Layers("ntk_direction_share", "largest share of directions"),
    "layer_lengths": _Layers("ntk_length_share", "largest share of lengths"),
    "layer_traces": _Layers("hessian_trace", "largest estimated trace"),
    "layer_trace_errors": _Layers("hessian_trace_error", "largest standard error of a trace"),
    "layer_epsilon": _Layers("batchnorm_epsilon", "largest ε_N"),
}
