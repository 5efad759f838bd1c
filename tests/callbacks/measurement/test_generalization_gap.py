"""The measured gap: exact values, for batches of any form and any number of processes."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks.measurement.generalization_gap import GapMetric
from lightning_normtheory.callbacks.samples.validation_probe import ValidationProbe

from support.gap_cases import GapCallback, Plain, fit, mean_loss, unseen
from support.lit import Classifier, loader, rows, tensors, trainer

# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["wn", "bn", "bn-dropout"])
def test_the_gap_is_the_difference_of_the_mean_losses(net):
    found = fit(loader(45), unseen(21), Classifier(net))  # the last batches are short
    row = found.rows[0]
    train, validation = mean_loss(found.module, *tensors(45)), mean_loss(found.module, *tensors(21, 5))
    # float32 in the forward pass: a few units in the last place
    assert row["train_loss"] == pytest.approx(train, rel=1e-5)
    assert row["validation_loss"] == pytest.approx(validation, rel=1e-5)
    assert row["gap"] == pytest.approx(validation - train, abs=1e-5)
    assert row["n"] == 45


def test_in_double_precision_to_the_last_digits():
    train, validation = (DataLoader(TensorDataset(x.double(), y), 8) for x, y in (tensors(45), tensors(21, 5)))
    found = fit(train, validation, Classifier("bn").double())
    expected = mean_loss(found.module, *tensors(21, 5)) - mean_loss(found.module, *tensors(45))
    assert found.rows[0]["gap"] == pytest.approx(expected, abs=1e-14)


def test_a_probe_smaller_than_the_validation_set():
    found = fit(None, unseen(40), probe=12)
    drawn = [int(torch.nonzero((tensors(40, 5)[0] == row).all(1))) for row in found.samples]
    assert len(set(drawn)) == 12
    assert drawn != list(range(12))
    labels = tensors(40, 5)[1][drawn]
    assert found.rows[0]["validation_loss"] == pytest.approx(mean_loss(found.module, found.samples, labels), rel=1e-5)


def test_running_statistics_unless_the_callback_says_otherwise():
    """At a learning rate of zero only the statistics differ."""
    losses = {}
    for batch_stats in (None, False, True):
        torch.manual_seed(0)
        found = fit(loader(48, shuffle=False), unseen(24), Classifier("bn", lr=0.0), batch_stats=batch_stats)
        losses[batch_stats] = found.rows[0]["train_loss"]
        assert found.module.net[1].training
    assert losses[None] == losses[False]
    assert losses[None] != pytest.approx(losses[True], rel=1e-3)


def test_a_batchnorm_that_keeps_no_statistics():
    module = Classifier("bn")
    module.net[1] = nn.BatchNorm1d(8, track_running_stats=False)
    assert math.isfinite(fit(None, unseen(), module).rows[0]["gap"])


def test_a_loss_that_is_not_finite_is_not_hidden():
    metric = GapMetric()
    metric.update(1, torch.tensor(math.nan), validation=False)
    metric.update(1, torch.tensor(1.0), validation=True)
    assert all(math.isnan(value) for value in (metric.compute().train_loss, metric.compute().gap))


# -- other forms of batches --------------------------------------------------------------------------------------------


def dicts(samples):
    x, y = zip(*samples)
    return {"image": torch.stack(x), "label": torch.stack(y)}


class OtherBatches(Classifier):
    def validation_step(self, batch, batch_idx):
        pass


def either(module, batch):
    x, y = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
    return nn.functional.cross_entropy(module(x), y)


def test_a_loss_for_both_kinds_of_batches():
    found = fit(None, unseen(collate_fn=dicts), OtherBatches("bn"), loss=either)
    assert found.rows[0]["validation_loss"] == pytest.approx(mean_loss(found.module, *tensors(20, 5)), rel=1e-5)


def test_a_step_that_cannot_take_validation_batches_is_reported_with_the_remedy():
    with pytest.raises(ValueError, match=r"loss of a validation batch \(a dict [\s\S]*pass loss=") as raised:
        fit(None, unseen(collate_fn=dicts), OtherBatches("bn"))
    assert raised.value.__cause__ is not None
    run = trainer([GapCallback()], max_epochs=2)
    with pytest.warns(UserWarning, match="gap failed and is logged as NaN: ValueError"):
        run.fit(OtherBatches("bn"), loader(), unseen(collate_fn=dicts))
    assert run.current_epoch == 2
    assert math.isnan(run.callback_metrics["normtheory/gap"])


def test_transfer_hooks_see_validation_data_as_in_a_validation():
    class Hooked(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] + 10.0 if self.trainer.training else batch[0], batch[1]]

    found = fit(None, unseen(), Hooked("wn"))
    x, y = tensors(50)
    assert found.rows[0]["validation_loss"] == pytest.approx(mean_loss(found.module, *tensors(20, 5)), rel=1e-5)
    assert found.rows[0]["train_loss"] == pytest.approx(mean_loss(found.module, x + 10.0, y), rel=1e-5)


# -- two processes -----------------------------------------------------------------------------------------------------


class StandingStill(Classifier):
    """With a learning rate of zero the weights do not depend on how the data are distributed."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__("wn", lr=0.0)

    def training_step(self, batch, batch_idx):
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.ones(1))  # the processes wait for each other
        return super().training_step(batch, batch_idx)


