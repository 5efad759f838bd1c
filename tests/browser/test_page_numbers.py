"""The report in a browser: its curves are the numbers of the file."""

import math

import pytest

from browser.page_cases import assert_within_a_pixel, axis, expected, panel, plotted, points
from support.view.report_cases import report, write_run

pytestmark = pytest.mark.browser

CURVES = {
    "Loss on the probe": {0: "loss"},
    "Smallest weight norm": {0: "min_weight_norm"},
    "Sharpness and the edge of stability": {0: "hessian_lambda_max", 1: "hessian_edge"},
    "α of restricted strong convexity": {0: "certificate_alpha"},
    "Least eigenvalue of the tangent kernel": {0: "ntk_lambda_min"},
    "Smallest weight norm of each layer": {0: "layers/weight_norm__net_0", 1: "layers/weight_norm__net_2"},
    "The run's own losses": {0: "Train_Loss", 1: "Val_Loss"},
    "Accuracy": {0: "Accuracy"},
    "Rademacher complexity": {0: "rademacher_bound"},
}


@pytest.mark.parametrize("title", CURVES)
def test_the_curves_are_the_numbers_of_the_file(visit, one, title):
    found = panel(visit(one), title)
    for curve, name in CURVES[title].items():
        assert_within_a_pixel(found, expected(name), curve=curve)


def test_the_labels_of_the_ticks_are_their_numbers(visit, one):
    page = visit(one)
    raised = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻−", "0123456789--")
    for title in CURVES:
        for kind in ("horizontal", "vertical"):
            _, ticks = axis(panel(page, title), kind)
            assert len(ticks) >= 2
            for _, value, label in ticks:
                digits, _, power = (
                    label.rpartition("10") if any(sign in label for sign in "⁰¹²³⁴⁵⁶⁷⁸⁹") else (label, "", "0")
                )
                scale = {"k": 1e3, "M": 1e6}.get(digits[-1:], 1.0)
                number = (
                    float((digits.rstrip("×kM") or "1").translate(raised))
                    * scale
                    * 10.0 ** int(power.translate(raised))
                )
                assert number == pytest.approx(value, rel=1e-9, abs=1e-300)


def test_what_is_not_finite_is_a_gap_with_a_mark(visit, one):
    found = panel(visit(one), "Condition number")
    rows = expected("ntk_condition_number")
    finite = {epoch: value for epoch, value in rows.items() if math.isfinite(value)}
    assert plotted(found).keys() == finite.keys()
    assert found.locator(".area .mark-nan").count() == 1
    assert found.locator(".area .mark-infinite").count() == 2
    # 1000, inf, 2000, nan, 0.3, -inf, 1e300, 5e-324: only the last two are neighbors.
    assert found.locator("g[data-run] path").get_attribute("d").count("M") == 1


def test_points_that_a_log_axis_cannot_show_are_counted(visit, one):
    found = panel(visit(one), "Generalization gap and its bounds")
    note = found.locator(".hidden-points")
    assert note.inner_text().startswith("4 points are 0 or less")
    positive = {epoch: value for epoch, value in expected("generalization_gap").items() if value > 0}
    assert plotted(found).keys() == positive.keys()
    note.get_by_role("button").press("Enter")
    assert not note.is_visible()
    assert found.locator(".plot").evaluate("plot => plot === document.activeElement")  # the button is gone
    assert plotted(found).keys() == expected("generalization_gap").keys()


def test_a_panel_without_a_positive_number_starts_with_a_linear_axis(visit, tmp_path):
    rows = {epoch: {"rsc_ratio": -1.0 - epoch} for epoch in range(3)}
    found = panel(visit(report(tmp_path / "r.html", write_run(tmp_path / "run", rows))), "Restricted strong convexity")
    assert_within_a_pixel(found, expected("rsc_ratio", rows))


def test_nothing_but_nan_draws_marks_and_no_error(visit, one):
    assert panel(visit(one), "Gradient of the loss").locator(".mark-nan").count() >= 7


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-300, 1.7e308, 5e-324])
def test_a_single_epoch_is_a_visible_point(visit, tmp_path, value):
    page = visit(
        report(tmp_path / "r.html", write_run(tmp_path / "run", {7: {"loss": value, "certificate_alpha": value}}))
    )
    for title in ("Loss on the probe", "α of restricted strong convexity"):
        (place,) = points(panel(page, title))
        box = panel(page, title).locator(".canvas").bounding_box()
        assert 0 < place[0] < box["width"]
        assert 0 < place[1] < box["height"]
