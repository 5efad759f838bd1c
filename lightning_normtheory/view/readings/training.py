"""Readings of the sections Overview and Optimization."""

import math
from collections.abc import Mapping

from lightning_normtheory.record.history import History
from lightning_normtheory.record.metrics import find_metric
from lightning_normtheory.record.wording import join_names, sentence
from lightning_normtheory.view.readings.phrases import Reading, at, number, percent, times, trend
from lightning_normtheory.view.readings.theorems import what_fails

__all__ = ["READINGS"]


def _loss(history: History) -> Reading | None:
    loss = history.series("loss")
    if not loss:
        return None
    broken = [position for position, value in loss.items() if not math.isfinite(value)]
    if broken:
        when = f"It was {number(loss[broken[0]])} {at(broken[0], history)}"
        text = f"{when}, and not finite in {len(broken)} of {len(loss)} {history.unit}s."
        still = not math.isfinite(history.last("loss"))
        return Reading("The loss is not finite." if still else "The loss was not finite at times.", text, "bad")
    first, *_, last = (*loss.values(), *loss.values())
    text = f"The loss of the probe {trend(loss)}."
    if last > first + 0.01 * abs(first):
        return Reading("The loss has risen.", text, "bad")
    return Reading("The loss has fallen.", text, "good") if last < first else Reading("The loss has not fallen.", text)


def _weight_norm(history: History) -> Reading | None:
    norms = history.series("min_weight_norm")
    if not norms:
        return None
    first, *_, last = (*norms.values(), *norms.values())
    if not all(0 < value < math.inf for value in (first, last)):
        text = f"w_min is {number(last)}, and was {number(first)} at first: normalization divides by it."
        return Reading("A weight vector has vanished or grown without limit.", text, "bad")
    if len(norms) == 1:
        return Reading("w_min was measured once.", f"w_min is {number(last, 5)}.")
    change = last / first - 1
    values = f"{number(first, 5)} at first, {number(last, 5)} at last"
    if change < -0.05:
        reason = (
            "the bounds of WN, which grow like 1/w_min², have become weaker. Weight decay and momentum make it fall"
        )
        return Reading("w_min has fallen.", f"w_min has fallen by {percent(-change)} ({values}): {reason}.")
    if change < 0.05:
        return Reading("w_min is stable.", f"w_min is stable: {values}.", "good")
    return Reading("w_min has risen.", f"w_min has risen by {percent(change)}: {values}.", "good")


def _ratio(history: History) -> Reading | None:
    ratio = history.series("rsc_ratio")
    if not ratio:
        return None
    now = history.latest("rsc_ratio")
    text = f"R {trend(ratio)}. While it stays away from zero, a step can reduce the loss by a share of it."
    bound = now.get("certificate_ntk_ratio_bound", math.nan)
    if bound > 0:
        text += f" The tangent kernel guarantees at least {number(bound)} on its own samples."
    text += _of_training_set(now)
    if now["rsc_ratio"] == 0:
        return Reading("R is zero.", "R is 0: the gradient has vanished.", "bad")
    return Reading("R is positive.", text)


def _of_training_set(now: Mapping[str, float]) -> str:
    value, error = now.get("rsc_ratio_train", math.nan), now.get("rsc_ratio_train_error", math.nan)
    if math.isnan(value) or math.isnan(error):
        return ""
    if error == 0:
        return " The probe is the training set."
    if value <= 2 * error:
        return (
            f" Of the training set R is at most {number(max(value + 2 * error, 0.0))}, by the draw of the probe: the"
            " noise of few samples hides it."
        )
    return f" Of the training set R is {number(value)} ± {number(error)} (standard error), by the draw of the probe."


