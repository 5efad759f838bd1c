"""ProgressiveBound adds up the losses of the first pass, of fresh batches only, and bounds the error by them."""

import math
import tempfile

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_normtheory.callbacks import NormTheory, ProgressiveBound
from lightning_normtheory.callbacks.progressive_bound import ProgressiveBoundDiagnostic
from lightning_normtheory.callbacks.samples.fresh import why_not_fresh, why_repeated
from lightning_normtheory.theorems.progressive import progressive_bound

from support.lit import Classifier, loader, rows, trainer
from support.theory.theorem_cases import Regression, samples, two_classes, two_layers

NAMES = {"progressive_error_bound", "progressive_error_bound_sharper", "progressive_error_vacuous"}
NAMES |= {"progressive_derivative", "progressive_batches"}


class Losses(pl.Callback):
    """Computes the loss of each batch again, by hand, before the step on it."""

    def __init__(self):
        self.values = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with torch.no_grad():
            self.values.append(float(nn.functional.cross_entropy(pl_module(batch[0]), batch[1])))


def run(module=None, train=None, callback=None, epochs=2, more=(), **options):
    callback = callback or ProgressiveBound(on_error="raise", probe=8)
    folder = tempfile.mkdtemp(dir=".")
    made = trainer([*more, callback], max_epochs=epochs, default_root_dir=folder, **options)
    made.fit(module or Classifier("plain"), train or loader(22))
    written = rows(folder).items()
    return made, {
        epoch: {name.removeprefix("normtheory/"): value for name, value in row.items()} for epoch, row in written
    }


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_losses_of_the_first_pass_before_the_step_on_each(accumulate):
    watched = Losses()
    _, measured = run(more=[watched], accumulate_grad_batches=accumulate)
    t = len(watched.values) // 2
    assert t > 2
    total = sum(1 - math.exp(-loss) for loss in watched.values[:t])
    assert measured[0].keys() == NAMES | {"seconds"}
    assert measured[0]["progressive_batches"] == t
    assert measured[0]["progressive_derivative"] == pytest.approx(total / t, rel=1e-6)
    found = progressive_bound(total, t)
    assert measured[0]["progressive_error_bound"] == pytest.approx(found.value, rel=1e-6)
    assert measured[0]["progressive_error_bound_sharper"] == pytest.approx(found.sharper, rel=1e-6)
    assert measured[0]["progressive_error_vacuous"] == 1
    assert {name: measured[1][name] for name in NAMES} == {name: measured[0][name] for name in NAMES}


def test_within_the_first_pass_it_counts_the_batches_so_far():
    watched = Losses()
    _, measured = run(callback=ProgressiveBound(probe=8, every_n_steps=2, delta=0.2), more=[watched], epochs=1)
    for step, row in measured.items():
        total = sum(1 - math.exp(-loss) for loss in watched.values[: int(row["progressive_batches"])])
        expected = progressive_bound(total, int(row["progressive_batches"]), 0.2)
        assert row["progressive_error_bound"] == pytest.approx(expected.value, rel=1e-6), step


def test_a_logistic_loss_has_the_bound_and_a_square_loss_says_why_not():
    bce = nn.functional.binary_cross_entropy_with_logits
    data = DataLoader(TensorDataset(*two_classes()), 8, shuffle=True)
    _, measured = run(Regression(two_layers(), loss=bce), data, epochs=1)
    assert measured[0]["progressive_batches"] == 3
    with pytest.warns(UserWarning, match="neither a cross entropy nor a logistic loss"):
        _, measured = run(Regression(nn.Linear(3, 1).double()), DataLoader(TensorDataset(*samples()), 8), epochs=1)
    assert measured[0].keys() == {"seconds"}


def test_norm_theory_has_it_and_is_silent_where_it_does_not_apply(recwarn):
    _, measured = run(callback=NormTheory(on_error="raise", probe=8), epochs=1)
    assert measured[0].keys() >= NAMES
    data = DataLoader(TensorDataset(*samples()), 8)
    run(Regression(nn.Linear(3, 1).double()), data, callback=NormTheory(on_error="raise", probe=8), epochs=1)
    assert not any("progressive" in str(warning.message) for warning in recwarn)


class Skips(Classifier):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_is_skipped_counts_as_an_error():
    _, measured = run(Skips("plain"), epochs=1)
    _, without = run(Classifier("plain"), loader(22), epochs=1)
    assert measured[0]["progressive_batches"] == without[0]["progressive_batches"]
    assert measured[0]["progressive_derivative"] > without[0]["progressive_derivative"]


class Manual(Classifier):
    def __init__(self):
        super().__init__("plain")
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Repeats(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.01, max_iter=3)


@pytest.mark.parametrize(
    ("module", "arguments", "reason"),
    [
        (Manual, {}, "unknown in manual optimization"),
        (lambda: Repeats("plain"), {}, "evaluates the loss several times"),
        (
            lambda: Classifier("plain"),
            {"loss": lambda module, batch: nn.functional.cross_entropy(module(batch[0]), batch[1])},
            "not the loss of the training step",
        ),
    ],
    ids=["manual", "closures", "loss="],
)
def test_where_the_loss_of_fresh_batches_is_unknown(module, arguments, reason):
    with pytest.warns(UserWarning, match=reason):
        _, measured = run(module(), callback=ProgressiveBound(on_error="raise", probe=8, **arguments), epochs=1)
    assert measured[0].keys() == {"seconds"}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(6, 1))


