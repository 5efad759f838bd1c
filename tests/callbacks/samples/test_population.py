"""The probe holds what is trained on: samplers, limits of the trainer, and n."""

import math
from itertools import cycle

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_normtheory.callbacks import NormTheory, Probe
from lightning_normtheory.callbacks.samples.population import Population, find_population

from support.gap_cases import GapCallback, unseen
from support.lit import Classifier, loader, rows, tensors, trainer
from support.neutral_cases import Recorder, generators, state


class Indexed(TensorDataset):
    """Also gives the index of each sample, as the last feature."""

    def __init__(self, n=50):
        x, y = tensors(n)
        x[:, -1] = torch.arange(n)
        super().__init__(x, y)


class Trained(pl.Callback):
    """The indices that the training step sees."""

    def __init__(self):
        self.seen = set()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen |= set(batch[0][:, -1].int().tolist())


class Pairwise(BatchSampler):
    """Batches of neighbors in the order of another sampler, without a batch size to ask for."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        order = list(self.sampler)
        yield from (order[i : i + 2] for i in range(0, len(order), 2))

    def __len__(self):
        return math.ceil(len(self.sampler) / 2)


class Repeated(Sampler):
    """Every third sample, twice, as integers of numpy."""

    def __iter__(self):
        return iter(np.repeat(np.arange(0, 50, 3), 2))

    def __len__(self):
        return 34


class Endless(Sampler):
    def __iter__(self):
        return cycle(range(10, 20))


class ShuffledInPlace(Sampler):
    """Holds state of every kind that running it moves."""

    def __init__(self):
        self.order, self.rng, self.epochs = np.arange(25), np.random.default_rng(0), 0
        self.generator = torch.Generator().manual_seed(3)
        self.inner = RandomSampler(range(25), generator=self.generator)

    def __iter__(self):
        self.epochs += 1
        self.rng.shuffle(self.order)
        return iter([int(self.order[i]) for i in self.inner])

    def __len__(self):
        return 25


def of(**arguments):
    return lambda: DataLoader(Indexed(), **{"batch_size": 8, **arguments})


def batched(sampler, **arguments):
    return lambda: DataLoader(Indexed(), batch_sampler=sampler(), **arguments)


SUBSET = [3, 1, 4, 15, 9, 26, 5, 35, 8, 47, 2]
WEIGHTS = [float(i % 5 == 0) for i in range(50)]
EVERYTHING = set(range(50))
CASES = {
    "in order": (of(), {}, EVERYTHING),
    "shuffled": (of(shuffle=True), {}, EVERYTHING),
    "in order, limited": (of(), {"limit_train_batches": 2}, set(range(16))),
    "in order, limited to a part": (of(), {"limit_train_batches": 0.5}, set(range(24))),
    "in order, last dropped": (of(drop_last=True), {}, set(range(48))),
    "shuffled, last dropped": (of(shuffle=True, drop_last=True), {}, EVERYTHING),
    "shuffled, limited": (of(shuffle=True), {"limit_train_batches": 2}, EVERYTHING),
    "overfit": (of(), {"overfit_batches": 1}, set(range(8))),
    "overfit, shuffling replaced": (of(shuffle=True), {"overfit_batches": 2}, set(range(16))),
    "overfit, subset replaced": (of(sampler=SubsetRandomSampler(SUBSET)), {"overfit_batches": 1}, set(range(8))),
    # Lightning does not look into a batch sampler: the training is still shuffled.
    "overfit, batch sampler": (
        batched(lambda: BatchSampler(RandomSampler(range(50)), 8, False)), {"overfit_batches": 1}, EVERYTHING
    ),
    "subset": (of(sampler=SubsetRandomSampler(SUBSET)), {}, set(SUBSET)),
    "subset in a batch sampler": (
        batched(lambda: BatchSampler(SubsetRandomSampler(SUBSET), 4, False)), {}, set(SUBSET)
    ),
    "subset in a custom batch sampler": (batched(lambda: Pairwise(SubsetRandomSampler(SUBSET))), {}, set(SUBSET)),
    "part in order": (of(sampler=SequentialSampler(range(20))), {}, set(range(20))),
    "part shuffled": (of(sampler=RandomSampler(range(20))), {}, set(range(20))),
    "weights": (of(sampler=WeightedRandomSampler(WEIGHTS, 50)), {}, set(range(0, 50, 5))),
    "weights in a batch sampler": (
        batched(lambda: BatchSampler(WeightedRandomSampler(WEIGHTS, 50), 8, False)), {}, set(range(0, 50, 5))
    ),
    "custom": (of(sampler=Repeated()), {}, set(range(0, 50, 3))),
    "custom, limited": (of(sampler=Repeated()), {"limit_train_batches": 1}, {0, 3, 6, 9}),
    "custom, endless": (of(sampler=Endless()), {"limit_train_batches": 4}, set(range(10, 20))),
    "custom, stopped by steps": (of(sampler=Endless()), {"max_epochs": -1, "max_steps": 4}, set(range(10, 20))),
    "custom, with state": (lambda: of(sampler=ShuffledInPlace())(), {}, set(range(25))),
    "list of batches": (batched(lambda: [[1, 2], [5, 7, 2]]), {}, {1, 2, 5, 7}),
    "one sample": (lambda: DataLoader(Indexed(1), 8), {}, {0}),
}  # fmt: skip


def fit(train, arguments, callbacks=(), probe=512):
    probe, trained = Probe(probe), Trained()
    callback = GapCallback(probe=probe, on_error="raise")
    run = trainer([callback, trained, *callbacks], **{"max_epochs": 1, **arguments})
    run.fit(Classifier("plain"), train())
    return torch.cat([batch.data[0] for batch in probe.batches(0, 1)]), probe.training_samples, trained.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_the_probe_is_drawn_from_what_is_trained_on(case):
    train, arguments, expected = CASES[case]
    x, n, seen = fit(train, arguments)
    held = x[:, -1].int().tolist()
    assert len(held) == len(set(held))
    assert set(held) == expected
    assert n == len(expected)
    assert seen <= expected
    few = fit(train, arguments, probe=5)[0][:, -1].int().tolist()
    assert few == held[:5]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [case for case in CASES if "steps" not in case])
def test_the_training_is_bitwise_the_same(case):
    def record(callbacks):
        pl.seed_everything(1)
        recorder = Recorder()
        run = trainer([*callbacks, recorder], **{"max_epochs": 3, **arguments})
        module = Classifier("plain")
        run.fit(module, train())
        recorder.note(state(run, module), generators())
        return recorder.seen

    train, arguments, _ = CASES[case]
    assert record([GapCallback(on_error="raise")]) == record([])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_overfitting_measures_the_loss_of_the_batches_that_are_overfit():
    """Used to measure the rest of the set, too: loss 3.137 where the training's was 0.009, and a gap of 0.0098 where
    3.1 is true."""
    pl.seed_everything(0)
    module = Classifier("plain", lr=0.1)
    run = trainer([NormTheory(on_error="raise")], max_epochs=60, overfit_batches=1, check_val_every_n_epoch=60)
    run.fit(module, loader(n=512, shuffle=True), unseen(n=512))

    def loss(x, y):
        return float(nn.functional.cross_entropy(module(x), y))

    row, (x, y) = rows()[59], tensors(512)
    trained = loss(x[:8], y[:8])
    assert trained < 0.02
    assert loss(x, y) > 3
    assert row["normtheory/loss"] == pytest.approx(trained, rel=1e-5)
    assert row["normtheory/generalization_gap"] == pytest.approx(loss(*tensors(512, 5)) - trained, rel=1e-5)


def test_the_draw_follows_the_weights():
    """The first index is drawn in proportion to the weights, the second in proportion to those that are left."""
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    draws = [tuple(Population([0, 1, 2], weights).draw(2, seed)) for seed in range(20_000)]
    for first in range(3):
        for second in {0, 1, 2} - {first}:
            expected = float(weights[first] / 8 * weights[second] / (8 - weights[first]))
            deviation = math.sqrt(expected * (1 - expected) / len(draws))
            assert abs(draws.count((first, second)) / len(draws) - expected) < 4 * deviation


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("limit", [2, math.inf])
def test_samples_of_several_processes(monkeypatch, shuffle, limit):
    """Every process is run by itself; the exchange returns what each one found."""

    def loader_of(rank):
        sampler = DistributedSampler(Indexed(), num_replicas=3, rank=rank, shuffle=shuffle)
        return DataLoader(Indexed(), 4, sampler=sampler)

    parts = [find_population(loader_of(rank), limit, 1).indices for rank in range(3)]
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda out, _: out.__setitem__(slice(None), parts))
    expected = list(range(50)) if shuffle or limit == math.inf else list(range(24))
    assert find_population(loader_of(1), limit, 3).indices == expected


@pytest.mark.parametrize("kind", ["iterator", "holds one"])
def test_a_sampler_that_cannot_be_restored_is_not_run(kind):
    class Holding(Sampler):
        def __init__(self):
            self.stream = cycle([[0, 1], [2, 3], [4, 5]])

        def __iter__(self):
            return iter([next(self.stream) for _ in range(3)])

        def __len__(self):
            return 3

    sampler = iter([[0, 1], [2, 3], [4, 5]]) if kind == "iterator" else Holding()
    x, n, seen = fit(batched(lambda: sampler), {})
    assert n is None
    assert seen == set(range(6))
    assert x[:, -1].int().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_sampler_that_fails_is_not_run_again():
    class Once(Sampler):
        def __iter__(self):
            if torch.initial_seed() == 0:  # of the private generators
                raise RuntimeError("not here")
            return iter(range(20))

        def __len__(self):
            return 20

    pl.seed_everything(5)
    x, n, _ = fit(of(sampler=Once()), {})
    assert n is None
    assert x[:, -1].int().tolist() == list(range(20))


def test_a_resumed_run_keeps_its_probe(tmp_path):
    def run(folder, checkpoint=None, **arguments):
        probe = Probe(12)
        fit = trainer([GapCallback(probe=probe)], default_root_dir=folder, **arguments)
        fit.fit(Classifier("plain"), of()(), ckpt_path=checkpoint)
        fit.save_checkpoint(tmp_path / "last.ckpt")
        return torch.cat([batch.data[0] for batch in probe.batches(0, 1)]), probe.training_samples

    first, n = run(tmp_path / "first", max_epochs=1, limit_train_batches=2)
    second, more = run(tmp_path / "second", tmp_path / "last.ckpt", max_epochs=2)
    assert torch.equal(first, second)
    assert (n, more) == (16, 50)
