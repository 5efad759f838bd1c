"""The workspace of W&B: what wandb-workspaces makes of it, and what the server receives from the real client."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces.workspaces import internal

from lightning_normtheory.record.metrics import METRICS, find_metric
from lightning_normtheory.view import dashboard
from lightning_normtheory.view.dashboard import DashboardError
from lightning_normtheory.view.panels import PANELS, SECTIONS

from support.tracking.wandb_server import ENTITY, TODAYS_CLIENT, WandbServer
from support.tracking.wandb_views import SavedViews

HEADLINES = {"min_weight_norm", "rsc_ratio", "ntk_lambda_min", "hessian_lambda_max", "rademacher_bound"}


def full(name, prefix="normtheory"):
    return f"{prefix}_{name}" if name.startswith("layers/") else f"{prefix}/{name}"


def shown(panel, prefix="normtheory"):
    """The metrics, stars included, that a line plot of the specification shows."""
    if "metricRegex" not in panel:
        return set(panel["metrics"])
    assert panel["useMetricRegex"]
    assert panel["metrics"] == []
    names = (full(metric.name, prefix) for metric in METRICS)
    return {name for name in names if re.search(panel["metricRegex"], name.replace("*", "some_layer"))}


@pytest.fixture
def wandb_environment(monkeypatch, tmp_path):
    """Nobody is logged in, and no setting of the machine counts."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))


@pytest.fixture
def server(monkeypatch, wandb_environment):
    with WandbServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
    assert server.unknown == []


@pytest.fixture
def views(server):
    return SavedViews(server, projects={"demo"})


