"""The report as a file: its numbers, its words, its names, and that nothing in it asks the network for anything."""

import base64
import hashlib
import json
import math
import re
from importlib.resources import files

import pytest

from lightning_normtheory.record.history import History, Row, read_histories
from lightning_normtheory.view.html.data import color
from lightning_normtheory.view.html.panels import findings
from lightning_normtheory.view.html.report import write_report
from lightning_normtheory.view.html.run_names import named_runs
from lightning_normtheory.view.panels import PANELS, SECTIONS

from support.report_cases import HOSTILE, THEOREMS, Page, awkward_rows, report, sweep, write_run


def one(tmp_path, rows=None, **about):
    return Page(report(tmp_path / "report.html", write_run(tmp_path / "run", rows or awkward_rows(), **about)))


def numbers(path):
    """(metric without prefix, epoch) → the number as the file has it, read by nobody's code but json's."""
    found = {}
    for line in map(json.loads, path.read_text().splitlines()):
        for group, users in (("metrics", ""), ("user_metrics", "users/")):
            for name, value in line.get(group, {}).items():
                name = name.replace("normtheory_layers/", "layers/").removeprefix("normtheory/")
                found[users + name, line["epoch"]] = value
    return found


def embedded(run, epochs):
    return {
        (key, epoch): value
        for key, values in run["series"].items()
        for epoch, value in zip(epochs, values, strict=True)
        if value is not None
    }


def test_the_numbers_are_those_of_the_file_to_the_last_bit(tmp_path):
    path = write_run(tmp_path / "run", awkward_rows())
    data = Page(report(tmp_path / "report.html", path)).data
    found = embedded(data["runs"][0], data["positions"][0])
    assert found == numbers(path)
    assert {value for value in found.values() if isinstance(value, str)} == {"nan", "inf", "-inf"}
    assert found["ntk_condition_number", 5] == 0.1 + 0.2


def test_runs_with_the_same_epochs_share_them(tmp_path):
    paths = [*sweep(tmp_path), write_run(tmp_path / "short", {0: {"loss": 1.0}})]
    data = Page(report(tmp_path / "report.html", *paths)).data
    assert sorted(data["positions"]) == [[0], [0, 1, 2, 3]]
    for run in data["runs"]:
        assert embedded(run, data["positions"][run["positions"]])


def test_every_metric_of_the_file_is_in_a_plot(tmp_path):
    path = write_run(tmp_path / "run", awkward_rows())
    data = Page(report(tmp_path / "report.html", path)).data
    assert {curve["key"] for plot in data["plots"] for curve in plot["curves"]} == {name for name, _ in numbers(path)}


def test_sections_are_in_order_and_only_those_with_data(tmp_path):
    page = one(tmp_path)
    titles = page.all("h2")
    expected = [name for name in SECTIONS if name != "BatchNorm"]
    assert titles == [*expected, "Which theorem applies", "How it was measured", "Glossary"]
    assert [href.removeprefix("#") for href in page.attributes("a", "href") if not href.startswith("#panel")] == [
        section["id"] for tag, section in page.elements if tag == "section"
    ]
    assert "Effective rank" not in page.all("h3")


def test_own_metrics_are_panels_of_the_overview(tmp_path):
    page = one(tmp_path)
    plots = {plot["title"]: plot for plot in page.data["plots"]}
    losses = plots["The run's own losses"]
    assert [curve["label"] for curve in losses["curves"]] == ["Train_Loss", "Val_Loss"]
    assert losses["scale"] == "log"
    assert [curve["label"] for curve in plots["Accuracy"]["curves"]] == ["Accuracy"]
    assert "Accuracy" in page.text_of("section", id="overview")


def test_the_cards_have_the_last_values(tmp_path):
    assert one(tmp_path).all("span", class_="value") == ["0.3333", "0.5", "8e-05", "11", "1.235e+05"]


def test_what_a_panel_says_of_one_run_has_its_numbers(tmp_path):
    page = one(tmp_path)
    (panel,) = [text for text in page.all("article") if text.startswith("Sharpness")]
    assert re.search("λ_max .*crossed 2/η.* 11 .* 10", panel)


