"""What measurements cost is known before they are made, on a clock that the tests control."""

from pathlib import Path

import pytest
import pytorch_lightning as pl
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.flop_counter import FlopCounterMode

from lightning_normtheory.callbacks import ConvergenceCertificate, NormTheory, RSCRatio
from lightning_normtheory.callbacks.engine import budget, guarded
from lightning_normtheory.callbacks.engine.cost import Sizes
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.engine.planning import Plan
from lightning_normtheory.callbacks.measurement import trial
from lightning_normtheory.callbacks.output import messages
from lightning_normtheory.record import jsonl
from lightning_normtheory.rsc import gradients_of

from support.clock import stop_clock, wait
from support.lit import Classifier, loader, rows, tensors, trainer

BATCHES = 5  # per epoch, one second each


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    stop_clock(monkeypatch, budget, trial, guarded)


@pytest.fixture
def said(monkeypatch):
    """What the callbacks say about costs."""
    texts = []
    monkeypatch.setattr(messages, "show", lambda trainer, text: texts.append(text))
    return texts


class Timed(Classifier):
    """Every evaluation of the loss takes a second: a gradient of the probe of five batches takes five."""

    def training_step(self, batch, batch_idx):
        wait(1.0)
        return super().training_step(batch, batch_idx)


class Cheap(Diagnostic):
    """Takes what it says: 0.2 G, which is a second."""

    key, title = "cheap", "the cheap one"
    metrics = (key,)
    each, before = 0.2, 0.0

    def __init__(self):
        self.measured, self.started = 0, False

    def cost(self, sizes):
        return self.each

    def start_cost(self, sizes):
        return self.before

    def start(self, measurement):
        wait(5.0 * self.before)
        self.started = True

    def measure(self, measurement):
        wait(5.0 * self.each)
        self.measured += 1
        metrics = {self.key: float(self.measured)}
        return {**metrics, **dict.fromkeys(self.since_start, 1.0)} if self.started or self.measured > 1 else metrics


class Dear(Cheap):
    """Takes 50 seconds."""

    key, title = "dear", "the dear one"
    metrics = (key,)
    each = 10.0


class Late(Cheap):
    """Takes 15 seconds before the first step, and a second later."""

    key, title = "late", "the late one"
    metrics = (key,)
    since_start = ("late_change",)
    before = 3.0


class Planned(NormTheory):
    def __init__(self, *kinds, **arguments):
        self.kinds = kinds
        super().__init__(probe=8 * BATCHES, predict=predict, on_error="raise", **arguments)

    def make_diagnostics(self):
        return [kind() for kind in self.kinds]


def predict(module, batch):
    return module.net(batch[0])


def fit(callback, epochs=4, data=None, checkpoint=None, **arguments):
    run = trainer([callback], max_epochs=epochs, **arguments)
    run.fit(Timed("wn"), loader(8 * BATCHES) if data is None else data, ckpt_path=checkpoint)
    return run


def measured(name, folder="."):
    """Return the epochs in which a metric was measured."""
    return [epoch for epoch, row in rows(folder).items() if f"normtheory/{name}" in row]


def reasons():
    return [row["reasons"] for row in list(jsonl.read(next(Path().rglob("normtheory.jsonl"))))[1:] if row["reasons"]]


# -- max_overhead ------------------------------------------------------------------------------------------------------


def test_the_first_measurement_waits_until_the_training_has_paid_for_it():
    fit(Planned(Dear, max_overhead=1.0), epochs=12)  # three seconds of the trial + 50 ≤ 55 after eleven epochs
    assert measured("dear") == [10]
    assert [row["normtheory/skipped"] for row in rows().values()] == [1.0] * 10 + [0.0, 1.0]


def test_what_no_part_of_the_run_can_pay_for_is_left_out(recwarn):
    callback = Planned(Cheap, Dear, max_overhead=0.5)
    fit(callback)  # 20 seconds of training: 10 for measuring; 3 + 1 ≤ 5 after two epochs
    assert measured("cheap") == [1, 2, 3]
    assert not measured("dear")
    (text,) = [str(each.message) for each in recwarn if "leaves out" in str(each.message)]
    assert text == (
        "Planned leaves out dear. Beside the rest, one measurement of it takes about 50 s, and max_overhead=0.5 leaves"
        " 6 s in this run. Raise max_overhead, or use a smaller probe= than 40."
    )
    assert all("takes about 50 s" in row["normtheory/dear"] for row in reasons())


def test_nothing_is_left_out_of_a_run_whose_end_is_unknown():
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = trainer.current_epoch == 3

    callback = Planned(Cheap, Dear, max_overhead=0.5)
    run = trainer([callback, Stop()], max_epochs=-1)
    run.fit(Timed("wn"), loader(8 * BATCHES))
    assert {row["normtheory/skipped"] for row in rows().values()} == {1.0}
    assert not callback._fit.too_expensive


def test_if_nothing_can_be_paid_for_all_is_skipped():
    fit(Planned(Dear, max_overhead=0.1))
    assert {row["normtheory/skipped"] for row in rows().values()} == {1.0}


@pytest.mark.parametrize(("limit", "started"), [(0.5, False), (5.0, True)])
def test_a_start_that_the_run_cannot_pay_for_is_left_out(limit, started):
    callback = Planned(Late, max_overhead=limit)
    fit(callback)
    (late,) = callback._diagnostics
    assert late.started == started
    assert measured("late") == ([0, 1, 2, 3] if started else [1, 2, 3])
    assert measured("late_change") == ([0, 1, 2, 3] if started else [2, 3])
    expected = "max_overhead=0.5 does not pay for its value at fit start; it begins later"
    assert [row.get("normtheory/late_change") for row in reasons()] == ([] if started else [expected])


