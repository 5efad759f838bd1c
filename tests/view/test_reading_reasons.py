"""Readings of losses below zero, of undefined values with a reason, and of runs by steps."""

import math

import pytest

from lightning_normtheory.record.metrics import METRICS
from lightning_normtheory.view.panels import PANELS
from lightning_normtheory.view.readings import read_panel

from support.view.reading_cases import BELOW, EDGE, history, read


def test_a_loss_below_zero_rises_and_falls_as_any_other():
    assert read("loss", loss=[-3.0, -5.0]).finding == "The loss has fallen."
    assert read("loss", loss=[-5.0, -4.999]).finding == "The loss has not fallen."
    assert read("loss", loss=[-5.0, -3.0]).finding == "The loss has risen."
    rising = {"generalization_validation_loss": [-3.0, -2.9, -2.5]}
    assert read("population", **rising).finding == "The validation loss has passed its minimum."
    falling = {"generalization_validation_loss": [-3.0, -3.1, -3.05]}  # used to have passed it: −3.05 > 1.05 · −3.1
    assert read("population", **falling).finding == "The validation loss has not passed its minimum."


def test_r_of_a_loss_below_zero_is_undefined_and_no_fault():
    """It used to be −191, with "the gradient has vanished"."""
    nan = [math.nan] * 2
    reading = read("rsc", reasons={"rsc_ratio": BELOW}, loss=[-3.0, -5.0], rsc_ratio=nan)
    assert reading == ("R is not a number.", f"R is undefined in every epoch: {BELOW}.", "note")
    assert read("rsc", loss=nan, rsc_ratio=nan).mood == "bad"
    reading = read("rate", reasons={"certificate_rate_measured": BELOW}, loss=[-1, -2], certificate_rate_measured=nan)
    assert (reading.text.endswith(f": {BELOW}."), reading.mood) == (True, "note")


def test_the_losses_tell_whether_they_fell_where_ratios_are_undefined():
    """Used to be "fell in 1 of 2 epochs", from ratios of negative losses: 2 where the loss fell from −2 to −4."""
    ratios = {"loss": [1.0, -2.0, -4.0, -3.0], "loss_ratio": [0.5, math.nan, math.nan, math.nan]}
    reading = read("loss_ratio", reasons={"loss_ratio": BELOW}, **ratios)
    assert reading.finding == "The loss fell in most epochs."
    assert reading.text.startswith("The loss fell in 3 of 4 measured epochs; the largest ratio is 0.5.")
    assert reading.text.endswith(f"undefined in 3 of 4 epochs: {BELOW}.")
    # The first epoch has no loss before it.
    reading = read("loss_ratio", reasons={"loss_ratio": BELOW}, loss=[-1.0], loss_ratio=[math.nan])
    assert reading.text == f"L_t/L_{{t−1}} is undefined in epoch 0: {BELOW}."
    # The loss comes back from below.
    reading = read("loss_ratio", reasons={"loss_ratio": BELOW}, loss=[-1, 2, 1.0], loss_ratio=[math.nan, math.nan, 0.5])
    assert "fell in 1 of 2 measured epochs" in reading.text


def test_a_sign_that_changes_on_the_way_is_told():
    reading = read("rsc", reasons={"rsc_ratio": BELOW}, loss=[1, -1, 2.0], rsc_ratio=[3.0, math.nan, 2.0])
    assert reading.finding == "R is positive."
    assert reading.text.endswith(f" R is undefined in epoch 1: {BELOW}.")


def test_a_reason_is_told_where_a_curve_ends():
    why = {"hessian_lambda_max": "MemoryError: 9 GB"}
    text = read(EDGE, reasons=why, hessian_lambda_max=[2.0, math.nan], hessian_edge=[10] * 2).text
    assert text == "λ_max was 2 in epoch 0, and is undefined since epoch 1: MemoryError: 9 GB."
    text = read("kernel", reasons={"ntk_lambda_min": "no predictor"}, loss=[1.0] * 3, ntk_lambda_min=[2.0]).text
    assert text.endswith("has not been measured since: no predictor.")
    text = read("rademacher", reasons={"rademacher_bound": "attention has no bound"}, rademacher_bound=[math.nan]).text
    assert text == "There is no bound: attention has no bound."
    text = read("gap", reasons={"generalization_bound": "the loss is unknown"}, generalization_gap=[0.1]).text
    assert text == "The gap is 0.1; there is no bound for this run: the loss is unknown."


# -- a run by steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "series", "text"),
    [
        ("loss", {"loss": [1.0, math.inf, 1.0]}, "infinite at step 10, and not finite in 1 of 3 measurements."),
        (EDGE, {"hessian_lambda_max": [1, 12, 11], "hessian_edge": [10] * 3}, "beyond it since step 10."),
        (EDGE, {"hessian_lambda_max": [1, 12, 4], "hessian_edge": [10] * 3}, "in 1 of 3 measurements, and is"),
        (EDGE, {"hessian_lambda_max": [2.0, math.nan]}, "was 2 at step 0, and is undefined since step 10."),
        (EDGE, {"hessian_lambda_max": [math.nan]}, "undefined in every measurement."),
        (
            EDGE,
            {"hessian_lambda_max": [2.0], "seconds": [1.0] * 3},
            "at step 0, and has not been measured since.",
        ),
        ("alpha", {"certificate_alpha": [1.0, -1.0]}, "positive in 1 of 2 measurements"),
        ("loss_ratio", {"loss_ratio": [0.5, 0.5, 2.0]}, "lower than before in 2 of 3 measurements; the largest"),
        ("population", {"generalization_validation_loss": [2.0, 1.0, 2.0]}, "up from 1 at step 10."),
        ("converged", {"hessian_lambda_max_converged": [1.0, 0.0]}, "converged in 1 of 2 measurements."),
        ("converged", {"hessian_lambda_max_converged": [0.0, 0.0]}, "converged in no measurement."),
    ],
)
def test_a_reading_names_the_step(key, series, text):
    assert text in read(key, axis="step", **series).text


@pytest.mark.parametrize(
    "values", [[1, 2, 3], [3, 2, 1], [0, 1, 0], [-1, 1, -2], [1, math.nan, 2], [math.nan] * 3, [1]]
)
def test_no_reading_of_a_run_by_steps_speaks_of_epochs(values):
    metrics = {metric.name.replace("*", "a"): list(map(float, values)) for metric in METRICS}
    run = history(axis="step", reasons={"rsc_ratio": BELOW}, **metrics)
    for panel in PANELS:
        reading = read_panel(panel, run)
        assert reading is None or "epoch" not in f"{reading.finding} {reading.text} {panel.about}", reading
