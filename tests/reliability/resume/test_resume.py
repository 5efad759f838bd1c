"""A resumed run gives the numbers of an uninterrupted one."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lightning_normtheory.callbacks import NormTheory, RSCRatio

from support.lit import Classifier, Stream, loader, rows, trainer


def in_order(n=50):
    """Nothing random, so that the training itself resumes exactly."""
    return loader(n, shuffle=False)


def stream():
    class Plain(Stream):
        def __iter__(self):
            return iter(zip(self.x, self.y))

    return DataLoader(Plain(), 8)


def fit(folder, epochs, checkpoint=None, data=in_order, **arguments):
    pl.seed_everything(0)
    run = trainer([NormTheory(on_error="raise", **arguments)], max_epochs=epochs, default_root_dir=folder)
    run.fit(Classifier("bn"), data(), ckpt_path=checkpoint)
    path = folder / f"{epochs}.ckpt"
    run.save_checkpoint(path)
    return path, {epoch: {k: v for k, v in row.items() if "seconds" not in k} for epoch, row in rows(folder).items()}


@pytest.mark.parametrize("data", [in_order, stream], ids=["map", "iterable"])
def test_resuming_changes_no_number(tmp_path, data):
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    _, expected = fit(whole, 4, data=data, probe=20)
    checkpoint, _ = fit(first, 2, data=data, probe=20)
    _, resumed = fit(second, 4, checkpoint, data=data, probe=20)
    assert sorted(resumed) == [2, 3]
    # As text, where what is not a number equals itself; every digit counts.
    assert repr(resumed) == repr({epoch: expected[epoch] for epoch in (2, 3)})


def test_the_state_loads_without_executing_code(tmp_path):
    checkpoint, _ = fit(tmp_path, 1)
    state = torch.load(checkpoint, weights_only=True)["callbacks"]
    (ours,) = [value for key, value in state.items() if key.startswith("NormTheory")]
    assert len([index for chunk in ours["probe"]["chunks"][0] for index in chunk]) == 50


def test_changed_arguments_are_noticed(tmp_path):
    checkpoint, _ = fit(tmp_path / "a", 1, probe=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path / "b", 2, checkpoint, probe=30)
    messages = [str(w.message) for w in caught]
    assert any("probe was 20 in the checkpoint and is 30 now" in message for message in messages)
    assert any("measured on different samples" in message for message in messages)


def test_a_smaller_dataset_is_noticed(tmp_path):
    checkpoint, _ = fit(tmp_path / "a", 1)
    with pytest.warns(UserWarning, match="smaller than the one of the checkpoint"):
        fit(tmp_path / "b", 2, checkpoint, data=lambda: in_order(20))


def test_a_checkpoint_of_a_run_without_us(tmp_path):
    run = trainer(max_epochs=1)
    run.fit(Classifier("wn"), loader())
    run.save_checkpoint(tmp_path / "bare.ckpt")
    callback = RSCRatio(on_error="raise")
    trainer([callback], max_epochs=2).fit(Classifier("wn"), loader(), ckpt_path=tmp_path / "bare.ckpt")
    assert "normtheory/loss_ratio" in rows()[1]


def test_the_same_callback_serves_a_second_run(tmp_path):
    callback = RSCRatio(on_error="raise")
    torch.manual_seed(0)
    trainer([callback], max_epochs=1, default_root_dir=tmp_path / "a").fit(Classifier("wn"), loader())
    torch.manual_seed(0)
    trainer([callback], max_epochs=1, default_root_dir=tmp_path / "b").fit(Classifier("wn"), loader())
    first, second = rows(tmp_path / "a")[0], rows(tmp_path / "b")[0]
    assert first["normtheory/loss_ratio"] == second["normtheory/loss_ratio"]
