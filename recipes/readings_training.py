"""What the panels of the overview and of the optimisation say."""

import math

from lightning_normtheory.callbacks.history import History
from lightning_normtheory.callbacks.metrics import find
from lightning_normtheory.recipes.reading import Reading, number, percent, times, trend

__all__ = ["READINGS"]


def _loss(history: History) -> Reading | None:
    loss = history.series("loss")
    if not loss:
        return None
    broken = [epoch for epoch, value in loss.items() if not math.isfinite(value)]
    if broken:
        return Reading("The loss is not finite.", f"It is {number(loss[broken[0]])} from epoch {broken[0]} on.", "bad")
    first, *_, last = (*loss.values(), *loss.values())
    text = f"The loss of the probe {trend(loss)}."
    if last > 1.01 * first:
        return Reading("The loss has risen.", text, "bad")
    return Reading("The loss has fallen.", text, "good") if last < first else Reading("The loss has not fallen.", text)


def _weight_norm(history: History) -> Reading | None:
    norms = history.series("min_weight_norm")
    if not norms:
        return None
    first, *_, last = (*norms.values(), *norms.values())
    if not all(0 < value < math.inf for value in (first, last)):
        text = f"w_min is {number(last)}, and was {number(first)} at first: normalisation divides by it."
        return Reading("A weight vector has vanished.", text, "bad")
    change = last / first - 1
    values = f"{number(first, 5)} at first, {number(last, 5)} at last"
    if change < -0.05:
        reason = (
            "the bounds of WN, which grow like 1/w_min², have become weaker. Weight decay and momentum make it fall"
        )
        return Reading("w_min has fallen.", f"w_min has fallen by {percent(-change)} ({values}): {reason}.", "note")
    if change < 0.05:
        return Reading("w_min is stable.", f"w_min is stable: {values}, as the theory expects.", "good")
    return Reading("w_min has risen.", f"w_min has risen by {percent(change)}: {values}.", "good")


def _ratio(history: History) -> Reading | None:
    ratio = history.series("rsc_ratio")
    if not ratio:
        return None
    text = f"R {trend(ratio)}. While it stays away from zero, every step gains a share of the loss."
    bound = history.last("certificate_ntk_ratio_bound")
    if bound > 0:
        text += f" The tangent kernel says it is at least {number(bound)} on its own samples."
    last = history.last("rsc_ratio")
    if last > 0:
        return Reading("R is positive.", text, "good")
    return Reading("R is not positive.", f"R is {number(last)}: there is no gradient left, or no loss.", "bad")


def _alpha(history: History) -> Reading | None:
    for name in ("certificate_alpha", "wn_alpha", "rsc_alpha"):
        alpha = history.series(name)
        if alpha:
            break
    else:
        return None
    positive = sum(value > 0 for value in alpha.values())
    last = number(history.last(name))
    if positive == len(alpha):
        why = "a step 1/β of gradient descent on the probe is guaranteed to shrink the loss by a factor"
        return Reading("α is positive: the theorem guarantees a rate.", f"α is {last}: {why}.", "good")
    if positive == 0:
        why = "the theorem guarantees no rate. That is the rule at practical widths, and no fault of the run"
        return Reading("α is negative: the theorem guarantees no rate.", f"α is {last}: {why}.")
    return Reading(
        "α is positive at times.", f"α is positive in {positive} of {len(alpha)} epochs, and {last} at last."
    )


def _beta(history: History) -> Reading | None:
    top = history.last("hessian_lambda_max")
    betas = [history.last(name) for name in ("certificate_beta", "wn_beta", "rsc_beta")]
    known = [beta for beta in betas if math.isfinite(beta)]
    if not known or not top > 0:
        return _only(history, "hessian_lambda_max", "β is not known for this network.") if top > 0 else None
    beta = min(known)
    if beta < top:
        return Reading(
            "β is below λ_max, which the theory excludes.",
            f"β is {number(beta)} and λ_max {number(top)}: one of the two is wrong. Please report it.",
            "bad",
        )
    text = f"β is {number(beta)}, {times(beta / top)} λ_max: the guaranteed step 1/β is that much smaller than 1/λ_max."
    return Reading("The bound β holds.", text, "good" if beta < 10 * top else "note")


