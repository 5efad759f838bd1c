"""Reports of runs by steps."""

import pytest

from support.view.report_cases import Page, awkward_rows, report, write_run


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
