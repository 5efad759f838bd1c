"""The report in a browser: pytest -m browser, with Chromium and `pip install -e ".[test,browser]"`.

The numbers are looked for where people see them: in the curves, from the places of the axis labels; in the tooltip; in
the table.
"""

import json
import math
import re
import shutil

import pytest

from report_cases import HOSTILE, awkward_rows, many_runs, report, sweep, write_run

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    place = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if place is None:
        pytest.fail("Expected Chromium on the PATH, but there is none: install it, on Debian with apt install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=place, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Opens a file; afterwards, nothing may have been complained of, and nothing asked for but the file."""
    pages, complaints, requests = [], [], []

    def visit(path, width=1400, height=900, **context):
        page = browser.new_context(viewport={"width": width, "height": height}, **context).new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        pages.append((page, path))
        return page

    yield visit
    for page, _ in pages:
        page.context.close()
    assert complaints == []
    assert sorted(url for url in requests if url != "data:,") == sorted(path.as_uri() for _, path in pages)


@pytest.fixture
def one(tmp_path):
    return report(tmp_path / "report.html", write_run(tmp_path / "run", awkward_rows()))


@pytest.fixture
def four(tmp_path):
    return report(tmp_path / "report.html", *sweep(tmp_path))


def panel(page, title):
    """A panel by its title, drawn."""
    found = page.locator("article", has=page.locator("h3", has_text=re.compile(f"^{re.escape(title)}$")))
    for details in found.locator("xpath=ancestor::details").all():
        details.evaluate("element => element.open = true")
    found.scroll_into_view_if_needed()
    found.evaluate(
        """article => new Promise(done => {
            const plot = page.plots.find(plot => plot.article === article);
            const look = () => plot.stale ? setTimeout(look, 10) : done();
            look();
        })"""
    )
    return found


def axis(found, kind):
    """Turns places into numbers, from the labels of two ticks."""
    ticks = found.locator(f".tick.{kind}[data-value]").evaluate_all(
        "(all, at) => all.map(tick => [Number(tick.getAttribute(at)), Number(tick.dataset.value), tick.textContent])",
        "x" if kind == "epoch" else "y",
    )
    (a, first, _), (b, last, _) = ticks[0], ticks[-1]
    if kind == "vertical" and found.locator(".log").get_attribute("aria-pressed") == "true":
        first, last = math.log10(first), math.log10(last)
        return lambda place: 10 ** (first + (place - a) / (b - a) * (last - first)), ticks
    return lambda place: first + (place - a) / (b - a) * (last - first), ticks


def points(found, run=0, curve=0):
    """The places of a curve's points, those of lone ones included."""
    group = found.locator(f"g[data-run='{run}'][data-curve='{curve}']")
    places = set()
    for path in group.locator("path").all():
        for part in path.get_attribute("d").replace("M", "L").split("L")[1:]:
            places.add(tuple(float(number) for number in part.split(",")))
    for dot in group.locator("circle").all():
        places.add((float(dot.get_attribute("cx")), float(dot.get_attribute("cy"))))
    return sorted(places)


def plotted(found, run=0, curve=0):
    """epoch → number, read off the axes."""
    (epoch, _), (value, _) = axis(found, "epoch"), axis(found, "vertical")
    return {round(epoch(x)): value(y) for x, y in points(found, run, curve)}


def expected(name, rows=None):
    return {epoch: row[name] for epoch, row in (rows or awkward_rows()).items() if name in row}


def assert_within_a_pixel(found, numbers, run=0, curve=0):
    """A place is rounded to a hundredth of a pixel, in an axis of 208 pixels."""
    got = plotted(found, run, curve)
    assert got.keys() == numbers.keys()
    value, _ = axis(found, "vertical")
    for (_, y), epoch in zip(points(found, run, curve), sorted(numbers)):
        ends = sorted([value(y - 0.05), value(y + 0.05)])
        assert ends[0] <= numbers[epoch] <= ends[1]


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
        for kind in ("epoch", "vertical"):
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
    # 1000, inf, 2000, nan, 0.3, -inf, 1e300, 5e-324: only the last two are neighbours.
    assert found.locator("g[data-run] path").get_attribute("d").count("M") == 1


def test_points_that_a_log_axis_cannot_show_are_counted(visit, one):
    found = panel(visit(one), "Generalisation gap and its bounds")
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


# -- tooltip, table, keyboard ------------------------------------------------------------------------------------------


def hover(page, found, epoch):
    """With the mouse, over an epoch."""
    place = found.locator(f".tick.epoch[data-value='{epoch}']").get_attribute("x")
    box = found.locator(".canvas").bounding_box()
    page.mouse.move(box["x"] + float(place) + 1, box["y"] + 100)


def tip(page):
    return [tuple(row.split("\n")) for row in page.locator("#tip li").all_inner_texts()]


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


def drag(page, found, first, last):
    box = found.locator(".canvas").bounding_box()
    for epoch, action in ((first, page.mouse.down), (last, page.mouse.up)):
        place = found.locator(f".tick.epoch[data-value='{epoch}']").get_attribute("x")
        page.mouse.move(box["x"] + float(place), box["y"] + 80, steps=4)
        action()


def test_dragging_zooms_all_panels_and_a_double_click_resets(visit, one):
    page = visit(one)
    found, other = panel(page, "Loss on the probe"), panel(page, "Accuracy")
    found.scroll_into_view_if_needed()
    drag(page, found, 2, 6)
    for each in (found, other):
        _, ticks = axis(each, "epoch")
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


# -- several runs ------------------------------------------------------------------------------------------------------


def drawn_runs(found):
    return sorted(
        {int(run) for run in found.locator("g[data-run]").evaluate_all("all => all.map(one => one.dataset.run)")}
    )


def test_runs_can_be_switched_off_and_on(visit, four):
    page = visit(four)
    found = panel(page, "Sharpness and the edge of stability")
    boxes = page.locator("#runs input")
    boxes.nth(1).click()
    assert drawn_runs(found) == [0, 2, 3]
    assert page.locator("#run-count").inner_text() == "3 of 4 runs; words and tiles are about all"
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


def test_runs_have_different_colours_and_bounds_are_dashed(visit, four):
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
    place = found.locator(".tick.epoch[data-value='2']").get_attribute("x")
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


# -- looks -------------------------------------------------------------------------------------------------------------


def ground(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_theme_follows_the_system_until_a_button_says_otherwise(visit, one):
    light, dark = visit(one, color_scheme="light"), visit(one, color_scheme="dark")
    assert ground(light) != ground(dark)
    button = dark.locator("#theme")
    button.click()
    assert (button.inner_text(), ground(dark)) == ("theme: light", ground(light))
    button.click()
    assert button.inner_text() == "theme: dark"
    assert ground(dark) != ground(light)


def test_the_theme_is_remembered(visit, one):
    page = visit(one, color_scheme="light")
    before = ground(page)
    page.locator("#theme").click()
    page.locator("#theme").click()
    page.evaluate("sessionStorage.clear()")
    again = page.context.new_page()
    again.goto(one.as_uri())
    assert ground(again) != before


@pytest.mark.parametrize("name", ["one", "four", "hostile"])
def test_a_phone_needs_no_scrolling_to_the_side(visit, tmp_path, request, name):
    path = hostile(tmp_path) if name == "hostile" else request.getfixturevalue(name)
    page = visit(path, width=390, height=844, has_touch=True, is_mobile=True)
    for details in page.locator("details").all():
        details.evaluate("element => element.open = true")
    for button in page.locator(".tools .table").all():
        button.tap()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("window.visualViewport.scale") == 1


def test_a_finger_shows_the_numbers(visit, one):
    page = visit(one, width=390, height=844, has_touch=True, is_mobile=True)
    found = panel(page, "Loss on the probe")
    box = found.locator(".canvas").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] - 16, box["y"] + 60)
    assert tip(page) == [("L", "0.2222")]
    edge = page.locator("#tip").bounding_box()
    assert edge["x"] >= 0
    assert edge["x"] + edge["width"] <= 390