def test_what_a_panel_says_of_several_runs_is_grouped(tmp_path):
    page = Page(report(tmp_path / "report.html", *sweep(tmp_path, seeds=(0, 1, 2))))
    said = page.all("p", class_="reading")
    assert (
        "▲take note: In 3 of 6 runs: λ_max has crossed 2/η (width 256, seed 0, width 256, seed 1, width 256, seed 2)."
        in said
    )
    assert any(text.startswith("✓good: In 3 of 6 runs: λ_max has stayed below 2/η (width 64") for text in said)
    each = [text for text in page.all("details", class_="each") if "crossed" in text]
    assert all("width 256, seed 1" in text for text in each)
    assert each


def test_what_is_bad_comes_first_also_where_it_is_rare(tmp_path):
    (panel,) = [panel for panel in PANELS if panel.title == "Sharpness and the edge of stability"]
    runs = named_runs(
        [h for path in sweep(tmp_path, widths=(16, 32, 64, 256), seeds=(0,)) for h in read_histories(path)]
    )
    assert [(len(finding.texts), finding.mood) for finding in findings(panel, runs)] == [(1, "bad"), (3, "good")]


BELOW = {"rsc_ratio": "the loss is below zero", "ntk_lambda_min": "no predictor was found"}


def test_why_a_number_is_missing_is_where_it_is_missed_and_at_the_end(tmp_path):
    rows = {epoch: {"loss": -1.0 - epoch, "rsc_ratio": math.nan} for epoch in range(3)}
    measured = {"loss": "training_step", "predictor": f"forward of {HOSTILE}", "parameters": "all 12"}
    path = write_run(tmp_path, rows, reasons=BELOW, samples=50, measured=measured)
    page = Page(report(tmp_path / "report.html", path))
    readings = page.all("p", class_="reading")
    assert "•R is undefined in every epoch: the loss is below zero." in readings
    assert "•Not measured: λ_min of the kernel. Reason: no predictor was found." in readings
    assert any("Loss on the probe" in text and "linear axis" in text for text in page.attributes("div", "aria-label"))
    (about,) = page.all("section", id="how-it-was-measured")
    for text in ("R = ‖∇L‖²/Levery epochthe loss is below zero", "predictorforward of", "probe50 (64 asked for)"):
        assert text in about
    (facts,) = page.all("dl", class_="facts")
    assert "samples50 (64 asked for)" in facts
    assert "parametersall 12" in facts


def test_of_several_runs_it_is_said_which_one_lacks_a_number(tmp_path):
    rows = {0: {"loss": 1.0}}
    paths = [
        write_run(tmp_path / "a", rows, run="demo/a", reasons=BELOW),
        write_run(tmp_path / "b", rows, run="demo/b"),
    ]
    readings = Page(report(tmp_path / "report.html", *paths)).all("p", class_="reading")
    assert any(
        text.startswith("•In 1 of 2 runs: Not measured: λ_min of the kernel. Reason: no predictor was found (")
        for text in readings
    )


# -- names -------------------------------------------------------------------------------------------------------------


def names(*paths):
    return [name for name, _ in named_runs([history for path in paths for history in read_histories(path)])]


def test_runs_are_named_and_ordered_by_the_settings_in_which_they_differ(tmp_path):
    paths = sweep(tmp_path, widths=(256, 64))
    expected = ["width 64, seed 0", "width 64, seed 1", "width 256, seed 0", "width 256, seed 1"]
    assert names(*paths) == expected
    assert names(*paths[::2]) == ["width 64", "width 256"]
    assert names(*paths[:2]) == ["seed 0", "seed 1"]
    page = Page(report(tmp_path / "report.html", *paths))
    assert [run["name"] for run in page.data["runs"]] == expected
    assert page.data["runs"][0]["series"]["layers/weight_norm__net_0"] == [64.0, 65.0, 66.0, 67.0]


def test_runs_without_settings_are_named_by_what_differs_in_their_folders(tmp_path):
    rows = {0: {"loss": 1.0}}
    same = [write_run(tmp_path / "sweep" / name / "demo" / "1", rows) for name in ("a", "b")]
    assert names(*same) == ["a", "b"]
    assert names(write_run(tmp_path / "c", rows, run="demo/3"), same[0]) == ["3", "1"]


@pytest.mark.parametrize("config", ["- a list", "{not: [yaml", "just words", ""])
def test_a_config_of_another_kind_is_passed_over(tmp_path, config):
    paths = [write_run(tmp_path / name, {0: {"loss": 1.0}}, run=f"demo/{name}") for name in "ab"]
    for path in paths:
        path.with_name("config.yaml").write_text(config)
    assert names(*paths) == ["a", "b"]


