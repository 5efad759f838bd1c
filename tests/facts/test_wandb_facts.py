"""What we rely on in W&B and in Lightning's logger for it."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import wandb
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only
from wandb.sdk.wandb_run import Run

from support.lit import Classifier, loader, trainer


@pytest.fixture
def client():
    """The run that a logger would begin, which takes note of every call."""
    with mock.patch.object(wandb, "init") as init, mock.patch.object(wandb, "run", None):
        init.return_value = mock.MagicMock(spec=Run)
        yield init.return_value


def test_the_logger_defines_everything_over_the_global_step(client):
    _ = WandbLogger(project="demo").experiment
    definitions = {call.args[0]: call.kwargs.get("step_metric") for call in client.define_metric.call_args_list}
    assert definitions["*"] == "trainer/global_step"


def test_an_offline_logger_decides_for_the_whole_process(client, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    _ = WandbLogger(project="demo", offline=True).experiment
    assert os.environ["WANDB_MODE"] == "dryrun"


def test_in_other_processes_the_run_is_a_dummy(client, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert callable(WandbLogger(project="demo").experiment.config)  # a bound method, whatever is asked for
    client.define_metric.assert_not_called()


def test_lightning_leaves_the_run_open():
    fit = trainer([], logger=WandbLogger(project="demo"), max_epochs=1)
    fit.fit(Classifier("wn"), loader())
    assert wandb.run is not None
    wandb.finish()


@pytest.mark.parametrize("turn", ["first", "second"])
def test_no_test_meets_the_service_of_another(turn, monkeypatch):
    """Each turn leaves a run open, and ``monkeypatch`` puts its address back at the end."""
    assert wandb.run is None
    assert "WANDB_SERVICE" not in os.environ
    wandb.init(mode="offline", project="demo")
    monkeypatch.delenv("WANDB_SERVICE")


OFFLINE = """
import os, signal, wandb
run = wandb.init(mode="offline", project="demo")
for i in range(20):
    run.log({"a_metric": float(i)})
END
"""


@pytest.mark.parametrize(
    ("end", "there"), [("run.finish()", True), ("os.killpg(0, signal.SIGKILL)", False)], ids=["finish", "kill"]
)
def test_an_offline_run_that_is_killed_loses_its_rows(tmp_path, end, there):
    """Killed with its service, which might otherwise live long enough to write them."""
    script = OFFLINE.replace("END", end)
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, check=there, start_new_session=True
    )
    (path,) = tmp_path.rglob("*.wandb")
    assert (b"a_metric" in path.read_bytes()) == there
