"""The loggers and the file that receive the metrics."""

import json
import math
from pathlib import Path

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_normtheory.callbacks import MinWeightNorm, NormTheory, RSCRatio
from lightning_normtheory.record import jsonl

from support.lit import Classifier, loader, rows, trainer


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger, WandbLogger, None])
def test_every_logger_gets_the_metrics_and_the_file_lies_beside_the_checkpoints(logger, tmp_path):
    arguments = {"project": "demo"} if logger is WandbLogger else {"name": "demo"}
    log = logger(save_dir=str(tmp_path), **arguments) if logger is not None else False
    fit = trainer([NormTheory()], logger=log, enable_checkpointing=True, default_root_dir=tmp_path, max_epochs=2)
    fit.fit(Classifier("bn"), loader())
    (path,) = tmp_path.rglob("normtheory.jsonl")
    if logger is None:
        assert path.parent == tmp_path / "normtheory_logs" / "version_0"
    else:
        assert path.parent == Path(fit.checkpoint_callback.dirpath).parent
    if logger is CSVLogger:
        assert "normtheory/rsc_ratio" in (path.parent / "metrics.csv").read_text()
    if logger is WandbLogger:
        import wandb

        last = wandb.run.summary["normtheory/rsc_ratio"]["last"]
        assert last == pytest.approx(rows()[1]["normtheory/rsc_ratio"], rel=1e-5)
        wandb.finish()


def test_the_files_form(tmp_path):
    fit = trainer([NormTheory()], logger=CSVLogger(tmp_path, name="demo"), max_epochs=2)
    fit.fit(Classifier("bn"), loader(), loader(20, shuffle=False))
    (path,) = tmp_path.rglob("normtheory.jsonl")
    first, *others = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert set(first) == {
        *("schema", "run", "versions", "axis", "max_epochs", "max_steps", "settings", "samples", "measured"),
        *("optimizers", "theorems", "outputs", "training_samples"),
    }
    assert first["axis"] == "epoch"
    assert first["measured"] == {
        "loss": "training_step",
        "predictor": "the output of forward",
        "parameters": "all",
    }
    assert [set(row) for row in first["theorems"]] == [{"theorem", "verdict", "reasons", "assumptions"}] * 7
    assert first["schema"] == 1
    assert first["versions"]["torch"] == torch.__version__
    assert [set(row) for row in others] == [{"epoch", "step", "time", "metrics", "user_metrics"}] * 2
    assert [(row["epoch"], row["step"]) for row in others] == [(0, 7), (1, 14)]
    assert {"train_loss_epoch", "val_loss"} <= set(others[0]["user_metrics"])
    assert not any("normtheory" in name for name in others[0]["user_metrics"])


def test_callbacks_of_one_trainer_write_one_file():
    trainer([MinWeightNorm(), RSCRatio()], max_epochs=2).fit(Classifier("bn"), loader())
    assert {"normtheory/min_weight_norm", "normtheory/rsc_ratio"} <= set(rows()[1])
    trainer([MinWeightNorm()], max_epochs=1).fit(Classifier("bn"), loader())
    assert len(list(Path().rglob("normtheory.jsonl"))) == 2  # each trainer gets its own version


def test_a_torn_line_is_passed_over_and_the_next_run_starts_on_a_new_one(tmp_path):
    path = tmp_path / "normtheory.jsonl"
    jsonl.append(path, {"run": "demo"}, {"epoch": 0, "metrics": {"a": math.inf}})
    with path.open("a") as file:
        file.write('{"epoch": 1, "met')
    jsonl.append(path, {"run": "demo"}, {"epoch": 1, "metrics": {"a": -math.inf}})
    assert [line.get("epoch") for line in jsonl.read(path)] == [None, 0, 1]
    assert [line["metrics"]["a"] for line in jsonl.read(path) if "epoch" in line] == [math.inf, -math.inf]


def test_the_seconds_of_several_callbacks_add_up():
    fit = trainer([MinWeightNorm(), RSCRatio()], max_epochs=1)
    fit.fit(Classifier("bn"), loader())
    (path,) = Path().rglob("normtheory.jsonl")
    written = [line["metrics"]["normtheory/seconds"] for line in jsonl.read(path) if "epoch" in line]
    assert float(fit.callback_metrics["normtheory/seconds"]) == pytest.approx(sum(written), rel=1e-6)


def test_a_model_that_wandb_watches(tmp_path):
    log = WandbLogger(save_dir=str(tmp_path), project="demo")
    module = Classifier("bn")
    log.watch(module, log="all", log_freq=2)
    fit = trainer([NormTheory(on_error="raise")], logger=log, max_epochs=1)
    fit.fit(module, loader())
    log.experiment.finish()
    assert math.isfinite(fit.callback_metrics["normtheory/min_weight_norm"])


def test_fast_dev_run_writes_nothing():
    trainer([NormTheory()], fast_dev_run=True).fit(Classifier("bn"), loader())
    assert not list(Path().rglob("normtheory.jsonl"))
