"""`max_overhead`: which epochs it skips, on a clock that the tests control."""

import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.callbacks.engine import budget
from lightning_normtheory.callbacks.engine.budget import TimeBudget
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.record import jsonl

from reliability.resume.resume_cases import LAST_STEPS
from support.clock import stop_clock, wait
from support.lit import Classifier, loader, rows, trainer

BATCHES = 5  # per epoch, two seconds each


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    stop_clock(monkeypatch, budget)


class Slow(Diagnostic):
    """Its measurements take the given times; after the last one, that time again."""

    key = "measurements"
    metrics = (key,)
    needs_loss = False

    def __init__(self, start, costs):
        self.start_takes, self.costs = start, costs
        self.measured = 0

    def start(self, view):
        wait(self.start_takes)

    def measure(self, view):
        wait(self.costs[min(self.measured, len(self.costs) - 1)])
        self.measured += 1
        return {"measurements": float(self.measured)}

    def state_dict(self):
        return {"measured": self.measured}

    def load_state_dict(self, state):
        self.measured = state["measured"]


class SlowTheory(NormTheory):
    def __init__(self, *costs, start=0.0, **arguments):
        self.start_takes, self.costs = start, costs
        super().__init__(on_error="raise", **arguments)

    def make_diagnostics(self):
        return [Slow(self.start_takes, self.costs)]


class Pass(pl.Callback):
    """Advances the clock in the given hooks; by default two seconds per batch."""

    def __init__(self, **seconds):
        for hook, value in (seconds or {"on_train_batch_end": 2.0}).items():
            setattr(self, hook, lambda *args, value=value: wait(value))


class Count(pl.Callback):
    """Counts the training batches."""

    batches = 0

    def on_train_batch_end(self, *args):
        self.batches += 1


def fit(callback, epochs=10, others=(), checkpoint=None, **arguments):
    run = trainer([callback, Pass(), *others], max_epochs=epochs, **arguments)
    run.fit(Classifier("wn"), loader(8 * BATCHES), loader(8, shuffle=False), ckpt_path=checkpoint)
    return run


def measured(folder="."):
    """Return the epochs that were measured."""
    return [epoch for epoch, row in rows(folder).items() if "normtheory/measurements" in row]


# -- the argument ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -0.1, math.nan, math.inf, True, "0.1", [0.1]])
def test_a_limit_is_a_positive_number(wrong):
    with pytest.raises(ValueError, match=r"positive fraction .* but got .* Use None"):
        NormTheory(max_overhead=wrong)


@pytest.mark.parametrize("right", [None, 0.1, 1, 2.5])
def test_the_settings_name_it(right):
    assert NormTheory(max_overhead=right).settings()["max_overhead"] == right


# -- the schedule: an epoch trains for ten seconds ---------------------------------------------------------------------


def test_without_a_limit_every_epoch_is_measured():
    run = fit(SlowTheory(1000.0), epochs=4)
    assert measured() == [0, 1, 2, 3]
    assert not any("skipped" in name for name in [*run.callback_metrics, *rows()[3]])


@pytest.mark.parametrize(
    ("limit", "costs", "start", "expected"),
    [
        # 4 + 4 ≤ 10 after four epochs; 12 ≤ 12.5 after five; 16 ≤ 17.5 after seven; 20 ≤ 20 after eight
        (0.25, [4.0], 0.0, [0, 3, 4, 6, 7, 9]),
        (0.5, [5.0], 0.0, list(range(10))),
        (0.5, [5.5], 0.0, [0, 2, 3, 4, 5, 6, 7, 8, 9]),
        (10, [90.0], 0.0, list(range(10))),
        # a measurement whose cost is unknown is not skipped, and its 200 seconds are never made up for
        (0.1, [100.0], 0.0, [0]),
        # time spent at fit start counts, also for the first one: 6 ≤ 7.5 after three epochs, 10 + 4 ≤ 15 after six
        (0.25, [4.0], 6.0, [2, 5, 7, 8]),
        # the last measurement is the estimate: the second is expected to take 4, later ones 1
        (0.25, [4.0, 1.0], 0.0, [0, 3, 4, 5, 6, 7, 8, 9]),
        # an estimate that is too low counts afterwards: 1 + 9 + 9 ≤ 20 after eight epochs
        (0.25, [1.0, 9.0], 0.0, [0, 1, 7]),
    ],
)
def test_the_epochs_that_are_measured(limit, costs, start, expected):
    fit(SlowTheory(*costs, start=start, max_overhead=limit))
    assert measured() == expected