def _alpha(history: History) -> Reading | None:
    alpha: dict[int, float] = {}
    for name in ("certificate_alpha", "wn_alpha", "rsc_alpha"):  # each is a guarantee of its own
        for position, value in history.series(name).items():
            if not math.isnan(value):
                alpha[position] = max(value, alpha.get(position, -math.inf))
    if not alpha:
        return None
    positive = sum(value > 0 for value in alpha.values())
    last = number(alpha[max(alpha)])
    if positive == len(alpha):
        why = "a step 1/β of gradient descent on the probe is guaranteed to multiply the loss by a factor below 1"
        return Reading("α is positive: the theorem guarantees a rate.", f"α is {last}: {why}.", "good")
    if positive == 0:
        why = "the theorem guarantees no rate. This is usual at practical widths and not a fault of the run"
        return Reading("α is negative: the theorem guarantees no rate.", f"α is {last}: {why}.")
    often = f"{positive} of {len(alpha)} {history.unit}s"
    return Reading("α is positive at times.", f"α is positive in {often}, and {last} at last.")


def _beta(history: History) -> Reading | None:
    names = ("certificate_beta", "wn_beta", "rsc_beta")
    # Two callbacks may measure at different times: only values of one row can be compared.
    name = next((name for name in names if history.latest("hessian_lambda_max", name)), None)
    if name is None:
        return _only(history, "hessian_lambda_max", "β is unknown for this network.")
    now = history.latest("hessian_lambda_max", name)
    top = now["hessian_lambda_max"]
    beta = min((now[name] for name in names if not math.isnan(now.get(name, math.nan))), default=math.nan)
    if math.isnan(beta) or not top > 0:
        return _only(history, "hessian_lambda_max", "λ_max cannot be compared with β.")
    if beta < top * (1 - 1e-3):  # λ_max has an error, too
        return Reading(
            "β is below λ_max, which the theory excludes.",
            f"β is {number(beta)} and λ_max {number(top)}: one of the two is wrong. Please report it.",
            "bad",
        )
    text = f"β is {number(beta)}, {times(beta / top)} λ_max: the guaranteed step 1/β is that much smaller than 1/λ_max."
    return Reading("The bound β holds.", text, "good" if beta < 10 * top else "note")


def _rate(history: History) -> Reading | None:
    now = history.latest("certificate_rate_measured")
    measured = now.get("certificate_rate_measured", math.nan)
    if math.isnan(measured):
        return None
    parts = [f"A step has multiplied the loss by {number(measured, 6)}, on average since the last measurement"]
    for name, step in (("certificate_own_rate", "the run's η"), ("certificate_rate", "the step 1/β")):
        if math.isfinite(now.get(name, math.nan)):
            parts.append(f"gradient descent on the probe is guaranteed {number(now[name], 6)} with {step}")
    text = "; ".join(parts) + "."
    if measured > 1:
        return Reading("The loss is rising.", text, "bad")
    if measured > now.get("certificate_rate", 1.0):
        text += " The guarantee does not cover the run's steps, which use batches."
        return Reading("The loss is falling, more slowly than the guaranteed step would reduce it.", text)
    return Reading("The loss is falling.", text, "good")


def _loss_ratio(history: History) -> Reading | None:
    ratios, losses = history.series("loss_ratio"), history.series("loss")
    # Where the ratio is undefined, as for a loss below zero, the losses themselves still compare.
    before = dict(zip([*losses][1:], losses.values()))
    fell = {each: losses[each] < loss for each, loss in before.items() if math.isfinite(losses[each] - loss)}
    fell.update({each: ratio < 1 for each, ratio in ratios.items() if not math.isnan(ratio)})
    fell = {each: fell[each] for each in ratios if each in fell}
    if not fell:
        return None
    falls, known = sum(fell.values()), [ratio for ratio in ratios.values() if not math.isnan(ratio)]
    if history.axis == "step":
        down, up, counted = "was lower than before", "was higher than before", f"{len(fell)} measurements"
    else:
        down, up, counted = "fell", "rose", f"{len(fell)} measured epochs"
    text = f"The loss {down} in {falls} of {counted}"
    text += f"; the largest ratio is {number(max(known), 4)}." if known else "."
    if falls == len(fell):
        return Reading(f"The loss {down} in every {history.unit}.", text, "good")
    most = f"{down} in most" if 2 * falls > len(fell) else f"{up} in many"
    return Reading(f"The loss {most} {history.unit}s.", text)