def test_runs_with_many_differences_are_named_by_their_folders(tmp_path):
    paths = [
        write_run(tmp_path / n, {0: {"loss": 1.0}}, run=f"demo/{n}", config={"model": dict.fromkeys("pqrs", n)})
        for n in "ab"
    ]
    assert names(*paths) == ["a", "b"]


def test_two_prefixes_of_one_file_and_a_file_named_twice_have_names(tmp_path):
    path = write_run(tmp_path / "run", {0: {"loss": 1.0}})
    assert names(path, path) == ["demo/1 (1)", "demo/1 (2)"]
    write_run(tmp_path / "run", {0: {"loss": 2.0}}, settings={"prefix": "other"})
    assert names(path) == ["demo/1, normtheory", "demo/1, other"]
    data = Page(report(tmp_path / "report.html", path)).data
    assert [run["series"]["loss"] for run in data["runs"]] == [[1.0], [2.0]]


# -- theorems, settings, head ------------------------------------------------------------------------------------------


def test_runs_with_equal_theorems_share_a_table(tmp_path):
    paths = sweep(tmp_path)
    page = Page(report(tmp_path / "report.html", *paths))
    assert len(page.all("table", class_="theorems")) == 1
    assert page.all("td", class_="verdict") == ["≈ generalized", "✓ applies", "✗ does not apply"]
    assert {"10 outputs", "‖x‖ is 3, not 1", "no BatchNorm"} <= set(page.all("li"))
    other = write_run(tmp_path / "other", {0: {"loss": 1.0}}, theorems=THEOREMS[:1])
    page = Page(report(tmp_path / "report.html", *paths, other))
    assert len(page.all("table", class_="theorems")) == 2


def test_theorems_that_differ_in_a_measured_number_share_a_table(tmp_path):
    paths = [
        write_run(
            tmp_path / str(i),
            {0: {"loss": 1.0}},
            run=f"demo/{i}",
            theorems=[{"theorem": "T", "verdict": "generalized", "reasons": [f"‖v‖ of net.0.{layer} is 0.{i}, not 1"]}],
        )
        for i, layer in enumerate((1, 1, 2))
    ]
    page = Page(report(tmp_path / "report.html", *paths))
    assert len(page.all("table", class_="theorems")) == 2
    assert {"‖v‖ of net.0.1 is 0…0.1, not 1", "‖v‖ of net.0.2 is 0.2, not 1"} <= set(page.all("li"))


def test_a_run_without_theorems_has_no_such_section(tmp_path):
    assert "Which theorem applies" not in one(tmp_path, theorems=[]).all("h2")


def test_the_head_says_what_was_measured_on(tmp_path):
    head = one(tmp_path).text_of("dl", class_="facts")
    for text in ("epochs8", "samples64", "losstraining_step", "BatchNormas trained", "Nov 2023"):
        assert text in head


def test_no_path_of_the_machine_is_in_the_file(tmp_path):
    paths = sweep(tmp_path)
    assert str(tmp_path) not in Page(report(tmp_path / "report.html", *paths)).source
    page = one(tmp_path)
    assert str(tmp_path) not in page.source
    assert page.text_of("code") == "demo/1/normtheory.jsonl"


def test_a_killed_run_shows_its_epochs(tmp_path):
    path = write_run(tmp_path / "run", {epoch: {"loss": 1.0 + epoch} for epoch in range(3)})
    path.write_bytes(path.read_bytes()[:-20])
    data = Page(report(tmp_path / "report.html", path)).data
    assert data["positions"] == [[0, 1]]


def test_a_run_without_a_finished_epoch_gives_a_page_that_says_so(tmp_path):
    page = Page(write_report([History(tmp_path / "normtheory.jsonl", "demo/1", "normtheory")], tmp_path / "r.html"))
    assert "nothing yet" in page.text_of("dl", class_="facts")


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "report.html")


# -- for those without eyes or without JavaScript ----------------------------------------------------------------------


def test_every_plot_has_an_alternative_text_with_first_and_last_values(tmp_path):
    page = one(tmp_path)
    texts = [found["aria-label"] for _, found in page.elements if found.get("role") == "img"]
    assert len(texts) == len(page.data["plots"])
    (text,) = [text for text in texts if text.startswith("Sharpness")]
    assert text.endswith("over the epochs 0 to 8, log axis. λ_max from 3 to 11; 2/η from 10 to 10.")


def test_the_alternative_text_of_several_runs_has_ranges(tmp_path):
    page = Page(report(tmp_path / "report.html", *sweep(tmp_path)))
    labels = [found["aria-label"] for _, found in page.elements if found.get("role") == "img"]
    assert any("λ_max of 4 runs from 1…4.01 to 4…16.01;" in label for label in labels)