def test_epochs_that_are_not_due_are_not_skipped_but_their_time_counts():
    fit(SlowTheory(4.0, max_overhead=0.25, every_n_epochs=2))
    # after 4 epochs 8 ≤ 10, after 6 epochs 12 ≤ 15, after 8 epochs 16 ≤ 20, after 10 epochs 20 ≤ 25
    assert measured() == sorted(rows()) == [1, 3, 5, 7, 9]
    fit(SlowTheory(9.0, max_overhead=0.25, every_n_epochs=2), default_root_dir="other")
    assert sorted(rows("other")) == [1, 3, 5, 7, 9]
    assert measured("other") == [1, 7]


@pytest.mark.parametrize(
    ("hook", "counts"),
    [("on_validation_batch_end", True), ("on_train_epoch_start", True), ("on_train_epoch_end", False)],
)
def test_what_lies_between_start_and_end_of_an_epoch_is_training(hook, counts):
    """Lightning validates before an epoch ends. Time of later callbacks at the epoch's end counts as neither."""
    callback = SlowTheory(4.0, max_overhead=0.25)
    fit(callback, epochs=2, others=[Pass(**{hook: 10.0})], num_sanity_val_steps=0)
    assert callback.state_dict()["budget"] == {
        "training": 40.0 if counts else 20.0,
        "spent": 8.0 if counts else 4.0,
        "last": 4.0,
    }


def test_a_second_fit_has_new_accounts():
    callback = SlowTheory(4.0, max_overhead=0.25)
    for folder in ("one", "two"):
        fit(callback, epochs=5, default_root_dir=folder)
        assert measured(folder) == [0, 3, 4]


# -- the file, and what a skip does not change -------------------------------------------------------------------------


def test_skipped_epochs_are_logged_and_written(tmp_path):
    run = fit(SlowTheory(4.0, max_overhead=0.25), epochs=3, logger=CSVLogger(tmp_path, name="demo"))
    (path,) = tmp_path.rglob("normtheory.jsonl")
    header, *lines = jsonl.read(path)
    assert header["settings"]["max_overhead"] == 0.25
    assert [line["metrics"]["normtheory/skipped"] for line in lines] == [0.0, 1.0, 1.0]
    assert set(lines[0]["metrics"]) == {f"normtheory/{name}" for name in ("measurements", "seconds", "skipped")}
    assert set(lines[1]["metrics"]) == {"normtheory/skipped"}
    assert "train_loss_epoch" in lines[1]["user_metrics"]
    assert float(run.callback_metrics["normtheory/skipped"]) == 1.0
    assert "normtheory/skipped" in (path.parent / "metrics.csv").read_text()


def test_a_skip_leaves_the_diagnostics_as_they_were():
    """The loss ratio refers to the last measured epoch."""

    class Watched(NormTheory):
        def make_diagnostics(self):
            return [*super().make_diagnostics(), Slow(0.0, [4.0])]

    fit(Watched(max_overhead=0.25, on_error="raise"), epochs=4)
    found = rows()
    assert [epoch for epoch in found if "normtheory/loss" in found[epoch]] == [0, 3]
    ratio = found[3]["normtheory/loss"] / found[0]["normtheory/loss"]
    assert found[3]["normtheory/loss_ratio"] == pytest.approx(ratio, rel=1e-12)


