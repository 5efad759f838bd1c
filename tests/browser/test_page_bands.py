"""The report in a browser: errors are bands around the curves."""

import math
import re

import pytest

from browser.page_cases import assert_within_a_pixel, axis, hover, panel, tip
from support.view.report_cases import report, write_run

pytestmark = pytest.mark.browser
TITLE = "Trace of the Hessian"


def trace(values, errors):
    return {
        epoch: {"hessian_trace": value, **({} if error is None else {"hessian_trace_error": error})}
        for epoch, (value, error) in enumerate(zip(values, errors, strict=True))
    }


def page_of(tmp_path, *runs):
    paths = [write_run(tmp_path / f"{i}" / "demo" / f"{i}", rows, run=f"demo/{i}") for i, rows in enumerate(runs)]
    return report(tmp_path / "report.html", *paths)


def bands(found, run=0):
    """The places of the edges of a run's bands, an area or a bar each: [(x, y), …]."""
    paths = found.locator(f".band[data-run='{run}']").evaluate_all("all => all.map(one => one.getAttribute('d'))")
    pieces = [piece for path in paths for piece in path.split("M")[1:]]
    return [[tuple(map(float, pair.split(","))) for pair in re.findall(r"[-\d.]+,[-\d.]+", piece)] for piece in pieces]


def edges(found, run=0):
    """epoch → (lower, upper), read off the axes, for the points within the frame."""
    (epoch, _), (value, _) = axis(found, "horizontal"), axis(found, "vertical")
    read = {}
    for piece in bands(found, run):
        for x, y in piece:
            read.setdefault(round(epoch(x)), []).append(value(y))
    return {at: (min(ends), max(ends)) for at, ends in read.items()}


@pytest.mark.parametrize("log", [False, True])
def test_a_band_reaches_two_standard_errors_up_and_down(visit, tmp_path, log):
    values, errors = [10.0, 8.0, 5.0, 4.0], [1.0, 0.5, 2.0, 0.25]
    found = panel(visit(page_of(tmp_path, trace(values, errors))), TITLE)
    if log:
        found.locator(".log").click()
    assert_within_a_pixel(found, dict(enumerate(values)))
    for epoch, (low, high) in edges(found).items():
        assert low == pytest.approx(values[epoch] - 2 * errors[epoch], abs=0.02)
        assert high == pytest.approx(values[epoch] + 2 * errors[epoch], abs=0.02)
    assert len(bands(found)) == 1


def test_a_residual_is_drawn_once(visit, tmp_path):
    rows = {epoch: {"hessian_lambda_max": 3.0 + epoch, "hessian_lambda_max_residual": 0.5} for epoch in range(3)}
    found = panel(visit(page_of(tmp_path, rows)), "Sharpness and the edge of stability")
    assert edges(found)[0] == pytest.approx((2.5, 3.5), abs=0.02)


def test_a_band_below_zero_ends_at_the_frame_of_a_log_axis(visit, tmp_path):
    found = panel(visit(page_of(tmp_path, trace([4.0, 2.0, 1.0], [0.1, 1.5, 0.1]))), TITLE)
    found.locator(".log").click()
    frame = found.locator("svg.area").evaluate("area => [area.y.baseVal.value, area.height.baseVal.value]")
    (piece,) = bands(found)
    assert max(y for _, y in piece) >= sum(frame)  # clipped there
    _, ticks = axis(found, "vertical")
    assert min(value for _, value, _ in ticks) >= 0.1  # the axis does not run after it


def test_a_band_breaks_where_a_value_or_an_error_is_unknown(visit, tmp_path):
    values = [9.0, 8.0, math.nan, 7.0, 6.0, 5.0, 4.0, 3.0]
    errors = [0.5, 0.5, 0.5, 0.5, math.nan, 0.5, 0.5, None]
    found = panel(visit(page_of(tmp_path, trace(values, errors))), TITLE)
    epoch, _ = axis(found, "horizontal")
    pieces = sorted(sorted({round(epoch(x)) for x, _ in piece}) for piece in bands(found))
    assert pieces == [[0, 1], [3], [5, 6]]
    assert found.locator(".band.lone").count() == 1


def test_a_single_huge_error_does_not_flatten_the_curve(visit, tmp_path):
    found = panel(visit(page_of(tmp_path, trace([10.0, 9.0, 8.0], [0.1, 1e6, math.inf]))), TITLE)
    _, ticks = axis(found, "vertical")
    assert max(value for _, value, _ in ticks) <= 21