def _rate(history: History) -> Reading | None:
    measured = history.last("certificate_rate_measured")
    if math.isnan(measured):
        return None
    parts = [f"A step has multiplied the loss by {number(measured, 6)}, on average since the last measurement"]
    for name, step in (("certificate_own_rate", "this step"), ("certificate_rate", "the step 1/β")):
        bound = history.last(name)
        if math.isfinite(bound):
            parts.append(f"{number(bound, 6)} is guaranteed for {step} of gradient descent on the probe")
    text = "; ".join(parts) + "."
    if measured > 1:
        return Reading("The loss is rising.", text, "bad")
    return Reading("The loss is falling.", text, "good")


def _loss_ratio(history: History) -> Reading | None:
    ratios = history.series("loss_ratio")
    if not ratios:
        return None
    falls = sum(ratio < 1 for ratio in ratios.values())
    largest = number(max(ratios.values()), 4)
    text = f"The loss fell in {falls} of {len(ratios)} measured epochs; the largest ratio is {largest}."
    if falls == len(ratios):
        return Reading("The loss fell in every epoch.", text, "good")
    return Reading(
        "The loss fell in most epochs." if 2 * falls > len(ratios) else "The loss rose in many epochs.", text
    )


def _mean_gradient(history: History) -> Reading | None:
    threshold, value = history.last("rsc_threshold"), history.last("mean_predictor_grad_norm_sq")
    if math.isnan(threshold) or math.isnan(value):
        return _only(history, "mean_predictor_grad_norm_sq", "RSC's threshold is known for its own networks only.")
    if value > threshold:
        return Reading(
            "‖ḡ‖² is above RSC's threshold.",
            f"‖ḡ‖² is {number(value)}, above {number(threshold)}: RSC, Theorem 5.1, guarantees a rate.",
            "good",
        )
    return Reading(
        "‖ḡ‖² is below RSC's threshold.",
        f"‖ḡ‖² is {number(value)} and would have to exceed {number(threshold)}: RSC, Theorem 5.1, guarantees nothing.",
    )


def _conditions(history: History) -> Reading | None:
    names = ("certificate_rsc", "certificate_ntk", "certificate_dgm_v", "certificate_dgm_g")
    known = {find(name).symbol: history.last(name) for name in names if not math.isnan(history.last(name))}
    if not known:
        return None
    holds = [symbol for symbol, value in known.items() if value == 1]
    fails = [symbol for symbol, value in known.items() if value != 1]
    text = f"{'Holds' if len(holds) == 1 else 'Hold'} now: {', '.join(holds)}. " if holds else ""
    text += f"{'Does' if len(fails) == 1 else 'Do'} not hold: {', '.join(fails)}." if fails else ""
    if not holds:
        return Reading("No sufficient condition holds.", f"{text} Training may converge all the same.")
    return Reading("A sufficient condition for convergence holds.", text.strip(), "good")


def _step(history: History) -> Reading | None:
    omega = history.last("certificate_omega")
    if math.isnan(omega):
        return None
    if omega < 2:
        return Reading("The run's own step is guaranteed.", f"ηβ is {number(omega)}, below 2.", "good")
    text = f"ηβ is {number(omega)}: a step {times(omega / 2)} smaller would be guaranteed."
    return Reading("The run's own step is not guaranteed.", text)


def _cost(history: History) -> Reading | None:
    seconds = history.series("seconds")
    if not seconds:
        return None
    total, known = sum(seconds.values()), history.rows[-1].time - history.rows[0].time
    text = f"Measuring took {number(total)} s in all, {number(total / len(seconds))} s at a time"
    if known > 0 and len(seconds) > 1:
        text += f", {percent(min(1.0, (total - next(iter(seconds.values()))) / known))} of the time of the run"
    return Reading("What measuring took.", f"{text}.")


def _only(history: History, name: str, remark: str) -> Reading | None:
    series = history.series(name)
    symbol = find(name).symbol
    return Reading(remark, f"{symbol} {trend(series)}. {remark}") if series else None


READINGS = {
    "Loss on the probe": _loss,
    "Smallest weight norm": _weight_norm,
    "What measuring costs": _cost,
    "Restricted strong convexity": _ratio,
    "α of restricted strong convexity": _alpha,
    "Smoothness: λ_max and its bound β": _beta,
    "Rate per step: measured and guaranteed": _rate,
    "Loss against the epoch before": _loss_ratio,
    "Mean gradient of the outputs": _mean_gradient,
    "The run's own step in units of 1/β": _step,
    "Conditions that hold": _conditions,
}
