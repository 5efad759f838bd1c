"""The data that reach W&B: the real client with a fake server."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb.cli.cli as wandb_cli

from lightning_normtheory.record.history import read_histories
from lightning_normtheory.record.metrics import find_metric

from support.lit import rows
from support.tracking import wandb_server
from support.tracking.wandb_server import TODAYS_CLIENT, WandbServer

pytestmark = pytest.mark.filterwarnings("ignore")
SUPPORT = Path(wandb_server.__file__).parent


def start(folder, server, *command, **environment):
    """Run a process in this folder whose W&B client uses the server, regardless of the environment."""
    folder.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    known = {"OMP_NUM_THREADS": "1", **server.environment(), **environment}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env={**clean, **known}, capture_output=True, text=True, timeout=300
    )


def fit(folder, server, environment=None, **options):
    """Run `wandb_fit.py` with these options, and require success."""
    done = start(folder, server, SUPPORT / "wandb_fit.py", json.dumps(options), **(environment or {}))
    assert done.returncode == 0, done.stderr
    assert server.unknown == []
    return done


def of_ours(row):
    """Return the callbacks' metrics of a row, without the table of layers."""
    return {n: v for n, v in row.items() if n.startswith(("normtheory", "other")) and "/table" not in n}


def bare(name):
    section, rest = name.split("/")
    return f"layers/{rest}" if section.endswith("_layers") else rest


def assert_delivered(run, folder, epochs):
    """Assert that every row of the file arrived once, with all metrics and their definitions."""
    written = rows(folder)
    assert sorted(written) == list(range(epochs))
    arrived = [row for row in run.history if "normtheory/rsc_ratio" in row]
    assert [row["epoch"] for row in arrived] == sorted(written)
    for row in arrived:
        assert of_ours(row) == pytest.approx(written[row["epoch"]], rel=1e-6, nan_ok=True)  # logged in float32
    for name in written[0]:
        assert run.metrics[name] == {"step_metric": "epoch", "summary": find_metric(bare(name)).summary.split(",")}, (
            name
        )
    patterns = [name for name in run.metrics if "*" in name]
    assert patterns == ["*"] or (not TODAYS_CLIENT and not patterns)  # Lightning's own, which older clients do not send


@pytest.fixture(scope="module")
def online(tmp_path_factory):
    """A run with two more loggers."""
    folder = tmp_path_factory.mktemp("online")
    with WandbServer() as server:
        fit(folder, server, beside=["TensorBoardLogger", "CSVLogger"])
    return server.run, folder


def test_every_row_arrives_with_its_definitions(online):
    run, folder = online
    assert_delivered(run, folder, epochs=3)
    assert run.exit_codes == [0]


def test_a_definition_comes_before_the_first_row_with_its_name(online):
    """Read the client's own protocol, from which it sends."""
    _, folder = online
    if "leet" not in wandb_cli.cli.commands:
        pytest.skip("this client of W&B cannot show what is in its file")
    (path,) = folder.rglob("*.wandb")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", str(path), "--json"]
    records = [json.loads(line) for line in subprocess.check_output(inspect, text=True).splitlines()]
    defined = []
    for record in records:
        if record["type"] == "metric":
            defined.append(record["metric"].get("name"))
        if record["type"] == "history":
            assert set(of_ours(record["history"]["item"])) <= set(defined)
    assert len(defined) == len(set(defined))  # each once


def test_the_summary_has_the_extreme_and_the_last_value(online):
    run, folder = online
    written = [row["normtheory/rsc_ratio"] for row in rows(folder).values()]
    assert run.summary["normtheory/rsc_ratio"] == pytest.approx({"min": min(written), "last": written[-1]}, rel=1e-6)
    written = [row["normtheory/hessian_lambda_max"] for row in rows(folder).values()]
    expected = {"max": max(written), "last": written[-1]}
    assert run.summary["normtheory/hessian_lambda_max"] == pytest.approx(expected, rel=1e-6)


def test_the_config_says_how_the_numbers_came_about(online):
    run, _ = online
    config = run.config["normtheory"]
    assert {"NormTheory", "RSCRatio other", "versions"} == set(config)
    assert config["NormTheory"]["probe"] == 24
    assert config["NormTheory"]["loss"] == "training_step"
    assert config["NormTheory"]["batch_stats"] == "as trained"
    assert config["NormTheory"]["samples"] == 24
    assert (config["RSCRatio other"]["probe"], config["RSCRatio other"]["samples"]) == (512, 48)
    assert config["RSCRatio other"]["batch_stats"] == "batch"
    assert config["versions"]["torch"] == torch.__version__


def test_the_table_of_layers_arrives_once_where_the_last_epoch_is(online):
    run, folder = online
    (table,) = run.tables["normtheory_layers/table"]
    last = rows(folder)[2]
    assert table["columns"][0] == "layer"
    assert {row[0] for row in table["data"]} == {name.split("__")[1] for name in last if "_layers/" in name}
    for layer, *values in table["data"]:
        for quantity, value in zip(table["columns"][1:], values):
            written = last.get(f"normtheory_layers/{quantity}__{layer}")
            assert value == (written if written is None else pytest.approx(written, rel=1e-6, nan_ok=True))
    logged = [row for row in run.history if "normtheory_layers/table" in row or "other/loss" in row]
    assert [(row["epoch"], row["trainer/global_step"]) for row in logged[-2:]] == [(2, 17)] * 2