def hostile_name(i):
    return f"{i}{HOSTILE}{40 * 'x'}{i}"


def hostile(tmp_path):
    name = HOSTILE.replace("/", "∕")
    rows = {e: {f"layers/weight_norm__{name}": 1.0, "Loss" + HOSTILE: 2.0, "loss": 1.0 + e} for e in range(2)}
    theorems = [{"theorem": HOSTILE, "verdict": "applies", "reasons": [HOSTILE]}]
    paths = [write_run(tmp_path / str(i), rows, run=hostile_name(i), theorems=theorems) for i in range(2)]
    return report(tmp_path / "report.html", *paths)


def test_hostile_names_are_only_shown(visit, tmp_path):
    page = visit(hostile(tmp_path))
    page.on("dialog", lambda dialog: pytest.fail("a name was run as a script"))
    found = panel(page, "The run's own losses")
    hover(page, found, 1)
    assert [name for name, _ in tip(page)] == [hostile_name(0), hostile_name(1)]
    found.get_by_role("button", name="table").click()
    assert found.locator(".numbers th").nth(1).inner_text() == hostile_name(0)
    assert page.locator("img").count() == 0


def test_without_javascript_there_are_the_numbers_in_words(visit, one):
    page = visit(one, java_script_enabled=False)
    found = page.locator("article", has_text="Sharpness")
    assert "λ_max\t3\t11" in found.inner_text()
    assert not found.locator(".plot").is_visible()


def test_printed_pages_have_all_plots(visit, one):
    page = visit(one)
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    empty = page.locator("main > section > .panels .canvas:not(:has(svg))")
    assert empty.count() == 0
    assert not page.locator("#bar").is_visible()


def test_twenty_runs_of_two_hundred_epochs_open_at_once(visit, tmp_path, capsys):
    path = report(tmp_path / "report.html", *many_runs(tmp_path))
    page = visit(path)
    panel(page, "Loss on the probe")
    drawn = page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))")
    size = path.stat().st_size / 1e6
    with capsys.disabled():
        print(f"\n20 runs × 200 epochs: {size:.1f} MB, opened and drawn after {drawn / 1000:.2f} s (3 s are asked for)")
    # The demand is 3 s on two cores; a machine that is busy with other things must not fail it.
    assert drawn < 15000
    data = json.loads(page.locator("#data").text_content())
    found = panel(page, "Loss on the probe")
    for run in (0, 19):
        assert_within_a_pixel(found, dict(enumerate(data["runs"][run]["series"]["loss"])), run=run)