def _mean_gradient(history: History) -> Reading | None:
    name = "mean_predictor_grad_norm_sq"
    now = history.latest(name, "rsc_threshold")
    threshold, value = now.get("rsc_threshold", math.nan), now.get(name, math.nan)
    if math.isnan(threshold) or math.isnan(value):
        return _only(history, name, "RSC's threshold is known only for smooth chains of layers with the square loss.")
    # Of other networks than the paper's own, it takes the bounds of their layers.
    condition = "condition of RSC, Theorem 5.1," if "rsc_beta" in now else "generalized condition of RSC, Theorem 5.1,"
    if value > threshold:
        return Reading(
            "‖ḡ‖² is above RSC's threshold.",
            f"‖ḡ‖² is {number(value)}, above {number(threshold)}: the {condition} holds.",
            "good",
        )
    return Reading(
        "‖ḡ‖² is below RSC's threshold.",
        f"‖ḡ‖² is {number(value)} but the {condition} needs more than {number(threshold)}.",
    )


def _conditions(history: History) -> Reading | None:
    names = ("certificate_rsc", "certificate_ntk", "certificate_dgm_v", "certificate_dgm_g")
    rows = [row for row in history.rows if row.metrics.keys() & set(names)]
    if not rows:
        return None
    known = {find_metric(name).symbol: rows[-1].metrics[name] for name in names if name in rows[-1].metrics}
    holds = [symbol for symbol, value in known.items() if value == 1]
    fails = [symbol for symbol, value in known.items() if value != 1]
    text = f"{'Holds' if len(holds) == 1 else 'Hold'} now: {', '.join(holds)}. " if holds else ""
    text += f"{'Does' if len(fails) == 1 else 'Do'} not hold: {', '.join(fails)}." if fails else ""
    if not holds:
        return Reading("No sufficient condition holds.", f"{text} Training may still converge.")
    finding = "A sufficient condition for convergence holds." if fails else "All tested conditions hold."
    return Reading(finding, text.strip(), "note" if fails else "good")


def _theorems(history: History) -> Reading | None:
    flags = [name for name in history.names() if name.startswith("theorem__")]
    if not flags:
        return None
    names = {f"theorem__{status.key}": status.short for status in history.theorems}
    fitting = [names.get(name, name) for name in flags if history.last(name) == 1]
    failing = [name for name in flags if history.last(name) != 1]
    why = {
        names.get(name, name): what_fails(history.rows[-1].reasons.get(name, "the run does not fit"))
        for name in failing
    }
    text = " ".join(sentence(f"{name}: {reason}") for name, reason in why.items())
    if not fitting:
        return Reading("The network fits a theorem, but the run does not.", text)
    finding = "A theorem applies now, as far as can be checked."
    return Reading(finding, " ".join([sentence(join_names(fitting)), text]).strip(), "note" if failing else "good")


def _step(history: History) -> Reading | None:
    omega = history.last("certificate_omega")
    if math.isnan(omega):
        return None
    if omega < 2:
        return Reading("The run's step is guaranteed.", f"ηβ is {number(omega)}, below 2.", "good")
    text = f"ηβ is {number(omega)}: a step {times(omega / 2)} smaller would be guaranteed."
    return Reading("The run's step is not guaranteed.", text)


def _cost(history: History) -> Reading | None:
    seconds = history.series("seconds")
    if not seconds:
        return None
    total, known = sum(seconds.values()), history.rows[-1].time - history.rows[0].time
    text = f"Measuring took {number(total)} s in total, {number(total / len(seconds))} s per measurement"
    if known > 0 and len(seconds) > 1:
        text += f", {percent(min(1.0, (total - next(iter(seconds.values()))) / known))} of the run's time"
    return Reading("Time spent on measurements.", f"{text}.")


def _only(history: History, name: str, remark: str) -> Reading | None:
    series = history.series(name)
    symbol = find_metric(name).symbol
    return Reading(remark, f"{symbol} {trend(series)}. {remark}") if series else None


READINGS = {
    "loss": _loss,
    "weight_norm": _weight_norm,
    "cost": _cost,
    "rsc": _ratio,
    "alpha": _alpha,
    "smoothness": _beta,
    "rate": _rate,
    "loss_ratio": _loss_ratio,
    "mean_gradient": _mean_gradient,
    "omega": _step,
    "conditions": _conditions,
    "theorems": _theorems,
}
