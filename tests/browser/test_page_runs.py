"""The report in a browser: several runs, and their layers."""

import math

import pytest

from browser.page_cases import assert_within_a_pixel, drawn_runs, panel, plotted, points
from support.view.report_cases import report, write_run

pytestmark = pytest.mark.browser


def test_runs_can_be_switched_off_and_on(visit, four):
    page = visit(four)
    found = panel(page, "Sharpness and the edge of stability")
    boxes = page.locator("#runs input")
    boxes.nth(1).click()
    assert drawn_runs(found) == [0, 2, 3]
    assert page.locator("#run-count").inner_text() == "3 of 4 runs; texts and cards cover all runs"
    page.locator("#no-runs").click()
    assert drawn_runs(found) == []
    page.locator("#all-runs").click()
    assert page.locator("#run-count").inner_text() == "4 of 4 runs"
    assert drawn_runs(found) == [0, 1, 2, 3]
    boxes.nth(2).click(modifiers=["Alt"])
    assert drawn_runs(found) == [2]
    page.locator(".run").nth(3).dblclick()
    assert drawn_runs(found) == [3]
    # Those that come into view later know it too.
    assert drawn_runs(panel(page, "The run's own losses")) == [3]


def test_the_curves_of_several_runs_are_theirs(visit, four):
    found = panel(visit(four), "Sharpness and the edge of stability")
    for run, (width, seed) in enumerate([(64, 0), (64, 1), (256, 0), (256, 1)]):
        numbers = {epoch: width / 64 * (1 + epoch) + 0.01 * seed for epoch in range(4)}
        assert_within_a_pixel(found, numbers, run=run)


def test_runs_have_different_colors_and_bounds_are_dashed(visit, four):
    found = panel(visit(four), "Sharpness and the edge of stability")
    looks = found.locator("g[data-run] path").evaluate_all(
        """all => all.map(path => {
            const style = getComputedStyle(path);
            return [path.parentElement.dataset.curve, style.stroke, style.strokeDasharray];
        })"""
    )
    assert len({stroke for _, stroke, _ in looks}) == 4
    assert {dashes == "none" for curve, _, dashes in looks if curve == "0"} == {True}
    assert {dashes == "none" for curve, _, dashes in looks if curve == "1"} == {False}


def test_the_curve_next_to_the_mouse_stands_out(visit, four):
    page = visit(four)
    found = panel(page, "Sharpness and the edge of stability")
    _, y = points(found, run=2)[2]
    place = found.locator(".tick.horizontal[data-value='2']").get_attribute("x")
    box = found.locator(".canvas").bounding_box()
    page.mouse.move(box["x"] + float(place), box["y"] + y)
    assert page.locator("#tip .closest").inner_text().split("\n") == ["width 256, seed 0, λ_max", "12"]
    assert found.locator("g.closest").evaluate_all("all => all.map(one => [one.dataset.run, one.dataset.curve])") == [
        ["2", "0"]
    ]
    page.locator(".run").nth(1).hover()
    assert found.locator("g.closest").evaluate_all("all => all.map(one => one.dataset.run)") == ["1", "1"]


def test_layers_show_the_run_that_is_chosen(visit, four):
    found = panel(visit(four), "Smallest weight norm of each layer")
    assert_within_a_pixel(found, {epoch: 64.0 + epoch for epoch in range(4)})
    found.locator("select").select_option("width 256, seed 1")
    assert_within_a_pixel(found, {epoch: 256.0 + epoch for epoch in range(4)}, run=3)


def test_the_legend_has_the_layers_of_the_run_that_is_chosen(visit, tmp_path):
    runs = [write_run(tmp_path / name, {0: {f"layers/weight_norm__{name}": 1.0}}, run=name) for name in "ab"]
    found = panel(visit(report(tmp_path / "report.html", *runs)), "Smallest weight norm of each layer")
    assert found.locator(".legend li:visible").all_inner_texts() == ["a"]
    found.locator("select").select_option("b")
    assert found.locator(".legend li:visible").all_inner_texts() == ["b"]


def test_of_thousands_of_epochs_the_extremes_are_drawn(visit, tmp_path):
    losses = {epoch: 2.0 + math.sin(epoch) for epoch in range(5000)} | {1234: 9.0, 3456: 0.5}
    rows = {epoch: {"loss": loss} for epoch, loss in losses.items()}
    found = panel(visit(report(tmp_path / "report.html", write_run(tmp_path / "run", rows))), "Loss on the probe")
    drawn = plotted(found)
    assert len(points(found)) < 3000
    assert drawn[1234] == pytest.approx(9.0, rel=0.02)
    assert drawn[3456] == pytest.approx(0.5, rel=0.02)
    assert drawn[0] == pytest.approx(losses[0], rel=0.02)
    assert drawn[4999] == pytest.approx(losses[4999], rel=0.02)
