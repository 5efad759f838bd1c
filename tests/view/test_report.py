"""The report as a file: its numbers and its words."""

import json
import math
import re

import pytest

from lightning_normtheory.record.history import History, read_histories
from lightning_normtheory.view.html.panels import findings
from lightning_normtheory.view.html.report import write_report
from lightning_normtheory.view.html.run_names import named_runs
from lightning_normtheory.view.panels import PANELS, SECTIONS

from support.view.report_cases import HOSTILE, THEOREMS, Page, awkward_rows, one, report, sweep, write_run


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
    expected = [name for name in SECTIONS if name not in ("WeightNorm", "BatchNorm")]
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
        "▲take note: In 3 of 6 runs: λ_max has crossed 2/η (width 256, seed 0; width 256, seed 1; width 256, seed 2)."
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