def test_without_javascript_there_are_first_and_last_values(tmp_path):
    page = one(tmp_path)
    assert any("λ_max311" in text and "2/η1010" in text for text in page.all("noscript"))


# -- nothing from outside, and nothing to outside ----------------------------------------------------------------------


def hostile(tmp_path):
    name = HOSTILE.replace("/", "∕")  # a metric's name ends where the next section begins
    rows = {0: {f"layers/weight_norm__{name}": 1.0, "Loss" + HOSTILE: 2.0, "X" + HOSTILE: 3.0, "loss": 1.0}}
    theorems = [{"theorem": HOSTILE, "verdict": "applies", "reasons": [HOSTILE]}]
    settings = {"loss": HOSTILE, "callback": HOSTILE}
    return [
        write_run(tmp_path / str(i), rows, run=f"{i}{HOSTILE}{i}", theorems=theorems, settings=settings)
        for i in range(2)
    ]


def test_names_cannot_become_markup(tmp_path):
    paths = hostile(tmp_path)
    for some in (paths[:1], paths):
        page = Page(report(tmp_path / "report.html", *some))
        assert page._open == []
        assert page.all("img") == []
        assert len(page.all("script")) == 2
        assert not [name for _, found in page.elements for name in found if name.startswith("on")]
        assert page.data["plots"][-1]["title"] == "X" + HOSTILE
        assert HOSTILE in page.all("li")
        assert [run["name"] for run in page.data["runs"]] == [f"{i}{HOSTILE}{i}" for i in range(len(some))]
    assert Page(report(tmp_path / "report.html", paths[0])).text_of("h1") == f"0{HOSTILE}0"


def test_half_a_character_in_a_name_does_not_stop_the_report(tmp_path):
    history = History(
        tmp_path / "normtheory.jsonl", "demo/\ud83d", "normtheory", rows=[Row(0, 0, 0.0, {"loss": 1.0}, {})]
    )
    assert Page(write_report([history], tmp_path / "report.html")).text_of("h1") == "demo/?"


def test_nothing_in_the_file_makes_a_request(tmp_path):
    source = Page(report(tmp_path / "report.html", *sweep(tmp_path))).source
    assert "http" not in source.replace('http-equiv="Content-Security-Policy"', "")
    for word in ("src=", "url(", "@import", "fetch(", "XMLHttpRequest", "WebSocket", "sendBeacon", "import("):
        assert word not in source
    assert re.findall(r"<link[^>]*>", source) == ['<link rel="icon" href="data:,">']


def test_the_policy_allows_this_script_and_this_style_and_nothing_else(tmp_path):
    source = Page(report(tmp_path / "report.html", *sweep(tmp_path))).source
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', source)
    script, style = re.findall(r"<script>(.*?)</script>", source, re.S) + re.findall(
        r"<style>(.*?)</style>", source, re.S
    )
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'" in policy
    assert "unsafe" not in policy