def run(code, environment):
    """A process of its own: the client remembers for ever who is logged in where."""
    command = f"from lightning_normtheory.view import dashboard\n{code}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", command],
        env={**clean, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


# -- the specification -------------------------------------------------------------------------------------------------


def test_the_specification_needs_no_account_and_no_network(tmp_path):
    code = """
import socket
def refuse(*arguments, **options):
    raise AssertionError("a connection")
socket.socket.connect = refuse
print(dashboard.specification(dashboard.workspace("demo")))"""
    done = run(code, {"NETRC": str(tmp_path / "none"), "WANDB_CONFIG_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    spec = json.loads(done.stdout)
    assert [section["name"] for section in spec["section"]["panelBankConfig"]["sections"]] == list(SECTIONS)


def test_the_specification_passes_through_the_models_of_the_package():
    made = dashboard.workspace("demo", "someone")
    text = dashboard.specification(made)
    parsed = internal.WorkspaceViewspec.model_validate_json(text)
    view = internal.View(entity="someone", project="demo", display_name="again", name="", id="", spec=parsed)
    again = ws.Workspace._from_model(view)
    assert json.loads(dashboard.specification(again)) == json.loads(text)
    kinds = {type(panel) for section in again.sections for panel in section.panels}
    assert kinds == {wr.LinePlot, wr.ScalarChart, wr.WeavePanelSummaryTable}


def test_the_specification_is_readable():
    text = dashboard.specification(dashboard.workspace("demo"))
    assert "λ_max" in text
    assert max(map(len, text.splitlines())) < 300


@pytest.mark.parametrize("project", ["", "someone/demo"])
def test_a_project_that_cannot_be(project):
    with pytest.raises(DashboardError, match="Expected the name of a project"):
        dashboard.workspace(project)


@pytest.mark.parametrize("prefix", ["", "a/b", "a.b"])
def test_a_prefix_that_no_callback_takes(prefix):
    with pytest.raises(DashboardError, match="Expected the prefix of a callback"):
        dashboard.workspace("demo", prefix=prefix)


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, EOFError])
def test_who_does_not_answer_the_clients_question_is_told_how_to_log_in(monkeypatch, wandb_environment, stopped):
    def ask(*args, **kwargs):
        raise stopped

    monkeypatch.setattr(wandb, "Api", ask)
    with pytest.raises(DashboardError, match="run wandb login"):
        dashboard.save("demo")


def test_a_prefix_with_signs_is_taken_literally():
    made = dashboard.workspace("demo", prefix="a+b $")
    (panel,) = [
        panel
        for section in made.sections
        for panel in section.panels
        if getattr(panel, "title", "") == "Share of the lengths"
    ]
    assert re.search(panel.metric_regex, "a+b $_layers/ntk_length_share__net_0")
    assert not re.search(panel.metric_regex, "aab $_layers/ntk_length_share__net_0")


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(DashboardError, match=re.escape('pip install "lightning-normtheory[wandb]"')):
        dashboard.workspace("demo")
    with pytest.raises(DashboardError, match="pip install"):
        dashboard.save("demo")


# -- what the server receives ------------------------------------------------------------------------------------------


def test_every_panel_arrives_with_its_metrics_scale_and_axis(views):
    dashboard.save("demo")
    arrived = views.only.panels
    assert list(views.only.sections) == list(SECTIONS)
    for panel in PANELS:
        config = arrived[panel.section, panel.title]
        assert shown(config) == {full(line.metric) for line in panel.lines}, panel.title
        assert config["yLogScale"] == (panel.scale == "log")
        assert config["xAxis"] == "epoch"


def test_runs_by_steps_have_the_global_step_as_their_axis(views):
    dashboard.save("demo", axis="step")
    axes = [config["xAxis"] for config in views.only.panels.values() if "xAxis" in config]
    assert set(axes) == {"trainer/global_step"}
    assert len(axes) > len(PANELS)  # with the run's own losses
    assert '"epoch"' not in views.only.spec_json


def test_every_metric_arrives(views):
    dashboard.save("demo", prefix="other")
    plots = [config for config in views.only.panels.values() if "xAxis" in config]
    assert set().union(*(shown(config, "other") for config in plots)) == {full(m.name, "other") for m in METRICS}


def test_details_come_last_in_their_section_and_the_others_fill_its_first_page(views):
    dashboard.save("demo")
    details = {(panel.section, panel.title): panel.detail for panel in PANELS}
    for name, section in views.only.sections.items():
        titles = [panel["config"].get("chartTitle") for panel in section["panels"]]
        flags = [details.get((name, title), False) for title in titles]
        assert flags == sorted(flags), name
        page = section["flowConfig"]["columnsPerPage"] * section["flowConfig"]["rowsPerPage"]
        assert section["flowConfig"]["columnsPerPage"] == 3
        assert flags.count(False) <= page < flags.count(False) + 3
        assert section["isOpen"] == (name not in ("WeightNorm", "BatchNorm"))


def test_a_section_of_details_starts_closed(monkeypatch):
    only = tuple(dataclasses.replace(panel, detail=True) for panel in PANELS if panel.section == "Kernel")
    monkeypatch.setattr(dashboard, "PANELS", only)
    opened = {section.name: section.is_open for section in dashboard.workspace("demo").sections}
    assert not opened["Kernel"]
    assert opened["Overview"]


def test_the_headlines_are_the_last_values_of_the_summary(views):
    """The client stores a summary of "min,last" as {"min": …, "last": …}."""
    dashboard.save("demo")
    section = views.only.sections["Overview"]
    charts = [panel["config"] for panel in section["panels"] if panel["viewType"] == "Scalar Chart"]
    assert {chart["metrics"][0] for chart in charts} == {f"{full(name)}.last" for name in HEADLINES}
    assert all(find_metric(name).summary.endswith("last") for name in HEADLINES)


def test_the_table_of_layers_is_in_its_section(views):
    dashboard.save("demo", prefix="other")
    (table,) = [panel for panel in views.only.sections["Layers"]["panels"] if panel["viewType"] == "Weave"]
    assert '"val": "other_layers/table"' in json.dumps(table)


OWN = {
    "Loss, as the run logs it": (
        *("loss", "train_loss", "train_loss_epoch", "val_loss", "val/loss", "val_loss/dataloader_idx_0", "Loss/val"),
        *("train/ce_loss", "validation_loss", "test-loss", "loss_epoch"),
    ),
    "Accuracy, as the run logs it": (
        *("accuracy", "acc", "val_acc", "val_accuracy", "val/acc1", "train_acc_top5", "Accuracy/train", "val_top1_acc"),
    ),
}


@pytest.mark.parametrize("title", OWN)
def test_the_runs_own_curves_are_found_by_their_names(title):
    (panel,) = [panel for panel in dashboard.workspace("demo").sections[0].panels if panel.title == title]
    for name in OWN[title]:
        assert re.search(panel.metric_regex, name), name
    others = {"lr-SGD", "epoch", "trainer/global_step", "glossary", "account", "val_lossless", "accelerator"}
    ours = {full(metric.name) for metric in METRICS} | {full(metric.name, "my_loss") for metric in METRICS}
    for name in others | ours | {name for key, names in OWN.items() if key != title for name in names}:
        assert not re.search(panel.metric_regex, name), name


# -- saving ------------------------------------------------------------------------------------------------------------


def test_the_address_opens_the_view(views):
    address = dashboard.save("demo")
    assert address.endswith(f"/{ENTITY}/demo?nw=normtheory")
    opened = ws.Workspace.from_url(address)
    assert [section.name for section in opened.sections] == list(SECTIONS)


def test_saving_again_replaces_the_view(views):
    assert dashboard.save("demo") == dashboard.save("demo", ENTITY)
    assert views.only.updates == 1


def test_each_prefix_has_a_view(views):
    addresses = {dashboard.save("demo", prefix=prefix) for prefix in ("normtheory", "a-view", "a view", "nw-x")}
    assert len(addresses) == len(views.views) == 4
    for address in addresses:
        ws.Workspace.from_url(address)


def test_a_project_that_is_not_there(views):
    with pytest.raises(DashboardError, match=f"{ENTITY}/nothing does not exist .* run once with a WandbLogger"):
        dashboard.save("nothing")
    with pytest.raises(DashboardError, match="stranger/demo does not exist"):
        dashboard.save("demo", "stranger")
    assert views.views == {}


def test_a_server_that_refuses(server, views):
    server.fail_next(1, 403, path_contains="UpsertView2")
    with pytest.raises(DashboardError, match=r"W&B did not save the dashboard .*403.*: check"):
        dashboard.save("demo")


SAVE = """
try:
    print(dashboard.save("demo"))
except dashboard.DashboardError as error:
    print(error)"""


def test_nobody_is_logged_in(tmp_path):
    done = run(SAVE, {"NETRC": str(tmp_path / "none"), "WANDB_CONFIG_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Expected to be logged in to W&B, .*: run wandb login$", done.stdout.strip())


def test_no_network(tmp_path):
    done = run(SAVE, {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_HTTP_TIMEOUT": "2"})
    assert done.returncode == 0, done.stderr
    explained = r"^W&B cannot be reached .*: check the network, or run wandb login --relogin$"
    if not TODAYS_CLIENT:  # it does not try the key first, and fails at the next request
        explained += "|^W&B did not .*: check the network, "
    assert re.search(explained, done.stdout.strip())