class ByRank(Plain):
    """Each process has different samples."""

    def __iter__(self):
        rank = torch.distributed.get_rank()
        return iter(list(zip(self.x, self.y))[rank * 10 : rank * 10 + 10])


two = {"strategy": "ddp_fork", "devices": 2}
distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch cannot distribute")


@distributed
@pytest.mark.parametrize("batch_size", [8, 40], ids=["three batches", "one batch, idle rank"])
def test_two_processes_give_the_number_of_one(tmp_path, batch_size):
    found = {}
    for name, arguments in (("one", {}), ("two", two)):
        train, validation = (
            DataLoader(TensorDataset(x.double(), y), batch_size) for x, y in (tensors(40), tensors(24, 5))
        )
        run = trainer([GapCallback(on_error="raise")], max_epochs=2, default_root_dir=tmp_path / name, **arguments)
        run.fit(StandingStill().double(), train, validation)
        found[name] = rows(tmp_path / name)[1]
    for name in ("gap", "train_loss", "validation_loss", "n"):
        assert found["two"][f"normtheory/{name}"] == pytest.approx(found["one"][f"normtheory/{name}"], rel=1e-12)


@distributed
@pytest.mark.filterwarnings("ignore")
def test_two_processes_copy_the_batches_of_both(tmp_path):
    run = trainer([GapCallback(on_error="raise")], max_epochs=2, default_root_dir=tmp_path, **two)
    module = StandingStill()
    run.fit(module, loader(48), DataLoader(ByRank(20), 5))
    expected = mean_loss(module, *tensors(20))
    assert [row["normtheory/validation_loss"] for row in rows(tmp_path).values()] == pytest.approx([expected] * 2)


@distributed
@pytest.mark.filterwarnings("ignore")
def test_a_failure_in_one_process_is_a_nan_in_both_and_no_deadlock(tmp_path):
    def fails(module, batch):
        if not torch.is_grad_enabled() and module.global_rank == 1:
            raise RuntimeError("only here")
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    run = trainer([GapCallback(loss=fails)], max_epochs=2, default_root_dir=tmp_path, **two)
    run.fit(StandingStill(), loader(48), unseen(24))
    assert [math.isnan(row["normtheory/gap"]) for row in rows(tmp_path).values()] == [True, True]


def test_a_validation_probe_has_no_samples_of_its_own():
    probe = ValidationProbe(12, seed=3)
    assert probe.batches(0, 1) == []
    assert probe.state_dict() == {"samples": 12, "seed": 3, "chunks": []}
