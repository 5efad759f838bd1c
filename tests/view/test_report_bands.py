"""Errors in the report and in the tables of a terminal: bands around the curves, ± behind the numbers."""

import io
import math
from pathlib import Path

from rich.console import Console

from lightning_normtheory.record.history import History, Row
from lightning_normtheory.record.metrics import METRICS, find_metric
from lightning_normtheory.view.html.data import panel_plots
from lightning_normtheory.view.terminal.fit_summary import end_table
from lightning_normtheory.view.terminal.report import print_report

from support.view.report_cases import Page, many_runs, one, report, write_run


def rows():
    return {
        epoch: {
            "hessian_trace": 8.0 - epoch,
            "hessian_trace_error": 0.5 + epoch,
            "hessian_lambda_max": 3.0,
            "hessian_lambda_max_residual": 0.01,
            "ntk_lambda_min": 0.25,
            "ntk_directions": 8.0,
            **({} if epoch == 1 else {"ntk_lambda_min_error": 0.012}),
            "layers/hessian_trace__net_0": 2.0,
            "layers/hessian_trace_error__net_0": 0.1,
        }
        for epoch in range(3)
    }


def curves(data):
    return {(plot["title"], curve["key"]): curve for plot in data["plots"] for curve in plot["curves"]}


def test_an_error_is_a_band_of_its_curve_and_no_line(tmp_path):
    found = curves(one(tmp_path, rows()).data)
    assert not {key for _, key in found if find_metric(key).error_of}
    widths = {key: curve["band"]["errors"] for (_, key), curve in found.items() if "band" in curve}
    assert widths == {
        "hessian_trace": 2.0,
        "hessian_lambda_max": 1.0,
        "ntk_lambda_min": 2.0,
        "layers/hessian_trace__net_0": 2.0,
    }
    assert found["Trace of each layer's Hessian", "layers/hessian_trace__net_0"]["band"] == {
        "key": "layers/hessian_trace_error__net_0",
        "label": "net_0, error",
        "errors": 2.0,
    }
    # λ_max is in two panels, and has its band in both.
    assert sum("band" in curve for (_, key), curve in found.items() if key == "hessian_lambda_max") == 2


def test_the_errors_are_embedded_to_the_last_bit(tmp_path):
    (run,) = one(tmp_path, rows()).data["runs"]
    assert run["series"]["hessian_trace_error"] == [0.5, 1.5, 2.5]
    assert run["series"]["ntk_lambda_min_error"] == [0.012, None, 0.012]


def test_panels_of_errors_alone_are_not_in_the_report(tmp_path):
    titles = {plot["title"] for plot in one(tmp_path, rows()).data["plots"]}
    assert not titles & {
        "Residuals of λ_max and ‖∇²f‖",
        "Standard error of the trace",
        "Errors of the estimated kernel",
    }
    assert "Random directions of the kernel" in titles


def test_an_error_without_its_metric_stays_a_line():
    history = History(Path(), "", "", rows=[Row(0, 1, 0.0, {"hessian_trace_error": 1.0}, {})])
    (plot,) = panel_plots([history])
    assert (plot.panel.key, plot.curves[0].key, plot.curves[0].band) == ("trace_error", "hessian_trace_error", None)


def test_one_run_with_an_error_is_enough_for_a_band(tmp_path):
    paths = [
        write_run(tmp_path / "a" / "demo" / "a", {0: {"hessian_trace": 1.0}}, run="demo/a"),
        write_run(tmp_path / "b" / "demo" / "b", {0: {"hessian_trace": 1.0, "hessian_trace_error": 0.1}}, run="demo/b"),
    ]
    data = Page(report(tmp_path / "report.html", *paths)).data
    assert curves(data)["Trace of the Hessian", "hessian_trace"]["band"]["errors"] == 2
    assert ["hessian_trace_error" in run["series"] for run in data["runs"]] == [False, True]


def test_the_legend_and_the_texts_say_what_is_shaded(tmp_path):
    page = one(tmp_path, rows())
    shades = page.all("li", class_="shade")
    assert {text.strip() for text in shades} == {"± 2 standard errors", "± residual of λ_max"}
    (text,) = [
        found["aria-label"]
        for _, found in page.elements
        if found.get("role") == "img" and found["aria-label"].startswith("Trace of the Hessian")
    ]
    assert text.endswith("tr(∇²L) from 8 ± 0.5 to 6 ± 2.5. Shaded: ± 2 standard errors.")
    assert any("tr(∇²L)8 ± 0.56 ± 2.5" in text for text in page.all("noscript"))


def test_an_error_that_is_no_number_is_left_out_of_the_texts(tmp_path):
    page = one(tmp_path, {0: {"hessian_trace": 8.0, "hessian_trace_error": math.nan}})
    texts = [found["aria-label"] for _, found in page.elements if found.get("role") == "img"]
    assert texts == ["Trace of the Hessian, at epoch 0, linear axis. tr(∇²L) 8. Shaded: ± 2 standard errors."]


def test_every_declared_error_becomes_a_band_if_its_metric_is_there(tmp_path):
    data = Page(report(tmp_path / "report.html", *many_runs(tmp_path, runs=1, epochs=2))).data
    bands = {find_metric(curve["band"]["key"]).name for curve in curves(data).values() if "band" in curve}
    assert bands == {metric.name for metric in METRICS if metric.error_of}


def text_report(history, width):
    console = Console(width=width, record=True, file=io.StringIO())
    print_report(history, console)
    return console.export_text()


def test_the_terminal_shows_standard_errors_if_they_fit():
    metrics = {"ntk_lambda_min": 0.25, "ntk_lambda_min_error": 0.0123, "hessian_lambda_max": 3.0}
    metrics["hessian_lambda_max_residual"] = 0.01
    history = History(Path(), "demo/1", "normtheory", rows=[Row(0, 1, 0.0, metrics, {})])
    wide, narrow = text_report(history, 80), text_report(history, 22)
    assert "0.25 ± 0.012" in wide
    assert "3 ±" not in wide  # a residual is no standard error
    assert "±" not in narrow.partition("λ_max:")[0]
    assert "0.25" in narrow


def test_the_table_at_the_end_has_the_standard_error_of_the_last_value():
    rows = [Row(e, e, 0.0, {"hessian_trace": 8.0 - e, "hessian_trace_error": 0.5 + e}, {}) for e in range(2)]
    text = end_table(History(Path(), "demo/1", "normtheory", rows=rows))
    assert text.splitlines()[-1].split("   ")[-1] == "± 1.5 (standard error)"
    nan = [Row(0, 0, 0.0, {"hessian_trace": 8.0, "hessian_trace_error": math.nan}, {})]
    assert "±" not in end_table(History(Path(), "demo/1", "normtheory", rows=nan))