def test_other_loggers_get_what_they_got_before(online):
    _, folder = online
    lines = (folder / "beside" / "CSVLogger" / "version_0" / "metrics.csv").read_text().splitlines()
    assert set(of_ours(dict.fromkeys(lines[0].split(",")))) == set(rows(folder)[0])
    assert list((folder / "beside" / "TensorBoardLogger" / "version_0").glob("events.out.tfevents.*"))


def test_every_row_by_steps_arrives_beside_those_by_epochs(tmp_path):
    with WandbServer() as server:
        fit(tmp_path, server, every_n_steps=4)
    run = server.run
    (path,) = tmp_path.rglob("normtheory.jsonl")
    by_steps, by_epochs = read_histories(path)
    steps = [row.step for row in by_steps.measurements]
    assert steps == [4, 8, 12, 16]
    arrived = [row for row in run.history if "normtheory/rsc_ratio" in row]
    assert [row["trainer/global_step"] + 1 for row in arrived] == steps  # Lightning counts from 0
    for row, written in zip(arrived, by_steps.measurements):
        ours = {n: v for n, v in written.logged.items() if n.startswith("normtheory")}
        assert of_ours(row) == pytest.approx(ours, rel=1e-6, nan_ok=True)
    assert [row["epoch"] for row in run.history if "other/loss" in row] == list(by_epochs.series("loss"))
    axes = {name: run.metrics[name]["step_metric"] for row in run.history for name in of_ours(row)}
    assert {name.split("/")[0]: axis for name, axis in axes.items()} == {
        "normtheory": "trainer/global_step",
        "normtheory_layers": "trainer/global_step",
        "other": "epoch",
    }
    order = [row["trainer/global_step"] for row in run.history]
    assert order == sorted(order)
    assert [row["_step"] for row in run.history] == list(range(len(run.history)))  # none is dropped
    assert len(run.tables["normtheory_layers/table"]) == 1
    assert run.history[-1].keys() >= {"normtheory_layers/table"}
    assert run.summary["normtheory/rsc_ratio"]["last"] == pytest.approx(by_steps.last("rsc_ratio"), rel=1e-6)


@pytest.mark.slow
def test_every_row_arrives_in_spite_of_errors_of_the_server(tmp_path):
    with WandbServer() as server:
        for part in ("file_stream", "UpsertBucket", "CreateRunFiles", "CommitArtifact", "PUT"):
            server.fail_next(2, path_contains=part)
        server.fail_next(1, status=502, path_contains="file_stream")
        fit(tmp_path, server)
    assert sorted(status for _, status in server.requests if status != 200) == [500] * 10 + [502]
    assert_delivered(server.run, tmp_path, epochs=3)
    assert len(server.run.tables["normtheory_layers/table"]) == 1
    assert server.run.exit_codes == [0]


@pytest.mark.slow
def test_every_row_of_an_offline_run_arrives_when_it_is_synced(tmp_path):
    with WandbServer() as server:
        fit(tmp_path, server, environment={"WANDB_MODE": "offline"})
        assert server.requests == []
        (run,) = tmp_path.glob("wandb/offline-run-*")
        done = start(tmp_path, server, "-m", "wandb", "sync", str(run))
        assert done.returncode == 0, done.stderr
    assert_delivered(server.run, tmp_path, epochs=3)
    assert set(server.run.config["normtheory"]) == {"NormTheory", "RSCRatio other", "versions"}
    assert len(server.run.tables["normtheory_layers/table"]) == 1


@pytest.mark.slow
def test_a_resumed_run_goes_on(tmp_path):
    with WandbServer() as server:
        fit(tmp_path, server, wandb={"project": "demo", "id": "again"}, epochs=2)
        before = server.run.history
        resumed = {"project": "demo", "id": "again", "resume": "must"}
        fit(tmp_path, server, wandb=resumed, epochs=4, checkpoint="last.ckpt")
    assert server.run.history[: len(before)] == before
    assert_delivered(server.run, tmp_path, epochs=4)
    assert server.run.exit_codes == [0, 0]
    assert [row["_step"] for row in server.run.history] == list(range(len(server.run.history)))
    written = [row["normtheory/rsc_ratio"] for row in rows(tmp_path).values()]
    assert server.run.summary["normtheory/rsc_ratio"]["min"] == pytest.approx(min(written), rel=1e-6)


@pytest.mark.slow
def test_a_killed_run_keeps_its_rows(tmp_path):
    with WandbServer() as server:
        done = start(tmp_path, server, SUPPORT / "wandb_fit.py", json.dumps({"epochs": 5, "kill_in": 3}))
    assert done.returncode == -signal.SIGKILL
    assert sorted(rows(tmp_path)) == [0, 1, 2]
    assert server.run.exit_codes != [0]
    for row in rows(tmp_path).values():
        assert {"normtheory/hessian_lambda_max", "other/loss"} <= set(row)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch cannot distribute")
def test_the_second_process_leaves_wandb_alone(tmp_path):
    with WandbServer() as server:
        fit(tmp_path, server, devices=2)
    assert_delivered(server.run, tmp_path, epochs=3)
    assert len(server.run.tables["normtheory_layers/table"]) == 1


@pytest.mark.slow
def test_without_wandb_everything_else_works(tmp_path):
    with WandbServer() as server:
        fit(tmp_path, server, wandb=None, beside=["CSVLogger"], without_wandb=True)
    assert server.requests == []
    assert sorted(rows(tmp_path)) == [0, 1, 2]