def test_the_numbers_are_shown_and_spoken_with_their_errors(visit, tmp_path):
    page = visit(page_of(tmp_path, trace([0.2134, 0.5, 0.25], [0.0412, math.nan, 0.0])))
    found = panel(page, TITLE)
    hover(page, found, 0)
    assert tip(page) == [("tr(∇²L)", "0.2134 ± 0.041")]
    found.locator(".plot").focus()
    page.keyboard.press("Home")
    assert page.locator("#live").inner_text() == "epoch 0: tr(∇²L) 0.2134 ± 0.041"
    page.keyboard.press("ArrowRight")
    assert page.locator("#live").inner_text() == "epoch 1: tr(∇²L) 0.5"
    page.keyboard.press("ArrowRight")
    assert page.locator("#live").inner_text() == "epoch 2: tr(∇²L) 0.25 ± 0"


def test_the_table_has_a_column_of_errors(visit, tmp_path):
    rows = trace([1.5, 1.0], [0.25, 0.125])
    found = panel(visit(page_of(tmp_path, rows, rows)), TITLE)
    found.locator("button.table").click()
    cells = [row.split("\t") for row in found.locator(".numbers tr").all_inner_texts()]
    assert [len(row) for row in cells] == [5, 5, 5]
    assert cells[0][2].endswith(", error of tr(∇²L)")
    assert cells[1][1:] == ["1.5", "0.25", "1.5", "0.25"]


def test_bands_follow_the_shown_runs_and_the_one_under_the_pointer(visit, tmp_path):
    runs = [trace([value, value], [0.5, 0.5]) for value in (1.0, 10.0)]
    page = visit(page_of(tmp_path, *runs))
    found = panel(page, TITLE)
    assert found.locator(".bands .band").count() == 2
    hover(page, found, 1)
    assert found.locator(".bands .band.closest").count() == 1
    page.locator("#runs input").first.click()
    assert found.locator(".bands .band").count() == 1
    assert bands(found, run=1)


def test_twenty_bands_are_fainter_than_one(visit, tmp_path):
    def opacity(count):
        folder = tmp_path / str(count)
        found = panel(visit(page_of(folder, *[trace([i + 1.0, i + 2.0], [0.5, 0.5]) for i in range(count)])), TITLE)
        return float(found.locator(".bands .band").first.evaluate("band => getComputedStyle(band).opacity"))

    assert opacity(20) < opacity(1)


def test_the_swatch_of_a_curve_with_a_band_is_shaded_in_its_color(visit, tmp_path):
    found = panel(visit(page_of(tmp_path, trace([2.0, 1.0], [0.5, 0.5]))), TITLE)
    fill = "rect => getComputedStyle(rect).fill"
    swatch, shade = found.locator(".legend .curve .band"), found.locator(".legend .shade .band")
    assert swatch.evaluate(fill) == found.locator(".bands .band").first.evaluate(fill)
    assert shade.evaluate(fill) != swatch.evaluate(fill)


def test_what_is_measured_seldom_has_no_line_between_its_epochs(visit, tmp_path):
    """A line between distant epochs would cross λ_max, which is outside of it only in between."""
    rows = {epoch: {"hessian_lambda_max": 3.0 + epoch % 2} for epoch in range(5)}
    for epoch in (0, 4):
        rows[epoch] |= {"hessian_lambda_max_lower": 2.5, "hessian_lambda_max_upper": 3.5}
    found = panel(visit(page_of(tmp_path, rows)), "Sharpness and the edge of stability")
    drawn = found.locator(".area g[data-curve] path.line").evaluate_all("all => all.map(one => one.getAttribute('d'))")
    pieces = [[len(piece.split("L")) for piece in path.split("M")[1:]] for path in drawn]
    assert sorted(pieces) == [[2, 2], [2, 2], [5]]  # a bar at either epoch, and the line of λ_max
    (epoch, _) = axis(found, "horizontal")
    bars = [path.split("M")[1].split("L") for path in drawn if path.count("M") == 2]
    for ends in bars:
        left, right = (float(end.split(",")[0]) for end in ends)
        assert epoch((left + right) / 2) == pytest.approx(0, abs=0.05)
        assert right - left == pytest.approx(10, abs=0.05)
