"""`ValidationProbe`: the validation samples for the generalization gap."""

import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback

from support.gap_cases import GapCallback, Measured, Plain, fit, mean_loss, unseen
from support.lit import Classifier, InWorkers, Stream, loader, nets, rows, tensors, trainer
from support.neutral_cases import Sliced

# -- the loaders -------------------------------------------------------------------------------------------------------


class WithoutStep(pl.LightningModule):
    """Lightning does not create a validation loader if there is no validation_step."""

    def __init__(self):
        super().__init__()
        self.net = nets()["bn"]()

    forward, training_step, configure_optimizers = (
        Classifier.forward,
        Classifier.training_step,
        Classifier.configure_optimizers,
    )
    lr = 0.05


@pytest.mark.parametrize(
    ("validation", "arguments"),
    [
        (lambda: None, {}),
        (unseen, {"limit_val_batches": 0}),
        (unseen, {"module": WithoutStep}),
        (list, {}),
        (lambda: unseen(0), {}),
    ],
    ids=["no loader", "limit_val_batches=0", "no validation_step", "no loaders in the list", "empty"],
)
@pytest.mark.filterwarnings("ignore")
def test_no_validation_data_no_gap_and_no_error(validation, arguments):
    arguments = {name: value() if callable(value) else value for name, value in arguments.items()}
    assert fit(None, validation(), **arguments).rows[0] == {"n": 50}


@pytest.mark.parametrize("sanity", [0, 2, -1])
def test_whatever_the_sanity_check(sanity):
    torch.manual_seed(0)
    found = fit(None, unseen(), num_sanity_val_steps=sanity)
    assert torch.equal(found.samples.sort(0).values, tensors(20, 5)[0].sort(0).values)


def test_the_first_of_two_loaders():
    class Two(Classifier):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx)

    found = fit(None, [unseen(20, seed=5), unseen(30, seed=6)], Two("bn"))
    assert torch.equal(found.samples.sort(0).values, tensors(20, 5)[0].sort(0).values)
    found = fit(None, [DataLoader(Stream(20), 8), unseen(30, seed=6)], Two("bn"))
    assert len(found.samples) == 20


def test_loaders_that_are_combined_otherwise_give_batches_of_batches():
    class Pairs(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch["a"], batch_idx)

    validation = pl.utilities.CombinedLoader({"a": unseen(16), "b": unseen(16, seed=6)}, "max_size_cycle")
    found = fit({"a": loader(), "b": loader()}, validation, Pairs("bn"))
    expected = sum(mean_loss(found.module, *tensors(16, seed)) for seed in (5, 6))
    assert found.rows[0]["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_data_module():
    class Data(pl.LightningDataModule):
        train_dataloader = staticmethod(loader)
        val_dataloader = staticmethod(unseen)

    run = trainer([GapCallback(on_error="raise")], max_epochs=1)
    run.fit(Classifier("bn"), datamodule=Data())
    assert math.isfinite(run.callback_metrics["normtheory/gap"])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_set_gives_copies_of_the_first_validation(workers):
    class Keep(pl.Callback):
        batches = ()

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            if not trainer.sanity_checking:
                self.batches += (batch[0].clone(),)

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            batch[0].zero_()  # later changes of a batch must not reach the probe

    class InPlace(Classifier):
        def training_step(self, batch, batch_idx):
            batch[0].mul_(1.0)  # fails on a tensor from inference mode; validation within a fit does not use it
            return super().training_step(batch, batch_idx)

    keep, callback = Keep(), GapCallback(probe=20, on_error="raise")
    run = trainer([callback, keep], max_epochs=2, val_check_interval=0.5)
    run.fit(InPlace("bn"), loader(), DataLoader(Stream(), 8, num_workers=workers))
    held = callback._validation_probe.batches(0, 1)
    assert [batch.samples for batch in held] == [8, 8, 8]
    assert torch.equal(torch.cat([batch.data[0] for batch in held]), torch.cat(keep.batches[:3]))
    assert not any(batch.data[0].is_inference() for batch in held)
    assert all(math.isfinite(row["normtheory/gap"]) for row in rows().values())


def test_a_set_that_only_workers_can_read_is_copied_too():
    with pytest.warns(UserWarning, match="could not be read from the validation set.*first validation batches"):
        found = fit(None, DataLoader(InWorkers(*tensors(20, 5)), 8, num_workers=1))
    assert torch.equal(found.samples, tensors(20, 5)[0])


def test_batches_that_cannot_be_measured_do_not_end_the_training():
    class Texts(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(["a", "b"])

    class Reader(Classifier):
        def validation_step(self, batch, batch_idx):
            pass

    run = trainer([GapCallback()], max_epochs=1)
    with pytest.warns(UserWarning, match=r"loss of a validation batch \(a list \(str, str\)\) could not be computed"):
        run.fit(Reader("bn"), loader(), DataLoader(Texts(), 2))
    assert math.isnan(rows()[0]["normtheory/gap"])


@pytest.mark.parametrize("sanity", [0, 2])
def test_validation_every_second_epoch(sanity):
    found = fit(None, unseen(), epochs=4, check_val_every_n_epoch=2, num_sanity_val_steps=sanity)
    # Without the sanity check, Lightning has no loader before the second epoch.
    assert [epoch for epoch, row in found.rows.items() if "gap" in row] == ([1, 2, 3] if sanity == 0 else [0, 1, 2, 3])


def test_validation_every_second_epoch_of_an_iterable_set():
    found = fit(None, DataLoader(Stream(20), 8), epochs=4, check_val_every_n_epoch=2)
    assert [epoch for epoch, row in found.rows.items() if "gap" in row] == [1, 2, 3]


def test_measuring_less_often_than_validating():
    found = fit(None, unseen(), epochs=4, every_n_epochs=2)
    assert [epoch for epoch, row in found.rows.items() if "gap" in row] == [1, 3]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", [{"overfit_batches": 2}, {"fast_dev_run": True}], ids=str)
def test_short_cuts_of_the_trainer(arguments):
    run = trainer([GapCallback(on_error="raise")], **{"max_epochs": 1, **arguments})
    run.fit(Classifier("bn"), loader(), unseen())
    assert math.isfinite(run.callback_metrics["normtheory/gap"])


# -- the number of training samples ------------------------------------------------------------------------------------


def whole_batches():
    return DataLoader(TensorDataset(*(t.unflatten(0, (5, 10)) for t in tensors())), batch_size=None)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (loader, 50),
        (lambda: loader(drop_last=True), 50),
        (lambda: loader(shuffle=False, sampler=SubsetRandomSampler(range(30))), 30),
        (lambda: loader(shuffle=False, sampler=RandomSampler(range(50), num_samples=16)), 50),
        (lambda: DataLoader(TensorDataset(*tensors()), batch_size=None,
                            sampler=BatchSampler(RandomSampler(range(50)), 8, drop_last=False)), 50),
        (lambda: DataLoader(Stream(), 8), None),
        (whole_batches, None),
        (Sliced, None),
    ],
    ids=["all", "drop_last", "subset", "part of an epoch", "lists", "iterable", "whole batches", "not a DataLoader"],
)  # fmt: skip
def test_the_number_of_training_samples(train, expected):
    assert fit(train(), unseen()).rows[0].get("n") == expected


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("validation", [lambda: unseen(40), lambda: DataLoader(Plain(40), 8)], ids=["map", "iterable"])
def test_resuming_changes_no_number(tmp_path, validation):
    def run(name, epochs, checkpoint=None):
        pl.seed_everything(0)
        arguments = {"epochs": epochs, "checkpoint": checkpoint, "probe": 12, "folder": tmp_path / name}
        return fit(loader(shuffle=False), validation(), Classifier("bn"), **arguments)

    whole = run("whole", 4)
    run("first", 2)
    second = run("second", 4, tmp_path / "first" / "last.ckpt")
    assert second.rows == {epoch: whole.rows[epoch] for epoch in (2, 3)}
    assert "gap" in second.rows[2]
    assert torch.equal(second.samples, whole.samples)