class Training:
    def __init__(self, *loaders):
        self.train_dataloader = loaders[0] if len(loaders) == 1 else list(loaders)


DATA = TensorDataset(torch.zeros(6, 1))


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (RandomSampler(DATA), ""),
        (RandomSampler(DATA, num_samples=3), ""),
        (RandomSampler(DATA, replacement=True), "with replacement"),
        (RandomSampler(DATA, num_samples=7), "more samples than there are"),
        (SubsetRandomSampler([0, 3]), ""),
        (SubsetRandomSampler([0, 3, 0]), "twice"),
        (WeightedRandomSampler([1.0] * 6, 6), "by weights"),
    ],
)
def test_samplers_that_repeat_are_known(sampler, reason):
    found = why_not_fresh(Training(DataLoader(DATA, 2, sampler=sampler)))
    assert (reason in found) if reason else not found


def test_other_loaders():
    assert not why_repeated(Training(DataLoader(DATA, 2)))
    assert not why_not_fresh(Training(range(3)))
    assert not why_not_fresh(Training(DataLoader(Stream(), 2)))
    assert "2 training loaders" in why_not_fresh(Training(DataLoader(DATA, 2), DataLoader(DATA, 3)))


@pytest.mark.parametrize(
    ("options", "ordered"),
    [
        ({"batch_size": 2}, True),
        ({"batch_size": 5}, True),
        ({"batch_size": 6}, False),
        ({"batch_size": None}, True),
        ({"batch_size": 2, "shuffle": True}, False),
        ({"batch_size": 2, "sampler": DistributedSampler(DATA, 2, 0, shuffle=False)}, True),
        ({"batch_size": 3, "sampler": DistributedSampler(DATA, 2, 0, shuffle=False)}, False),
        ({"batch_size": 2, "sampler": DistributedSampler(DATA, 2, 0, shuffle=True)}, False),
        ({"batch_size": 2, "sampler": DistributedSamplerWrapper(RandomSampler(DATA), 2, 0, shuffle=False)}, False),
    ],
)
def test_the_order_of_the_dataset_gives_no_independent_draws(options, ordered):
    found = why_not_fresh(Training(DataLoader(DATA, **options)))
    assert ("keeps the order of the dataset" in found) == ordered


def test_there_is_no_bound_for_data_in_its_own_order():
    with pytest.warns(
        UserWarning, match="progressive_error_bound is not logged: the SequentialSampler keeps the order"
    ):
        _, measured = run(train=loader(22, shuffle=False), epochs=1)
    assert measured[0].keys() == {"seconds"}


@pytest.mark.parametrize("sampler", [None, WeightedRandomSampler([1.0] * 22, 22)])
def test_norm_theory_does_not_warn_of_what_nobody_asked_for(sampler, recwarn):
    callback = NormTheory(on_error="raise", probe=8)
    run(train=loader(22, shuffle=False, sampler=sampler), callback=callback, epochs=1)
    assert not [str(warning.message) for warning in recwarn if "is not logged" in str(warning.message)]
    assert "progressive_error_bound" in callback._fit.reasons


def test_a_resumed_run_keeps_the_bound_and_adds_no_batch(tmp_path):
    made, measured = run(epochs=1)
    made.save_checkpoint("last.ckpt")
    again = trainer([ProgressiveBound(on_error="raise", probe=8)], max_epochs=2, default_root_dir=tmp_path / "again")
    again.fit(Classifier("plain"), loader(22), ckpt_path="last.ckpt")
    (row,) = rows(tmp_path / "again").values()
    for name in NAMES:
        assert row[f"normtheory/{name}"] == measured[0][name]


def test_a_state_in_the_middle_of_the_first_pass_ends_it():
    before = ProgressiveBoundDiagnostic()
    before._sums, before._new, before._seen = [torch.tensor(1.5)], 3, True
    state = before.state_dict()
    assert (state["total"], state["batches"]) == (1.5, 3)
    after = ProgressiveBoundDiagnostic()
    after.load_state_dict(state)
    after.after_batch(None, {"loss": torch.tensor(1.0)}, 3)  # not even looked at
    assert after.state_dict() == state


def test_many_batches_are_summed_without_rounding():
    diagnostic = ProgressiveBoundDiagnostic()
    diagnostic._is_fresh = lambda trainer, batch_idx: True
    training = type("Training", (), {"accumulate_grad_batches": 1})
    loss = torch.tensor(0.3)
    for batch_idx in range(5000):
        diagnostic.after_batch(training, {"loss": loss}, batch_idx)
    assert diagnostic._own_total() == pytest.approx(5000 * (1 - math.exp(-0.3)), rel=1e-6)
    assert len(diagnostic._values) < 256


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_arguments(delta):
    with pytest.raises(ValueError, match="Expected delta"):
        ProgressiveBound(delta=delta)