def test_a_limit_of_none_leaves_out_nothing():
    callback = Planned(Dear, Late)
    fit(callback)
    assert measured("dear") == measured("late_change") == [0, 1, 2, 3]


def test_a_resumed_run_leaves_out_the_same(tmp_path):
    fit(Planned(Cheap, Dear, max_overhead=0.5)).save_checkpoint(tmp_path / "a.ckpt")
    again = Planned(Cheap, Dear, max_overhead=0.5)
    fit(again, epochs=6, checkpoint=tmp_path / "a.ckpt", default_root_dir=tmp_path / "same")
    assert [each.key for each in again._active] == ["cheap"]
    more = Planned(Cheap, Dear, max_overhead=5.0)
    fit(more, epochs=6, checkpoint=tmp_path / "a.ckpt", default_root_dir=tmp_path / "more")
    assert [each.key for each in more._active] == ["cheap", "dear"]


# -- the line at the start ---------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*tensors(8 * BATCHES)))


REMEDY = "(reduce it with probe= or max_overhead=)"


@pytest.mark.parametrize(
    ("kinds", "arguments", "expected"),
    [
        ([Dear], {}, [f"normtheory: each measurement takes about 50 s, 10 times as long as 5 steps {REMEDY}."]),
        (
            [Dear],
            {"every_n_epochs": 4},
            [f"normtheory: each measurement takes about 50 s, 2 times as long as 20 steps {REMEDY}."],
        ),
        (
            [Dear],
            {"every_n_steps": 3},
            [f"normtheory: each measurement takes about 50 s, 17 times as long as 3 steps {REMEDY}."],
        ),
        (
            [Cheap, Late],
            {},
            ["normtheory: each measurement takes about 2 s, 40 % of 5 steps; the one at the start 15 s."],
        ),
        ([Late], {"max_overhead": 0.5}, ["normtheory: each measurement takes about 1 s, 20 % of 5 steps."]),
    ],
)
def test_one_line_says_what_measuring_takes(said, kinds, arguments, expected):
    fit(Planned(*kinds, **arguments), epochs=1)
    assert [each for each in said if "takes" in each] == expected


def test_without_a_known_epoch_there_is_no_percentage(said):
    fit(Planned(Dear, every_n_epochs=1), epochs=1, data=DataLoader(Stream(), 8))
    assert said[0] == "normtheory: each measurement takes about 50 s."


def test_windows_of_several_batches_are_one_step(said):
    fit(Planned(Dear), epochs=1, accumulate_grad_batches=2)
    assert said[0] == f"normtheory: each measurement takes about 50 s, 8 times as long as 3 steps {REMEDY}."


def test_short_measurements_and_trial_runs_are_silent(said):
    class Short(Cheap):
        each = 0.19

    fit(Planned(Short), epochs=1)
    fit(Planned(Dear), fast_dev_run=True)
    assert said == []


# -- the hint ----------------------------------------------------------------------------------------------------------


def test_without_a_limit_one_hint_names_the_longest_part_and_the_remedy(said):
    fit(Planned(Cheap, Dear))
    assert [each for each in said if "has taken" in each] == [
        "normtheory: measuring has taken 54 s, training 5 s; the longest part is the dear one, 50 s. Measure less often"
        " (every_n_epochs=), set a limit (max_overhead=0.1), or use fewer samples (probe=)."
    ]


@pytest.mark.parametrize("arguments", [{"max_overhead": 0.5}, {"every_n_epochs": 4}])
def test_no_hint_below_half_of_the_training_time(said, arguments):
    fit(Planned(Cheap, **arguments), epochs=8)
    assert not [each for each in said if "has taken" in each]


# -- the costs of the diagnostics --------------------------------------------------------------------------------------


def test_a_shared_quantity_is_counted_once():
    plan = Plan(Sizes(probe=512, batch=64), gradient=2.0, step=1.0)
    alone = [plan.measurement(callback._diagnostics) for callback in (RSCRatio(), ConvergenceCertificate())]
    together = plan.measurement([*RSCRatio()._diagnostics, *ConvergenceCertificate()._diagnostics])
    assert together["rsc_ratio"] == alone[0]["rsc_ratio"] == 2 * 1.8
    assert together["certificate_rate_measured"] == pytest.approx(alone[1]["certificate_rate_measured"] - 2 * 1.8)


class Counted(NormTheory):
    """Counts the floating-point operations before the first step, without those of the tangent kernel."""

    def make_diagnostics(self):
        return [each for each in super().make_diagnostics() if each.key != "ntk_lambda_min"]

    def _begin(self, measurement, *arguments):
        with FlopCounterMode(display=False) as before:
            super()._begin(measurement, *arguments)
        function = measurement.function
        with FlopCounterMode(display=False) as gradient, function.measuring():
            for batch in function.batches:
                gradients_of(function.loss_of(batch), function.theta)
        self.gradients = before.get_total_flops() / gradient.get_total_flops()


@pytest.mark.parametrize("net", ["bn", "plain"])  # torch cannot count the operations of a parametrization
@pytest.mark.parametrize("size", [8, 40])
def test_the_first_step_waits_for_few_gradients(net, size):
    callback = Counted(probe=40, on_error="raise")
    trainer([callback], max_epochs=1).fit(Classifier(net), loader(40, size), loader(40, size, shuffle=False))
    assert 0 < callback.gradients <= 6
