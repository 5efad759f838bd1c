"""What is particular to several processes: predictors, streams, steps that wait, and what fails in one of them."""

import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_normtheory.callbacks import (
    HessianTopEigenvalue,
    NormTheory,
    NTKLeastEigenvalue,
    ProgressiveBound,
    RSCRatio,
)

from reliability.processes.process_runs import Fingerprint
from support.lit import Classifier, Stream, loader, rows, tensors, trainer

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch cannot distribute")


class StandingStill(Classifier):
    """A learning rate of zero: the weights, and so the numbers, do not depend on how the data are shared out."""

    def __init__(self, net):
        torch.manual_seed(0)
        super().__init__(net, lr=0.0)


def test_the_curvature_in_two_processes_is_that_of_one(tmp_path):
    data = DataLoader(
        TensorDataset(tensors(40)[0].double(), tensors(40)[1]), 8
    )  # three batches for one, two for the other
    measured = {}
    for devices in (1, 2):
        callback = HessianTopEigenvalue(
            method="lanczos", memory="low", predictor_samples=16, batch_stats=False, on_error="raise"
        )
        strategy = {"strategy": "ddp_fork", "devices": devices} if devices > 1 else {}
        folder = tmp_path / str(devices)
        trainer([callback], max_epochs=2, default_root_dir=folder, **strategy).fit(StandingStill("wn").double(), data)
        measured[devices] = rows(folder)[1]
    for name, value in measured[1].items():
        if "seconds" not in name:
            assert measured[2][name] == pytest.approx(value, rel=1e-9), name


