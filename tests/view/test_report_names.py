"""The names of the runs in a report."""

import pytest

from lightning_normtheory.record.history import read_histories
from lightning_normtheory.view.html.run_names import named_runs

from support.view.report_cases import Page, report, sweep, write_run


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
