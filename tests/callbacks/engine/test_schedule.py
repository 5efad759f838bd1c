"""When the callbacks measure: after epochs or steps, as asked for, or as the run suggests."""

import itertools
from datetime import timedelta
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset

from lightning_normtheory.callbacks import MinWeightNorm, NormTheory, RSCRatio
from lightning_normtheory.callbacks.engine.schedule import Schedule
from lightning_normtheory.record import jsonl

from support.lit import Classifier, loader, tensors, trainer


class Endless(IterableDataset):
    """The same samples again and again."""

    def __iter__(self):
        return itertools.cycle(zip(*tensors(50)))


def endless():
    return DataLoader(Endless(), 8)


def positions(folder="."):
    (path,) = Path(folder).rglob("normtheory.jsonl")
    return [(row["epoch"], row["step"]) for row in jsonl.read(path) if "epoch" in row]


def header():
    (path,) = Path().rglob("normtheory.jsonl")
    return next(jsonl.read(path))


def fit(callback, data=None, module=None, **options):
    pl.seed_everything(0)
    made = trainer([callback], **options)
    made.fit(module or Classifier(), loader() if data is None else data)
    return made


def test_steps_in_and_across_epochs():
    """An epoch has seven batches."""
    fit(RSCRatio(every_n_steps=3), max_epochs=2)
    assert positions() == [(0, 3), (0, 6), (1, 9), (1, 12)]
    assert (header()["axis"], header()["settings"]["every_n_steps"]) == ("step", 3)
    assert header()["settings"]["every_n_epochs"] is None


def test_an_accumulation_window_is_one_step():
    fit(RSCRatio(every_n_steps=2), max_epochs=3, accumulate_grad_batches=3)  # steps at the batches 3, 6, 7
    assert positions() == [(0, 2), (1, 4), (1, 6), (2, 8)]


class Two(Classifier):
    """Two optimizers; the second one steps in every second batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        for optimizer in (first, second)[: 1 + batch_idx % 2]:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in (first, second)[: 1 + batch_idx % 2]:
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net[0], self.net[1])]


def test_the_steps_of_all_optimizers_count():
    """As for max_steps: 1, 3, 4, 6, 7, 9, 10 after the seven batches."""
    fit(MinWeightNorm(every_n_steps=4), module=Two(), max_epochs=1)
    assert positions() == [(0, 4), (0, 9)]


@pytest.mark.parametrize(
    ("data", "options", "expected", "text"),
    [
        (endless, {"max_steps": 60}, Schedule(3, "step"), "every 3 steps, since an epoch has no known end"),
        (endless, {"max_steps": 5}, Schedule(1, "step"), "every step, since an epoch has no known end"),
        (loader, {"max_steps": 6}, Schedule(1, "step"), "every step, since an epoch is longer than max_steps=6"),
        (loader, {"max_steps": 7}, Schedule(1, "epoch"), ""),
        (loader, {"max_steps": 6, "accumulate_grad_batches": 2}, Schedule(1, "epoch"), ""),
        (endless, {"max_epochs": 2, "limit_train_batches": 5}, Schedule(1, "epoch"), ""),
        (
            endless,
            {"max_time": timedelta(seconds=1)},
            Schedule(1000, "step"),
            "every 1000 steps, since the run has no known end",
        ),
        (
            endless,
            {"max_time": timedelta(seconds=1), "val_check_interval": 200, "check_val_every_n_epoch": None},
            Schedule(200, "step"),
            "every 200 steps, since the run has no known end",
        ),
    ],
)
def test_the_schedule_that_the_run_suggests(data, options, expected, text, monkeypatch):
    class Stop(Callback):
        def on_train_batch_start(self, trainer, *_):
            trainer.should_stop = True

    said: list[str] = []
    monkeypatch.setattr("lightning_normtheory.callbacks.output.messages.rank_zero_info", said.append)
    callback = MinWeightNorm()
    options = {"max_epochs": None, **options}
    made = trainer([callback, Stop()], **options)
    made.fit(Classifier(), data(), loader(16, shuffle=False))
    assert callback._schedule == expected
    spoken = [each for each in said if not each.startswith("\n")]  # without the table at the end
    assert spoken == ([f"normtheory: measuring {text}. every_n_steps= sets it."] if text else [])
    given = MinWeightNorm(every_n_epochs=1)
    trainer([given, Stop()], **options).fit(Classifier(), data(), loader(16, shuffle=False))
    assert given._schedule == Schedule(1, "epoch")


class Slow(Classifier):
    """Its optimizer steps in every fourth batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 4 == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_an_epoch_of_a_manual_step_is_not_said_to_be_long(monkeypatch):
    """It has seven batches, but one step."""
    said: list[str] = []
    monkeypatch.setattr("lightning_normtheory.callbacks.output.messages.rank_zero_info", said.append)
    made = fit(MinWeightNorm(), module=Slow(), max_epochs=None, max_steps=3)
    assert made.current_epoch == 3
    assert [each for each in said if not each.startswith("\n")] == [
        "normtheory: measuring every step, since an epoch may be longer than max_steps=3. every_n_steps= sets it."
    ]