class LossFailsOnRankOne:
    """Not in the trial at the start, and not in the first batch that is measured."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, batch):
        self.calls += 1
        if self.calls > 2 and module.global_rank == 1:
            raise RuntimeError("only here")
        return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore")
def test_a_product_that_fails_in_one_process_is_a_nan_in_both_and_no_deadlock(tmp_path):
    callback = HessianTopEigenvalue(loss=LossFailsOnRankOne())
    fit = trainer([callback], max_epochs=2, strategy="ddp_fork", devices=2, default_root_dir=tmp_path)
    fit.fit(StandingStill("wn"), loader(48))
    assert [math.isnan(row["normtheory/hessian_lambda_max"]) for row in rows(tmp_path).values()] == [True, True]


class FailsOnRankOne:
    def __init__(self):
        self.calls = 0

    def __call__(self, module, batch):
        self.calls += 1
        if self.calls > 1 and module.global_rank == 1:
            raise RuntimeError("only here")
        return module(batch[0])


@pytest.mark.filterwarnings("ignore")
def test_a_failure_in_one_process_is_a_nan_in_both_and_no_deadlock(tmp_path):
    callback = RSCRatio(predict=FailsOnRankOne())
    fit = trainer([callback], max_epochs=2, strategy="ddp_fork", devices=2, default_root_dir=tmp_path)
    fit.fit(StandingStill("wn"), loader())
    found = rows(tmp_path).values()
    assert [math.isnan(row["normtheory/mean_predictor_grad_norm_sq"]) for row in found] == [True, True]
    assert [math.isfinite(row["normtheory/rsc_ratio"]) for row in found] == [True, True]  # needs no outputs
    (path,) = tmp_path.rglob("normtheory.jsonl")
    assert "the outputs failed in another process" in path.read_text()


def test_an_iterable_dataset_in_two_processes(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback = RSCRatio(on_error="raise", probe=20)
        fit = trainer([callback], max_epochs=1, strategy="ddp_fork", devices=2, default_root_dir=tmp_path)
        fit.fit(StandingStill("wn"), DataLoader(Stream(), 5))
    assert math.isfinite(rows(tmp_path)[0]["normtheory/rsc_ratio"])


def test_an_iterable_dataset_in_two_processes_resumes(tmp_path):
    def run(folder, epochs, checkpoint=None):
        strategy = {"strategy": "ddp_fork", "devices": 2, "default_root_dir": tmp_path / folder}
        save = pl.callbacks.ModelCheckpoint(tmp_path / folder, save_last=True)
        callbacks = [RSCRatio(on_error="raise", probe=20), save]
        fit = trainer(callbacks, max_epochs=epochs, enable_checkpointing=True, **strategy)
        fit.fit(StandingStill("wn"), DataLoader(ByRank(), 5), ckpt_path=checkpoint)
        return rows(tmp_path / folder)

    first = run("first", 1)
    resumed = run("second", 2, tmp_path / "first" / "last.ckpt")
    # nothing is learned: the same samples give the same number
    assert resumed[1]["normtheory/rsc_ratio"] == pytest.approx(first[0]["normtheory/rsc_ratio"], rel=1e-12)


class ByRank(Stream):
    """Every process has different samples."""

    def __iter__(self):
        rank = torch.distributed.get_rank()
        return iter(list(zip(self.x, self.y))[rank * 25 : rank * 25 + 25])


class Waiting(StandingStill):
    """A step in which the processes wait for each other."""

    def training_step(self, batch, batch_idx):
        torch.distributed.all_reduce(torch.ones(1))
        return super().training_step(batch, batch_idx)


def test_a_step_that_waits_for_the_other_process(tmp_path):
    callback = RSCRatio(on_error="raise", probe=24)  # three batches of eight for two processes
    fit = trainer([callback], max_epochs=1, strategy="ddp_fork", devices=2, default_root_dir=tmp_path)
    fit.fit(Waiting("wn"), loader(48))
    assert math.isfinite(rows(tmp_path)[0]["normtheory/rsc_ratio"])


@pytest.mark.slow
def test_the_batches_of_a_step_are_one_draw_of_the_progressive_bound(tmp_path):
    """Equal samples, weights that stand still: every batch has the same loss."""
    x, y = (value[:1].repeat_interleave(48, 0) for value in tensors(2))
    module = StandingStill("wn")
    loss = torch.nn.functional.cross_entropy(module(x), y)
    callback = ProgressiveBound(on_error="raise", probe=8)
    fit = trainer([callback], max_epochs=2, strategy="ddp_fork", devices=2, default_root_dir=tmp_path)
    fit.fit(module, DataLoader(TensorDataset(x, y), 8, shuffle=True))
    for row in rows(tmp_path).values():
        assert row["normtheory/progressive_batches"] == 2  # of three steps, without the last
        assert row["normtheory/progressive_derivative"] == pytest.approx(-math.expm1(-float(loss.detach())), rel=1e-6)


class FailsToReadOnRankOne(TensorDataset):
    def __getitem__(self, index):
        if torch.distributed.get_rank() == 1 and torch.utils.data.get_worker_info() is None:
            raise RuntimeError("only in workers")
        return super().__getitem__(index)


def test_a_dataset_that_one_process_cannot_read(tmp_path):
    callback = RSCRatio(on_error="raise", probe=16)
    fit = trainer([callback], max_epochs=1, strategy="ddp_fork", devices=2, default_root_dir=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit.fit(StandingStill("wn"), DataLoader(FailsToReadOnRankOne(*tensors(48)), 8, num_workers=1))
    assert math.isfinite(rows(tmp_path)[0]["normtheory/rsc_ratio"])


def test_training_in_two_processes_is_not_disturbed(tmp_path):
    for name, ours in (("bare", []), ("watched", [NormTheory(on_error="raise")])):
        pl.seed_everything(0)
        callbacks = [*ours, Fingerprint(tmp_path / name)]
        fit = trainer(callbacks, max_epochs=2, strategy="ddp_fork", devices=2, default_root_dir=tmp_path)
        fit.fit(Classifier("bn-dropout"), loader(48))
    bare, watched = (torch.load(tmp_path / name, weights_only=True) for name in ("bare", "watched"))
    assert all(torch.equal(bare[key], watched[key]) for key in bare)


class EveryFifth(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(0, 50, 5))

    def __len__(self):
        return 10


POPULATIONS = {
    "overfit": ({"shuffle": True}, {"overfit_batches": 1}, range(16)),
    # Lightning shuffles what it shares out; without that, both processes take the first batches.
    "limited": ({"shuffle": False}, {"limit_train_batches": 2}, range(50)),
    "limited, in order": ({"shuffle": False}, {"limit_train_batches": 2, "use_distributed_sampler": False}, range(16)),
    "weights": (
        {"shuffle": False, "sampler": WeightedRandomSampler([float(i % 5 == 0) for i in range(50)], 50)},
        {},
        range(0, 50, 5),
    ),
    "custom": ({"shuffle": False, "sampler": EveryFifth()}, {}, range(0, 50, 5)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", POPULATIONS)
def test_the_probe_is_what_both_processes_train_on(tmp_path, case):
    data, arguments, expected = POPULATIONS[case]
    fit = trainer(
        [RSCRatio(on_error="raise")],
        **{"max_epochs": 1, "strategy": "ddp_fork", "devices": 2, "default_root_dir": tmp_path, **arguments},
    )
    module = StandingStill("plain")
    fit.fit(module, loader(**data))
    x, y = (each[list(expected)] for each in tensors())
    loss = float(torch.nn.functional.cross_entropy(module(x), y))
    assert rows(tmp_path)[0]["normtheory/loss"] == pytest.approx(loss, rel=1e-6)


def test_the_kernel_with_batch_norm_in_two_processes_is_that_of_one(tmp_path):
    """Each process has its own running statistics; those of the probe are the same in both."""
    measured = {}
    for devices in (1, 2):
        strategy = {"strategy": "ddp_fork", "devices": devices} if devices > 1 else {}
        callback, folder = NTKLeastEigenvalue(samples=12, probe=30, on_error="raise"), tmp_path / str(devices)
        trainer([callback], max_epochs=2, default_root_dir=folder, **strategy).fit(StandingStill("bn"), loader(40))
        measured[devices] = rows(folder)[1]
    assert measured[2]["normtheory/ntk_change"] == 0.0
    for name in ("ntk_lambda_max", "ntk_effective_rank", "ntk_direction_share", "ntk_length_share"):
        assert measured[2][f"normtheory/{name}"] == pytest.approx(measured[1][f"normtheory/{name}"], rel=1e-6)