# -- colors -----------------------------------------------------------------------------------------------------------


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colors_stand_out_from_the_ground(theme):
    css = files("lightning_normtheory.view.html").joinpath("page/page.css").read_text()
    found = {name: pair[theme] for name, *pair in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", css)}
    lines = [name for name in found if re.fullmatch(r"[cs]\d+", name)]
    assert {color(i, of) for of in range(1, 60) for i in range(of)} == set(lines)
    for name in lines:
        assert contrast(found[name], found["paper"]) >= 3, name
        assert f".{name} {{ --color: var(--{name}); }}" in css
    for name in ("ink", "faint", "link", "good", "bad"):
        for ground in ("paper", "ground"):
            assert contrast(found[name], found[ground]) >= 4.5, (name, ground)


def test_two_lines_of_one_kind_have_different_dashes_where_colors_tell_runs_apart(tmp_path):
    rows = {0: {"ntk_direction_share": 0.1, "ntk_length_share": 0.2, "ntk_rest_share": 0.7}}
    paths = [write_run(tmp_path / name, rows, run=f"demo/{name}") for name in "ab"]
    css = files("lightning_normtheory.view.html").joinpath("page/page.css").read_text()
    (plot,) = Page(report(tmp_path / "report.html", *paths)).data["plots"]
    assert [(curve["dashes"], curve["color"]) for curve in plot["curves"]] == [(f"measured-{i}", "") for i in range(3)]
    (plot,) = Page(report(tmp_path / "report.html", paths[0])).data["plots"]
    assert [(curve["dashes"], curve["color"]) for curve in plot["curves"]] == [
        ("measured-0", f"c{i}") for i in range(3)
    ]
    styles = re.findall(r"\.(?:measured|bound|limit|floor)-\d \{ stroke-dasharray: ([\d. ]+); \}", css)
    assert len(set(styles)) == 11  # all but measured-0, which is solid


def test_the_numbers_of_the_page_are_finite_or_strings(tmp_path):
    """A strict reader, such as the browser's, refuses NaN."""
    text = Page(report(tmp_path / "r.html", write_run(tmp_path / "run", {0: {"loss": math.nan}}))).text_of(
        "script", id="data"
    )
    assert json.loads(text, parse_constant=pytest.fail)["runs"][0]["series"] == {"loss": ["nan"]}


@pytest.mark.parametrize(("wanted", "text"), [(2, "<dd>2</dd>"), (9, "<dd>2, so far, of 9</dd>"), (-1, "<dd>2</dd>")])
def test_a_run_that_was_to_have_more_epochs_says_so(tmp_path, wanted, text):
    path = write_run(tmp_path / "run", {0: {"loss": 1.0}, 1: {"loss": 0.5}})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(lines[0]) | {"max_epochs": wanted}), *lines[1:]]) + "\n")
    assert text in report(tmp_path / "report.html", path).read_text()


def test_the_papers_are_named(tmp_path):
    page = report(tmp_path / "report.html", write_run(tmp_path / "run", {0: {"loss": 1.0}})).read_text()
    assert "Optimization and Generalization Guarantees for Weight Normalization" in page
    assert "Liu, Zhu, Belkin (2020)" in page
    assert "an assumption of the theorem fails" in page


# -- runs by steps -----------------------------------------------------------------------------------------------------


def step_rows(*steps):
    return {step: row for step, row in zip(steps, awkward_rows().values())}


def test_a_run_by_steps_speaks_of_steps(tmp_path):
    path = write_run(tmp_path / "run", step_rows(500, 1000, 12000), axis="step", max_steps=12100, max_epochs=-1)
    page = Page(report(tmp_path / "report.html", path))
    assert page.data["axis"] == "step"
    assert page.data["positions"] == [[500, 1000, 12000]]
    assert "measurements3, up to step 12000sam" in page.text_of("dl", class_="facts")
    assert "double click to see all steps" in page.text_of("p", class_="hint")
    assert any("over the steps 500 to 12000, " in text for text in page.attributes("div", "aria-label"))
    assert "As the run last logged them before each measurement." in page.all("p", class_="about")
    assert "epoch" not in page.source


@pytest.mark.parametrize(
    ("steps", "limit", "text"),
    [
        ((100, 200), 1000, "2, so far up to step 200 of 1000"),
        ((100, 200), 300, "2, so far up to step 200 of 300"),
        ((100, 200), 299, "2, up to step 200"),
        ((100,), 199, "1, up to step 100"),
        ((100,), 123456, "1, so far up to step 100 of 123456"),
        ((100, 200), None, "2, up to step 200"),
        ((100, 200), "3 epochs", "2, so far up to step 200"),
    ],
)
def test_a_run_that_was_to_have_more_steps_says_so(tmp_path, steps, limit, text):
    limits = {"max_epochs": 3} if limit == "3 epochs" else {"max_steps": limit}
    path = write_run(tmp_path / "run", step_rows(*steps), axis="step", **limits)
    assert f"<dd>{text}</dd>" in report(tmp_path / "report.html", path).read_text()


def test_runs_by_epochs_and_by_steps_share_the_axis_of_steps(tmp_path):
    epochs = write_run(tmp_path / "a", {epoch: {"loss": 1.0 + epoch} for epoch in range(3)}, run="demo/a")
    steps = write_run(tmp_path / "b", {5: {"loss": 3.0}, 25: {"loss": 2.0}}, run="demo/b", axis="step")
    page = Page(report(tmp_path / "report.html", epochs, steps))
    assert page.data["axis"] == "step"
    assert [page.data["positions"][run["positions"]] for run in page.data["runs"]] == [[10, 20, 30], [5, 25]]
    facts = page.text_of("dl", class_="facts")
    assert "measurements2…3 each, up to step 25…30" in facts
    assert "axisoptimizer steps: some runs were measured by epochs" in facts