def test_the_checkpoint_decides_which_samples(tmp_path):
    """The dataset has grown, so a new draw would differ."""
    first = fit(None, unseen(20), Classifier("bn"), probe=10, folder=tmp_path / "first")
    grown = DataLoader(TensorDataset(*(torch.cat(pair) for pair in zip(tensors(20, 5), tensors(20, 6)))), 8)
    arguments = {"epochs": 2, "probe": 10, "checkpoint": tmp_path / "first" / "last.ckpt", "folder": tmp_path / "b"}
    assert torch.equal(first.samples, fit(None, grown, Classifier("bn"), **arguments).samples)
    with pytest.warns(UserWarning, match="validation set is smaller than the one of the checkpoint"):
        fit(None, unseen(10), Classifier("bn"), **{**arguments, "folder": tmp_path / "c"})


@pytest.mark.parametrize("entry", ["missing", "none yet"])
def test_checkpoints_from_before_the_first_validation(tmp_path, entry):
    fit(None, None, Classifier("bn"), folder=tmp_path / "first")
    path = tmp_path / "first" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    (saved,) = (state for key, state in checkpoint["callbacks"].items() if "GapCallback" in key)
    assert saved["validation_probe"]["chunks"] == []
    if entry == "missing":
        del saved["validation_probe"]
        torch.save(checkpoint, path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*validation set is smaller")
        found = fit(None, unseen(), Classifier("bn"), epochs=2, checkpoint=path, folder=tmp_path / "second")
    assert math.isfinite(found.rows[1]["gap"])


def test_a_validate_after_the_fit_does_not_forget_the_samples():
    callback = GapCallback(on_error="raise")
    run = trainer([callback], max_epochs=1)
    module = Classifier("bn")
    run.fit(module, loader(), unseen())
    saved = callback.state_dict()["validation_probe"]
    run.validate(module, unseen(30, seed=7), verbose=False)
    assert callback.state_dict()["validation_probe"] == saved
    assert saved["chunks"]


def test_a_second_fit_reads_its_own_data():
    callback = GapCallback(on_error="raise")
    for n in (20, 12):
        trainer([callback], max_epochs=1).fit(Classifier("bn"), loader(), unseen(n))
        assert sum(batch.samples for batch in callback._validation_probe.batches(0, 1)) == n


def test_callbacks_without_need_do_not_look_at_validation_data():
    class Elsewhere(Measured):
        needs_validation = False

    callback = DiagnosticCallback(on_error="raise")
    callback.make_diagnostics = lambda: [Elsewhere()]
    trainer([callback], max_epochs=1).fit(Classifier("bn"), loader(), unseen())
    assert "normtheory/gap" not in rows()[0]
    assert callback.state_dict()["validation_probe"] is None
