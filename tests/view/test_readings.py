"""Every panel in plain words."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_normtheory.record.history import History, Row
from lightning_normtheory.record.metrics import METRICS
from lightning_normtheory.view.panels import PANELS
from lightning_normtheory.view.readings import READINGS, read_panel
from lightning_normtheory.view.readings.phrases import number, percent, since, times, trend

from support.view.reading_cases import BY_KEY, EDGE, history, read


@pytest.mark.parametrize(
    ("top", "edge", "finding", "mood"),
    [
        ([1, 2, 3], [10, 10, 10], "λ_max has stayed below 2/η.", "good"),
        ([1, 2, 9.5], [10, 10, 10], "λ_max is near 2/η.", "note"),
        ([1, 12, 11], [10, 10, 10], "λ_max has crossed 2/η.", "bad"),
        ([1, 12, 4], [10, 10, 10], "λ_max was beyond 2/η and is below it now.", "note"),
        ([1, 2, 3], [math.inf] * 3, "λ_max has stayed below 2/η.", "good"),
        ([math.nan] * 2, [10, 10], "λ_max is not a number.", "bad"),
        ([1, math.nan], [10, 10], "λ_max is not a number.", "bad"),
        ([1, math.inf], [10, 10], "λ_max has crossed 2/η.", "bad"),
        ([1, 2], [math.nan] * 2, "λ_max was measured without a limit.", "note"),
    ],
)
def test_the_edge_of_stability(top, edge, finding, mood):
    reading = read(EDGE, hessian_lambda_max=top, hessian_edge=edge)
    assert (reading.finding, reading.mood) == (finding, mood)


def test_since_when_the_edge_is_crossed():
    reading = read(EDGE, hessian_lambda_max=[12, 9, 11, 13], hessian_edge=[10] * 4)
    assert "since epoch 2" in reading.text
    assert "13 against 10" in reading.text


def test_with_momentum_the_limit_is_another():
    reading = read(EDGE, hessian_lambda_max=[12.0], hessian_edge=[10.0], hessian_stability_limit=[30.0])
    assert reading.finding == "λ_max has stayed below the limit of stability."


def test_two_over_eta_is_no_limit_of_adam():
    reading = read(EDGE, optimizers=["Adam"], hessian_lambda_max=[12.0], hessian_edge=[10.0])
    assert "crossed" not in reading.text
    assert "that of Adam is not known" in reading.text


@pytest.mark.parametrize(
    ("key", "series", "finding", "mood"),
    [
        ("loss", {"loss": [2.0, 1.0]}, "The loss has fallen.", "good"),
        ("loss", {"loss": [1.0, 2.0]}, "The loss has risen.", "bad"),
        ("loss", {"loss": [1.0, math.nan, 1.0]}, "The loss was not finite at times.", "bad"),
        ("loss", {"loss": [1.0, math.inf]}, "The loss is not finite.", "bad"),
        ("loss", {"loss": [1.0, math.nan]}, "L is not a number.", "bad"),
        ("weight_norm", {"min_weight_norm": [1.0, 0.5]}, "w_min has fallen.", "note"),
        ("weight_norm", {"min_weight_norm": [1.0, 1.001]}, "w_min is stable.", "good"),
        (
            "weight_norm",
            {"min_weight_norm": [1.0, 0.0]},
            "A weight vector has vanished or grown without limit.",
            "bad",
        ),
        ("weight_norm", {"min_weight_norm": [1.0]}, "w_min was measured once.", "note"),
        (
            "alpha",
            {"certificate_alpha": [-1.0, -2.0]},
            "α is negative: the theorem guarantees no rate.",
            "note",
        ),
        ("alpha", {"wn_alpha": [-1.0, 2.0]}, "α is positive at times.", "note"),
        (
            "alpha",
            {"certificate_alpha": [-1.0, 1.0], "rsc_alpha": [2.0, -1.0]},
            "α is positive: the theorem guarantees a rate.",
            "good",
        ),
        (
            "smoothness",
            {"hessian_lambda_max": [2.0], "certificate_beta": [9.0], "wn_beta": [5.0]},
            "The bound β holds.",
            "good",
        ),
        (
            "smoothness",
            {"hessian_lambda_max": [2.0], "certificate_beta": [1.0]},
            "β is below λ_max, which the theory excludes.",
            "bad",
        ),
        (
            "kernel",
            {"ntk_lambda_min": [1e-9], "ntk_lambda_min_floor": [1e-8], "ntk_samples": [8.0]},
            "λ_min(K) cannot be distinguished from zero.",
            "bad",
        ),
        (
            "kernel",
            {
                "ntk_lambda_min": [1.0],
                "ntk_lambda_min_floor": [1e-8],
                "ntk_samples": [8.0],
                "ntk_threshold": [2.0],
            },
            "λ_min(K) is below DGM's threshold.",
            "bad",
        ),
        ("change", {"ntk_change_max": [0.02]}, "The kernel hardly changes.", "note"),
        ("change", {"ntk_change_max": [0.02, 3.0]}, "The kernel changes much.", "note"),
        ("linearity", {"linearity_b": [0.5]}, "The outputs' curvature was measured.", "note"),
        ("linearity", {"linearity_b": [0.5], "linearity_kappa": [0.09]}, "κ_f is small.", "note"),
        ("linearity", {"linearity_b": [0.5], "linearity_kappa": [0.1]}, "κ_f is neither small nor large.", "note"),
        ("linearity", {"linearity_b": [0.5], "linearity_kappa": [1.0]}, "κ_f is large.", "note"),
        ("displacement", {"theta_distance": [0.1, 0.2]}, "The parameters have moved.", "note"),
        ("displacement", {"theta_distance": [0.0]}, "Nothing has moved.", "note"),
        (
            "gradient_bounds",
            {"predictor_gradient_norm": [1.0], "certificate_gradient_bound": [1.0]},
            "The bound of ‖∂f/∂θ‖ holds.",
            "good",
        ),
        (
            "gradient_bounds",
            {"ntk_gradient_norm": [1.1], "certificate_gradient_bound": [1.0]},
            "The bound of ‖∂f/∂θ‖ does not hold.",
            "bad",
        ),
        (
            "input_gradient",
            {"predictor_input_gradient_norm": [1.0], "certificate_lipschitz_bound": [2.0]},
            "The bound of ‖∂f/∂x‖ holds.",
            "good",
        ),
        (
            "input_gradient",
            {"certificate_lipschitz_bound": [2.0]},
            "‖∂f/∂x‖ is bounded and was not measured.",
            "note",
        ),
        ("input_gradient", {"predictor_input_gradient_norm": [1.0]}, "‖∂f/∂x‖ has no bound here.", "note"),
        (
            "gap",
            {"generalization_gap": [0.1], "generalization_bound": [9e9], "generalization_bound_vacuous": [1.0]},
            "The generalization bound is vacuous.",
            "note",
        ),
        (
            "gap",
            {"generalization_gap": [0.1], "generalization_bound": [0.01], "generalization_bound_vacuous": [0.0]},
            "The gap exceeds its bound.",
            "bad",
        ),
        (
            "progressive",
            {
                "progressive_error_bound": [1.2],
                "progressive_error_bound_sharper": [0.999],
                "progressive_derivative": [0.1],
                "progressive_batches": [50.0],
            },
            "The bound on the error of the first pass is not vacuous.",
            "good",
        ),
        (
            "progressive",
            {
                "progressive_error_bound": [1.2],
                "progressive_error_bound_sharper": [1.0],
                "progressive_derivative": [0.1],
                "progressive_batches": [50.0],
            },
            "The bound on the error of the first pass is vacuous.",
            "note",
        ),
        ("bn_margin", {"batchnorm_margin": [-0.1, 1e-6]}, "The network separates the classes of the probe.", "good"),
        ("bn_margin", {"batchnorm_margin": [0.1, 0.0]}, "The network errs on samples of the probe.", "note"),
        (
            "delta_v",
            {"batchnorm_delta_v": [0.01], "batchnorm_delta_v_allowed": [0.01]},
            "The hidden weights are allowed as reference weights.",
            "good",
        ),
        (
            "delta_v",
            {"batchnorm_delta_v": [0.011], "batchnorm_delta_v_allowed": [0.01]},
            "The hidden weights are too far for reference weights.",
            "note",
        ),
        (
            "population",
            {"generalization_validation_loss": [1.0, 0.5, 0.6]},
            "The validation loss has passed its minimum.",
            "bad",
        ),
        (
            "layer_norms",
            {"layers__weight_norm__a": [1.0], "layers__weight_norm__b": [0.5]},
            "b has the smallest weight vector.",
            "note",
        ),
        (
            "distance_v",
            {"batchnorm_displacement_v": [1.0, 3.0], "batchnorm_radius_v": [2.0, 2.0]},
            "The weights are beyond the theorem's radius.",
            "note",
        ),
        (
            "trace",
            {"hessian_trace": [9.0, 1.0], "hessian_trace_error": [0.1, 0.5]},
            "The trace of the Hessian cannot be told from zero.",
            "note",
        ),
        (
            "trace",
            {"hessian_trace": [-2.0], "hessian_trace_error": [0.5]},
            "Negative curvature outweighs positive: the trace of the Hessian is negative.",
            "note",
        ),
        (
            "trace",
            {"hessian_trace": [8.0], "hessian_trace_error": [0.5], "hessian_lambda_max": [2.0]},
            "The trace of the Hessian is positive.",
            "note",
        ),
        (
            "mean_gradient",
            {"mean_predictor_grad_norm_sq": [1.0], "rsc_threshold": [0.5]},
            "‖ḡ‖² is above RSC's threshold.",
            "good",
        ),
    ],
)
def test_findings(key, series, finding, mood):
    reading = read(key, **series)
    assert (reading.finding, reading.mood) == (finding, mood)


EVERY_EPOCH = {"seconds": [0.1] * 4}  # of a run with four measured epochs


@pytest.mark.parametrize(
    ("key", "series"),
    [
        ("conditions", {"certificate_ntk": [1.0, 1.0]}),
        ("alpha", {"certificate_alpha": [-1.0, -1.0]}),
        ("condition_number", {"ntk_condition_number": [9.0, 9.0]}),
    ],
)
def test_what_is_no_longer_measured_is_not_read_as_if_it_were_now(key, series):
    reading = read(key, **series, **EVERY_EPOCH)
    assert reading.finding.endswith("is no longer measured.")
    assert "in epoch 1" in reading.text


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.key)
def test_a_run_that_ends_in_nan_is_never_read_as_good(panel):
    lines = {line.metric.replace("*", "a"): [0.5, 0.25, math.nan] for line in panel.lines}
    rows = [Row(epoch, 0, float(epoch), {name: v[epoch] for name, v in lines.items()}, {}) for epoch in range(3)]
    reading = read_panel(panel, History(Path(), "demo", "normtheory", rows=rows))
    assert reading is None or reading.mood != "good"


def test_what_is_measured_every_third_epoch_is_not_missed():
    rows = [Row(epoch, 0, 0.0, {"seconds": 0.1}, {}) for epoch in range(8)]
    for epoch in (2, 5):
        rows[epoch].metrics["ntk_change_max"] = 0.02
    run = History(Path(), "demo", "normtheory", rows=rows)
    assert read_panel(BY_KEY["change"], run).finding == "The kernel hardly changes."


@pytest.mark.parametrize(("epochs", "over"), [(16, False), (17, True)])
def test_what_is_measured_in_every_sixteenth_epoch_is_not_over_before(epochs, over):
    rows = [Row(epoch, 0, 0.0, {"seconds": 0.1}, {}) for epoch in range(epochs)]
    rows[0].metrics.update(linearity_b=0.5, theta_distance=1.0)
    run = History(Path(), "demo", "normtheory", rows=rows)
    assert (read_panel(BY_KEY["linearity"], run).finding == "B is no longer measured.") is over
    assert read_panel(BY_KEY["displacement"], run).finding == "‖θ−θ₀‖ is no longer measured."


@pytest.mark.parametrize(("converged", "words", "mood"), [(0.0, "is at least 1.5", "note"), (1.0, "is 1.5", "good")])
def test_a_lower_bound_of_the_outputs_curvature_is_called_one(converged, words, mood):
    measured = {"predictor_hessian_norm": [1.5], "predictor_hessian_norm_converged": [converged]}
    reading = read("predictor", certificate_hessian_bound=[5.0], **measured)
    assert (reading.mood, words in reading.text) == (mood, True)
    assert words in read("predictor", **measured).text
    broken = read("predictor", certificate_hessian_bound=[1.0], **measured)
    assert (broken.mood, words in broken.text) == ("bad", True)


@pytest.mark.parametrize("kappa", [0.01, 0.5])
def test_a_lower_bound_of_kappa_shows_nothing_small(kappa):
    low = {"predictor_hessian_norm_converged": [0.0], "linearity_b": [0.02]}
    reading = read("linearity", linearity_kappa=[kappa], **low)
    assert reading.finding == "κ_f is known from below."
    assert (
        f"B = ‖∇²f‖/‖∇f‖² is at least 0.02 on a few samples, and κ_f, with the residuals, at least {kappa}"
        in reading.text
    )
    assert read("linearity", linearity_kappa=[1.5], **low).finding == "κ_f is large."
    assert read("linearity", **low).finding == "The outputs' curvature is known from below."


def test_the_kernel_of_one_output_is_no_average_and_that_of_all_samples_no_bound():
    series = {"ntk_lambda_min": [1.0], "ntk_lambda_min_floor": [1e-8], "ntk_samples": [8.0]}
    run = history(settings=[{"ntk_outputs": "trace"}], ntk_lambda_min_decay=[0.5], **series)
    one = read_panel(BY_KEY["kernel"], replace(run, outputs=1, training_samples=8))
    assert one.finding == "The tangent kernel is positive definite."
    assert "These are the training set: from a quarter" in one.text
    two = read_panel(BY_KEY["kernel"], replace(run, outputs=2, training_samples=9))
    assert two.finding == "The kernel, averaged over the outputs, is positive definite."
    assert "Over the training set λ_min is at most that: from a quarter" in two.text


@pytest.mark.parametrize(
    ("more", "words"), [({}, "the generalized condition of RSC"), ({"rsc_beta": [1.0]}, "the condition of RSC")]
)
@pytest.mark.parametrize("value", [1.0, 3.0])
def test_whose_condition_on_the_mean_gradient_it_is(value, more, words):
    assert words in read("mean_gradient", mean_predictor_grad_norm_sq=[value], rsc_threshold=[2.0], **more).text


def test_the_sharpness_of_the_training_set_is_told_with_its_epoch():
    ends = {"hessian_lambda_max_lower": [7.0, 7.78], "hessian_lambda_max_upper": [8.0, 8.39]}
    text = read(EDGE, hessian_lambda_max=[8.0, 8.0, 9.0], hessian_edge=[10.0] * 3, **ends).text
    assert "between 7.78 and 8.39, up to two standard errors, in epoch 1." in text
    same = {"hessian_lambda_max_lower": [8.0], "hessian_lambda_max_upper": [8.0]}
    assert "training set" not in read(EDGE, hessian_lambda_max=[8.0], hessian_edge=[10.0], **same).text


def test_the_progressive_bound_names_what_it_assumes():
    bounds = {"progressive_error_bound": [1.2], "progressive_error_bound_sharper": [0.3]}
    text = read("progressive", progressive_derivative=[0.1], progressive_batches=[2000.0], **bounds).text
    assert "on 2000 fresh batches" in text
    assert "if batches are independent draws and no sample of that pass was repeated" in text


def test_the_change_of_the_kernel_names_its_bound():
    assert "now at most 2.5" in read("change", ntk_change_max=[0.02], ntk_change_bound=[2.5]).text
    assert "at most" not in read("change", ntk_change_max=[0.02]).text


def test_only_values_of_one_epoch_are_compared():
    """λ_max of every epoch, β of every second one, has grown above the β of before; and so has ‖∇²f‖."""
    beta = read("smoothness", hessian_lambda_max=[1.0, 9.0], certificate_beta=[5.0])
    assert beta.finding == "The bound β holds."
    norm = read("predictor", predictor_hessian_norm=[1.0, 9.0], wn_hessian_bound=[5.0])
    assert norm.finding == "The bound of ‖∇²f‖ holds."
    rate = read("rate", certificate_rate_measured=[0.9, 0.9], certificate_own_rate=[0.997])
    assert "guaranteed" not in rate.text


def test_neither_part_carries_what_both_have_not():
    parts = {"ntk_direction_lambda_min": [-1e-12], "ntk_length_lambda_min": [-2e-12]}
    reading = read("parts", **parts)
    assert reading.finding == "Neither part alone is positive definite."


def test_the_part_with_the_larger_eigenvalue_drives_convergence_in_the_network_of_dgm():
    parts = {"ntk_direction_lambda_min": [2.0], "ntk_length_lambda_min": [1.0]}
    assert read("parts", **parts).finding == "The directions have the larger least eigenvalue."
    assert read("parts", **parts, ntk_alpha=[0.5]).finding == "The directions drive convergence."


def test_conditions_are_named_on_both_sides():
    reading = read("conditions", certificate_rsc=[0.0], certificate_ntk=[1.0])
    assert reading.text == "Holds now: kernel positive definite. Does not hold: restricted strong convexity."


def test_which_kernel_is_positive_definite():
    series = {"ntk_lambda_min": [1.0], "ntk_lambda_min_floor": [1e-8], "ntk_samples": [8.0]}
    panel = "kernel"
    averaged = read(panel, settings=[{"ntk_outputs": "trace"}], **series)
    full = read(panel, settings=[{"ntk_outputs": "full"}], **series)
    assert averaged.finding == "The kernel, averaged over the outputs, is positive definite."
    assert (averaged.mood, full.mood) == ("note", "good")
    assert "averaged" not in full.text
    certified = read(panel, settings=[{"ntk_outputs": "trace"}], certificate_ntk=[1.0], **series)
    assert certified.mood == "good"


def test_flags_are_counted_and_values_are_not():
    assert read("converged", hessian_lambda_max_converged=[1.0, 0.0]).text == "λ_max converged in 1 of 2 epochs."
    shift = read("bn_assumptions", batchnorm_shift=[0.0, 0.0])
    assert shift.text == "shift has hardly moved: 0 at first, 0 at last."


def test_every_reading_belongs_to_a_panel():
    assert READINGS.keys() - BY_KEY.keys() == set()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.key)
def test_every_panel_has_a_reading_and_no_run_no_reading(panel):
    lines = {line.metric.replace("*", "a"): [0.5, 0.25] for line in panel.lines}
    rows = [Row(epoch, 0, float(epoch), {name: v[epoch] for name, v in lines.items()}, {}) for epoch in (0, 1)]
    assert read_panel(panel, History(Path(), "demo", "normtheory", rows=rows)).text
    assert read_panel(panel, history()) is None


values = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf, -math.inf]))
names = st.sampled_from([metric.name.replace("*", "a") for metric in METRICS])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(names, values, max_size=40), min_size=1, max_size=5))
@example([{"ntk_change_max": -1.7e308}])
def test_whatever_was_measured_can_be_read(metrics):
    """Missing epochs, values that are not numbers, zeros: a sentence, never an error."""
    rows = [Row(epoch, epoch, float(epoch), these, {}) for epoch, these in enumerate(metrics)]
    run = History(Path(), "demo", "normtheory", rows=rows)
    for panel in PANELS:
        reading = read_panel(panel, run)
        if reading is not None:
            assert reading.text.endswith(".")
            assert reading.finding.endswith(".")
            assert not {"nan", "inf", "-inf"} & set(reading.text.replace(",", " ").replace(".", " ").split())


@given(st.floats(-1e300, 1e300))
def test_three_digits_are_right(value):
    text = number(value).replace("−", "-")
    assert float(text) == pytest.approx(value, rel=6e-3, abs=0)


def test_words():
    assert number(-0.000012345) == "−1.23e−5"
    assert number(1e100) == "1e100"
    assert percent(0.5) == "50\N{NO-BREAK SPACE}%"
    assert times(1e12) == "1e12 times"
    assert trend({0: math.inf, 1: 2.0}) == "was infinite at first and is 2 at last"
    assert since({0: False}) is None


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.5, 0.1, "Of the training set R is 0.5 ± 0.1 (standard error), by the draw of the probe."),
        (
            0.2,
            0.1,
            "Of the training set R is at most 0.4, by the draw of the probe: the noise of few samples hides it.",
        ),
        (-0.05, 0.1, "R is at most 0.15"),
        (2.0, 0.0, "The probe is the training set."),
        (math.nan, math.nan, "by a share of it."),
    ],
)
def test_the_ratio_of_the_training_set(value, error, text):
    reading = read("rsc", rsc_ratio=[1.0, 2.0], rsc_ratio_train=[1.0, value], rsc_ratio_train_error=[0.1, error])
    assert reading.finding == "R is positive."
    assert reading.text.endswith(text) or (text == "R is at most 0.15" and text in reading.text)


def test_the_decay_of_the_least_eigenvalue():
    known = {"ntk_lambda_min": [1.0], "ntk_lambda_min_floor": [0.1], "ntk_samples": [64.0]}
    assert "falls like n^−1.5." in read("kernel", **known, ntk_lambda_min_decay=[1.5]).text
    assert "training set" not in read("kernel", **known).text
