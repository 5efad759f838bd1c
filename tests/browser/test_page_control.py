"""The report in a browser, by mouse and keyboard: tooltip, table, zoom, axes."""

import pytest

from browser.page_cases import assert_within_a_pixel, axis, drag, expected, hover, panel, plotted, tip
from support.view.report_cases import report, write_run

pytestmark = pytest.mark.browser


def test_the_tooltip_has_all_curves_with_four_digits_the_largest_first(visit, one):
    page = visit(one)
    found = panel(page, "Sharpness and the edge of stability")
    hover(page, found, 2)
    assert page.locator("#tip p").inner_text() == "epoch 2"
    assert tip(page) == [("2/η", "10"), ("λ_max", "5")]
    found = panel(page, "Condition number")
    for epoch, text in {2: "2000", 0: "1000", 6: "−∞"}.items():
        hover(page, found, epoch)
        assert tip(page) == [("λ_max/λ_min", text)]
    page.mouse.move(0, 0)
    assert not page.locator("#tip").is_visible()


@pytest.mark.parametrize("value", [0.000123456, 99999.4, 12345.6, 9999.5, 1.0, 0.1 + 0.2, -1e-7, 2.5e300, 0.00012345])
def test_numbers_are_written_as_python_writes_them(visit, one, value):
    assert visit(one).evaluate("short", value) == f"{value:.4g}"


def test_the_table_has_every_digit(visit, one):
    page = visit(one)
    found = panel(page, "Smallest weight norm")
    button = found.get_by_role("button", name="table")
    button.click()
    rows = found.locator(".numbers tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert rows[0] == ["epoch", "w_min"]
    assert {int(epoch): float(value) for epoch, value in rows[1:]} == expected("min_weight_norm")
    button.click()
    assert not found.locator(".numbers").is_visible()


def test_the_keyboard_does_what_the_mouse_does(visit, one):
    page = visit(one)
    found = panel(page, "Sharpness and the edge of stability")
    found.locator(".plot").focus()
    said = page.locator("#live")
    for key, epoch in [
        ("ArrowRight", 0),
        ("ArrowRight", 1),
        ("End", 8),
        ("ArrowLeft", 7),
        ("ArrowRight", 8),
        ("ArrowRight", 8),
        ("Home", 0),
    ]:
        page.keyboard.press(key)
        assert said.inner_text().startswith(f"epoch {epoch}: ")
    assert "λ_max 3" in said.inner_text()
    page.keyboard.press("End")
    page.keyboard.press("+")
    assert min(plotted(found)) > 0
    assert found.locator(".reset").is_enabled()
    page.keyboard.press("-")
    assert plotted(found).keys() == expected("hessian_edge").keys()
    page.keyboard.press("l")
    assert found.locator(".log").get_attribute("aria-pressed") == "false"
    assert_within_a_pixel(found, expected("hessian_lambda_max"))
    page.keyboard.press("+")
    page.keyboard.press("Escape")
    assert not found.locator(".reset").is_enabled()
    assert not page.locator("#tip").is_visible()


def test_every_control_is_reached_by_the_tab_key(visit, four):
    page = visit(four)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.className || document.activeElement.id || document.activeElement.tagName"
            )
        )
    assert {"theme", "all-runs", "no-runs", "INPUT", "A", "plot", "log", "table", "SUMMARY"} <= reached


# -- zoom and axes -----------------------------------------------------------------------------------------------------


def test_dragging_zooms_all_panels_and_a_double_click_resets(visit, one):
    page = visit(one)
    found, other = panel(page, "Loss on the probe"), panel(page, "Accuracy")
    found.scroll_into_view_if_needed()
    drag(page, found, 2, 6)
    for each in (found, other):
        _, ticks = axis(each, "horizontal")
        assert [tick[1] for tick in ticks][:: len(ticks) - 1] == [2, 6]
    assert not page.locator("#tip").is_visible()  # what it showed may be elsewhere now
    box = found.locator(".canvas").bounding_box()
    page.mouse.dblclick(box["x"] + 200, box["y"] + 50)
    assert_within_a_pixel(other, expected("Accuracy"))


def test_the_log_button_changes_the_axis_of_its_panel_only(visit, one):
    page = visit(one)
    found, other = panel(page, "Loss on the probe"), panel(page, "The run's own losses")
    found.get_by_role("button", name="log").click()
    assert found.locator(".log").get_attribute("aria-pressed") == "false"
    assert other.locator(".log").get_attribute("aria-pressed") == "true"
    assert_within_a_pixel(found, expected("loss"))


def test_a_run_by_steps_is_read_and_zoomed_by_steps(visit, tmp_path):
    rows = {step: {"min_weight_norm": 1.0 / step} for step in range(50000, 1000001, 50000)}
    page = visit(report(tmp_path / "report.html", write_run(tmp_path / "run", rows, axis="step")))
    found = panel(page, "Smallest weight norm")
    hover(page, found, 500000)
    assert page.locator("#tip p").inner_text() == "step 500000"
    last = found.locator(".tick.horizontal").last
    assert last.text_content() == "1000000"
    label, canvas = (
        each.evaluate("each => each.getBoundingClientRect().right") for each in (last, found.locator(".canvas"))
    )
    assert label <= canvas
    found.locator(".plot").focus()
    page.keyboard.press("End")
    assert page.locator("#live").inner_text().startswith("step 1000000: ")
    for _ in range(20):
        page.keyboard.press("+")
    assert page.evaluate("page.zoom") == [950000, 1000000]  # two measurements, not a part of a step
    found.locator(".tools .table").click()
    cells = found.locator(".numbers tr").first.locator("th").all_inner_texts()
    assert cells == ["step", "w_min"]
