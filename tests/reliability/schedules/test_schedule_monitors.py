"""What watches the metrics finds those of the last measured step, and loggers get them at the right one."""

import csv

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from lightning_normtheory.callbacks import RSCRatio

from reliability.schedules.witness import read
from support.lit import Classifier, loader, trainer

LOSS = "normtheory/loss"
SINGLE = torch.finfo(torch.float32).eps  # Lightning keeps values in single precision


def fit(folder, *more, every=3, **arguments):
    """Two epochs of seven steps; the losses that were measured, by step."""
    torch.manual_seed(0)
    callbacks = [RSCRatio(probe=20, every_n_steps=every, on_error="raise"), *more]
    saves = any(isinstance(each, ModelCheckpoint) for each in more)
    options = {"max_epochs": 2, "default_root_dir": folder, "enable_checkpointing": saves, **arguments}
    run = trainer(callbacks, **options)
    run.fit(Classifier("wn", lr=0.005), loader())  # slow enough for a loss that falls
    return run, {step: row[LOSS] for step, row in read(folder)[0]["normtheory"].items()}


def test_a_checkpoint_of_the_least_loss(tmp_path):
    name = {"filename": "{step}", "auto_insert_metric_name": False}
    best = ModelCheckpoint(tmp_path / "saved", monitor=LOSS, every_n_train_steps=3, **name)
    _, losses = fit(tmp_path, best)
    assert list(losses) == [3, 6, 9, 12]
    least = min(losses, key=losses.get)
    assert float(best.best_model_score) == pytest.approx(losses[least], rel=SINGLE)
    assert best.best_model_path.endswith(f"/{least}.ckpt")
    assert torch.load(best.best_model_path, weights_only=True)["global_step"] == least


def test_every_checkpoint_has_the_loss_of_its_step(tmp_path):
    name = "{step}={" + LOSS + ":.9f}"
    keep = ModelCheckpoint(
        tmp_path / "saved", name, LOSS, save_top_k=-1, every_n_train_steps=3, auto_insert_metric_name=False
    )
    _, losses = fit(tmp_path, keep)
    found = dict(path.stem.split("=") for path in (tmp_path / "saved").glob("*.ckpt"))
    assert {int(step): float(loss) for step, loss in found.items()} == pytest.approx(losses, rel=SINGLE)


def test_a_checkpoint_between_measurements_has_the_last_one(tmp_path):
    keep = ModelCheckpoint(tmp_path / "saved", "{step}", LOSS, save_top_k=-1, every_n_train_steps=4)
    _, losses = fit(tmp_path, keep)
    scores = {int(path.rpartition("=")[2][:-5]): float(score) for path, score in keep.best_k_models.items()}
    assert scores == pytest.approx({4: losses[3], 8: losses[6], 12: losses[12]}, rel=SINGLE)


@pytest.mark.parametrize(("mode", "epochs"), [("min", 4), ("max", 2)])
def test_early_stopping_at_the_end_of_an_epoch(tmp_path, mode, epochs):
    stop = EarlyStopping(LOSS, mode=mode, patience=1, check_on_train_epoch_end=True)
    run, losses = fit(tmp_path, stop, max_epochs=4)
    monitored = [losses[step] for step in (6, 12, 21, 27)[:epochs]]  # the last ones in each epoch
    assert monitored == sorted(monitored, reverse=True)
    assert run.current_epoch == epochs
    assert float(stop.best_score) == pytest.approx(monitored[-1 if mode == "min" else 0], rel=SINGLE)


@pytest.mark.parametrize("interval", [1, 2, 50])
def test_csv_rows_come_at_the_step(tmp_path, interval):
    log = CSVLogger(tmp_path, "csv", 0)
    _, losses = fit(tmp_path, LearningRateMonitor("step"), logger=log, log_every_n_steps=interval)
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    # Lightning counts from zero when it logs: its step 2 is the third one.
    assert {int(row["step"]) + 1: float(row[LOSS]) for row in rows if row[LOSS]} == pytest.approx(losses, rel=1e-6)
    users = [int(row["step"]) for row in rows if row.get("train_loss_step")]
    assert users == [step for step in range(14) if (step + 1) % interval == 0]
    assert bool([row for row in rows if row.get("lr-Adam")]) == (interval < 50)


def test_tensorboard_scalars_come_at_the_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLogger(tmp_path, "board", 0)
    _, losses = fit(tmp_path, LearningRateMonitor("step"), logger=log, log_every_n_steps=2)
    events = EventAccumulator(log.log_dir).Reload()
    assert {event.step + 1: event.value for event in events.Scalars(LOSS)} == pytest.approx(losses, rel=1e-6)
    assert len(events.Scalars("lr-Adam")) == 7
