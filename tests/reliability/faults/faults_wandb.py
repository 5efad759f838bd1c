"""W&B: a client that raises, and a server that dies in the middle of a run."""

import json
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytorch_lightning as pl
import torch

from lightning_normtheory.callbacks import NormTheory

from reliability.faults.fault_process import DEAD, INSIDE, start
from reliability.faults.fault_runs import Comparison, fit, undisturbed
from reliability.faults.faults_errors import OnPurposeError
from reliability.outcome import Outcome
from support.lit import Classifier, rows
from support.tracking.wandb_server import WandbServer

MODULE = partial(Classifier, "bn")


def refusing(part: str) -> mock.Mock:
    """A run of W&B that takes everything but one thing."""
    experiment = mock.Mock(["define_metric", "config", "log", "id"], id="x")
    experiment.config = mock.MagicMock(wraps={})
    if part == "log":
        # Only the table at the end: what Lightning logs in training is between the user and W&B.
        experiment.log.side_effect = lambda metrics: None if "normtheory_layers/table" not in metrics else refuse()
    else:
        getattr(experiment.config if part == "update" else experiment, part).side_effect = OnPurposeError
    return experiment


def refuse() -> None:
    raise OnPurposeError


def failing_client(folder: Path, part: str) -> Outcome:
    check = Comparison()
    reference, bare = undisturbed("bn")
    # Lightning itself defines the axis of a run when it makes the logger.
    experiment = refusing("log")
    log = pl.loggers.WandbLogger(project="demo", experiment=experiment, save_dir=folder)
    log._experiment = refusing(part)
    watched = fit(folder / "watched", [NormTheory()], module=MODULE, logger=log)
    check.training(watched, bare)
    check.rows(watched._replace(folder=folder).rows, reference.rows)
    check.reports(watched, "on purpose")
    return check.outcome


def dead_server(folder: Path) -> Outcome:
    """The server is gone after the second epoch; the run ends, and its file has all rows.

    What the client itself does with a dead server is its own affair: it tries again and again when the process ends,
    for as long as its settings say. They are short here.
    """
    check = Comparison()
    with WandbServer() as server:
        process = start(folder, {"task": "wandb"}, **server.environment() | IMPATIENT)
        while process.poll() is None and not (folder / INSIDE).exists():
            time.sleep(0.05)
        server.answer = mock.Mock(side_effect=ConnectionResetError)  # connections that are open die as well
    (folder / DEAD).touch()
    try:
        _, errors = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
        check.holds("the process does not end", False)
    check.equal(f"how the process ended ({errors[-300:]})", process.returncode, 0)
    check.equal("the epochs in the file", sorted(rows(folder)), [0, 1, 2, 3])
    check.equal("the last epoch in the checkpoint", torch.load(folder / "last.ckpt", weights_only=True)["epoch"], 3)
    messages = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else []
    check.equal("warnings about the table", sum("table of the layers" in message for message in messages), 1)
    return check.outcome


IMPATIENT = {
    "WANDB_X_FILE_STREAM_RETRY_MAX": "2",
    "WANDB_X_FILE_STREAM_RETRY_WAIT_MAX_SECONDS": "1",
    "WANDB_X_FILE_TRANSFER_RETRY_MAX": "2",
    "WANDB_X_FILE_TRANSFER_RETRY_WAIT_MAX_SECONDS": "1",
    "WANDB_X_GRAPHQL_RETRY_MAX": "2",
    "WANDB_X_GRAPHQL_RETRY_WAIT_MAX_SECONDS": "1",
}

CASES: dict[str, Callable[[Path], Outcome]] = {
    **{
        f"W&B refuses {name}": partial(failing_client, part=part)
        for part, name in (("define_metric", "an axis"), ("update", "the settings"), ("log", "the table of layers"))
    },
    "W&B's server dies in the middle": dead_server,
}