def test_training_is_bitwise_the_same():
    class Watched(NormTheory):
        def make_diagnostics(self):
            return [*super().make_diagnostics(), Slow(1.0, [4.0])]

    weights = []
    for callbacks in ([], [Watched(max_overhead=0.25, on_error="raise")]):
        pl.seed_everything(0)
        module = Classifier("bn-dropout")
        trainer([*callbacks, Pass()], max_epochs=4).fit(module, loader(8 * BATCHES))
        weights.append([*module.state_dict().values(), torch.rand(1)])
    assert [row["normtheory/skipped"] for row in rows().values()] == [0.0, 1.0, 1.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(*weights))


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_measures_the_epochs_of_an_uninterrupted_one(tmp_path):
    arguments = {"max_overhead": 0.25}
    fit(SlowTheory(4.0, **arguments), default_root_dir=tmp_path / "whole")
    fit(SlowTheory(4.0, **arguments), epochs=2, default_root_dir=tmp_path / "first").save_checkpoint(
        tmp_path / "a.ckpt"
    )
    wait(1e6)  # the pause between the fits counts as neither
    fit(SlowTheory(4.0, **arguments), checkpoint=tmp_path / "a.ckpt", default_root_dir=tmp_path / "second")
    assert measured(tmp_path / "first") + measured(tmp_path / "second") == measured(tmp_path / "whole")


def test_a_checkpoint_in_the_middle_of_an_epoch(tmp_path):
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=8, save_top_k=-1)
    fit(SlowTheory(4.0, max_overhead=0.25), epochs=2, others=[save], enable_checkpointing=True)
    path = tmp_path / "step=8.ckpt"
    states = torch.load(path, weights_only=True)["callbacks"]
    (ours,) = [state for name, state in states.items() if name.startswith("SlowTheory")]
    assert ours["budget"] == {"training": 16.0, "spent": 4.0, "last": 4.0}
    callback, resumed = SlowTheory(4.0, max_overhead=0.25), Count()
    fit(callback, epochs=2, others=[resumed], checkpoint=path, default_root_dir=tmp_path / "resumed")
    # Lightning 2.4 trains the batch before the checkpoint a second time.
    assert resumed.batches == (2 if LAST_STEPS else 3)
    assert callback.state_dict()["budget"] == {"training": 16.0 + 2.0 * resumed.batches, "spent": 4.0, "last": 4.0}


def test_a_checkpoint_from_before_there_were_accounts():
    callback = SlowTheory(4.0, max_overhead=0.25)
    state = callback.state_dict()
    del state["budget"], state["settings"]["max_overhead"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.load_state_dict(state)
    assert callback.state_dict()["budget"] == TimeBudget(0.25).state_dict()


# -- two processes -----------------------------------------------------------------------------------------------------


class SlowElsewhere(pl.Callback):
    """By the clock of the second process, training takes no time, so that it would skip every epoch, or a hundred times
    as long, so that it would skip none."""

    def __init__(self, factor):
        self.factor = factor

    def on_train_batch_end(self, trainer, pl_module, *args):
        wait(2.0 if trainer.global_rank == 0 else 2.0 * self.factor)


class Waiting(Slow):
    """A measurement in which the processes wait for each other; it returns how many take part."""

    key = "measurements"
    metrics = (key, "processes")

    def measure(self, view):
        together = torch.ones(1)
        torch.distributed.all_reduce(together)
        return {**super().measure(view), "processes": float(together)}


class WaitingTheory(SlowTheory):
    def make_diagnostics(self):
        return [Waiting(self.start_takes, self.costs)]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch cannot distribute")
@pytest.mark.parametrize("factor", [0.0, 100.0])
def test_two_processes_whose_clocks_disagree_do_what_the_first_one_decides(tmp_path, factor):
    callbacks = [WaitingTheory(4.0, max_overhead=0.25), SlowElsewhere(factor)]
    run = trainer(callbacks, max_epochs=7, strategy="ddp_fork", devices=2, default_root_dir=tmp_path)
    run.fit(Classifier("wn"), loader(2 * 8 * BATCHES))
    found = rows(tmp_path)
    assert measured(tmp_path) == [0, 3, 4, 6]
    assert [found[epoch]["normtheory/processes"] for epoch in (0, 3, 4, 6)] == [2.0] * 4
    assert [row["normtheory/skipped"] for row in found.values()] == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