def test_about_twenty_rows_of_an_endless_stream():
    fit(MinWeightNorm(), endless(), max_epochs=None, max_steps=47)
    assert positions() == [(0, step) for step in range(3, 47, 3)]


def test_nothing_is_measured_before_the_probe_is_complete():
    """Its 20 samples are in three batches, so the start is measured before the third step."""
    callback = NormTheory(probe=20, ntk_samples=8, every_n_steps=1, on_error="raise")
    made = fit(callback, endless(), max_epochs=None, max_steps=4)
    assert positions() == [(0, 3), (0, 4)]
    assert made.callback_metrics["normtheory/ntk_change"] > 0
    assert 0 < made.callback_metrics["normtheory/loss_ratio"] != 1
    assert sum(batch.samples for batch in callback.probe.batches(0, 1)) == 24


def test_an_endless_epoch_is_pointed_out(monkeypatch):
    monkeypatch.setattr("lightning_normtheory.callbacks.engine.fit.UNKNOWN_INTERVAL", 10)

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= 11

    with pytest.warns(UserWarning, match=r"this one goes on after 10 batches. Pass every_n_steps="):
        trainer([MinWeightNorm(), Stop()], max_epochs=1).fit(Classifier(), endless())


def test_a_second_fit_continues_to_count():
    callback = MinWeightNorm(every_n_steps=5)
    made = fit(callback, max_epochs=1)
    made.fit_loop.max_epochs = 2
    made.fit(Classifier(), loader())
    assert positions() == [(0, 5), (1, 10)]


def test_loggers_and_monitors_get_every_row(tmp_path):
    """Also between the steps at which Lightning logs."""
    logger = CSVLogger(tmp_path)
    best = ModelCheckpoint(monitor="normtheory/rsc_ratio", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    pl.seed_everything(0)
    made = trainer(
        [best, RSCRatio(every_n_steps=2)], logger=logger, enable_checkpointing=True, log_every_n_steps=5, max_epochs=1
    )
    made.fit(Classifier(), loader())
    (table,) = tmp_path.rglob("metrics.csv")
    names, *lines = (line.split(",") for line in table.read_text().splitlines())
    logged = [dict(zip(names, line)) for line in lines]
    assert [row["step"] for row in logged if row["normtheory/rsc_ratio"]] == ["1", "3", "5"]  # counted from zero
    assert all(row["epoch"] == "0" for row in logged)
    measured = [row["metrics"] for row in jsonl.read(next(tmp_path.rglob("normtheory.jsonl"))) if "epoch" in row]
    assert sorted(float(score) for score in best.best_k_models.values()) == pytest.approx(
        sorted(row["normtheory/rsc_ratio"] for row in measured), rel=1e-6
    )


class SaveFirst(Callback):
    """Saves a checkpoint after the fifth step, before the next callback measures it."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 5:
            trainer.save_checkpoint("five.ckpt")


def test_a_step_that_the_checkpoint_missed_is_measured_after_the_resume(tmp_path):
    pl.seed_everything(0)
    order = [SaveFirst(), RSCRatio(every_n_steps=5)]
    trainer(order, max_epochs=2, default_root_dir="a").fit(Classifier(), loader(shuffle=False))
    trainer([RSCRatio(every_n_steps=5)], max_epochs=2, default_root_dir="b").fit(
        Classifier(), loader(shuffle=False), ckpt_path="five.ckpt"
    )
    assert positions("a") == positions("b") == [(0, 5), (1, 10)]
    # The loader starts again at its first batch, so only the step of the checkpoint is the same in both.
    files = [next(Path(name).rglob("normtheory.jsonl")) for name in "ab"]
    first, second = (next(row["metrics"] for row in jsonl.read(path) if "epoch" in row) for path in files)
    assert first | {"normtheory/seconds": 0} == second | {"normtheory/seconds": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "Expected every_n_steps to be a positive integer, but got 0"),
        ({"every_n_steps": True}, "but got True"),
        ({"every_n_steps": 1.5}, "but got 1.5"),
        ({"every_n_steps": 2, "every_n_epochs": 1}, "Expected every_n_epochs or every_n_steps, but got both"),
    ],
)
def test_wrong_schedules(arguments, message):
    with pytest.raises(ValueError, match=message):
        RSCRatio(**arguments)


def test_an_interval_longer_than_the_run_is_pointed_out():
    with pytest.warns(UserWarning, match="MinWeightNorm measures nothing: every_n_steps=8 is more than the 7 steps"):
        fit(MinWeightNorm(every_n_steps=8), max_epochs=1)


@pytest.mark.parametrize("arguments", [{"every_n_steps": 10}, {"every_n_epochs": 5}, {}])
def test_a_trial_run_measures_once(arguments):
    made = fit(RSCRatio(on_error="raise", **arguments), fast_dev_run=True)
    assert made.callback_metrics["normtheory/rsc_ratio"] > 0
