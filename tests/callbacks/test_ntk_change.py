"""`ntk_change`: the kernel it is measured against, in checkpoints and when trained parameters change."""

import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch.utils.data import DataLoader

from lightning_normtheory.callbacks import NTKLeastEigenvalue
from lightning_normtheory.record import jsonl

from support.kernel_fits import NTK, Seeded, fit, kernel_of
from support.lit import Stream, loader, rows, trainer


def test_change_is_against_the_kernel_at_fit_start():
    module = Seeded("plain")
    before = kernel_of(module)
    measured = fit(NTKLeastEigenvalue(on_error="raise"), module, epochs=3)
    after = kernel_of(module)
    changes = [measured[epoch][f"{NTK}change"] for epoch in range(3)]
    assert changes[2] == pytest.approx(float((after.kernel - before.kernel).norm() / before.kernel.norm()), rel=1e-3)
    assert [measured[epoch][f"{NTK}change_max"] for epoch in range(3)] == [max(changes[: i + 1]) for i in range(3)]


@pytest.mark.parametrize("complete", [True, False])
def test_the_reference_of_an_iterable_dataset_is_the_kernel_when_the_probe_is_complete(complete):
    class Plain(Stream):
        def __iter__(self):
            return iter(zip(self.x, self.y))

    probe = 16 if complete else 10**6  # all samples of the first epoch, if they do not suffice
    measured = fit(NTKLeastEigenvalue(on_error="raise", probe=probe), Seeded(), data=DataLoader(Plain(), 8))
    assert (f"{NTK}change" in measured[0]) == complete
    assert measured[1][f"{NTK}change"] > 0


def resumed(folder, samples=10, probe=16, **options):
    """Train two epochs, then two more from the checkpoint."""
    pl.seed_everything(0)
    first = trainer(
        [NTKLeastEigenvalue(samples=10, probe=16, on_error="raise")], max_epochs=2, default_root_dir=folder / "a"
    )
    first.fit(Seeded(), loader(20, shuffle=False))
    first.save_checkpoint(folder / "two.ckpt")
    callback = NTKLeastEigenvalue(samples=samples, probe=probe, on_error="raise", **options)
    second = trainer([callback], max_epochs=4, default_root_dir=folder / "b")
    second.fit(Seeded(), loader(20, shuffle=False), ckpt_path=folder / "two.ckpt")
    return rows(folder / "a"), rows(folder / "b")


def test_the_reference_survives_a_checkpoint(tmp_path):
    _, after = resumed(tmp_path)
    whole = fit(
        NTKLeastEigenvalue(samples=10, probe=16, on_error="raise"), Seeded(), epochs=4, default_root_dir=tmp_path / "c"
    )
    for epoch in (2, 3):
        expected = {name: value for name, value in whole[epoch].items() if "seconds" not in name}
        assert {name: value for name, value in after[epoch].items() if "seconds" not in name} == expected
    state = torch.load(tmp_path / "two.ckpt", weights_only=True)["callbacks"]
    (ours,) = [value for key, value in state.items() if key.startswith("NTKLeastEigenvalue")]
    assert ours["diagnostics"]["ntk_lambda_min"]["reference"].shape == (55,)  # the upper triangle with the diagonal


@pytest.mark.parametrize(
    "changed",
    [{"samples": 8}, {"samples": 9}, {"samples": 1}, {"probe": 8}, {"outputs": "sum"}, {"outputs": "full"}],
    ids=str,
)
def test_a_reference_on_other_samples_is_dropped(tmp_path, changed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, after = resumed(tmp_path, **changed)
    assert f"{NTK}change" not in after[2]
    assert 0 < after[3][f"{NTK}change"] < 1
    assert not math.isnan(after[2][f"{NTK}lambda_min"])


class Unfreezing(BaseFinetuning):
    """Trains the first layer from the third epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch >= 2:  # Lightning freezes again when it resumes
            self.make_trainable(pl_module.net[0])
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class Standing(Seeded):
    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), 0.0)


@pytest.mark.parametrize("net", ["plain", "bn"])
@pytest.mark.parametrize("stop", [None, 2, 3])
def test_unfreezing_layers_is_no_change(tmp_path, net, stop):
    """Used to move ntk_change from 0 to 0.128, with a learning rate of zero. ``stop``: resumed after that epoch."""
    caught = []
    for part, epochs in enumerate((stop, 5) if stop else (5,)):
        torch.manual_seed(0)
        run = trainer(
            [NTKLeastEigenvalue(on_error="raise"), Unfreezing()],
            max_epochs=epochs,
            default_root_dir=tmp_path / str(part),
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            checkpoint = tmp_path / "last.ckpt" if part else None
            run.fit(Standing(net), loader(20, shuffle=False), ckpt_path=checkpoint)
        run.save_checkpoint(tmp_path / "last.ckpt")
        caught += [str(each.message) for each in told]
    found = {epoch: row for part in tmp_path.glob("[01]") for epoch, row in rows(part).items()}
    changes = [found[epoch].get(f"{NTK}change") for epoch in range(5)]
    assert changes == [0.0, 0.0, None, 0.0, 0.0]
    assert f"{NTK}lambda_min" in found[2]
    restarts = [message for message in caught if "restarts" in message]
    assert restarts == [
        "normtheory/ntk_change is not logged: the set of trained parameters has changed; it restarts here."
    ]
    lines = [line for path in tmp_path.rglob("normtheory.jsonl") for line in jsonl.read(path) if "epoch" in line]
    told_in_file = {line["epoch"]: line.get("reasons", {}) for line in lines}
    assert {epoch: list(why) for epoch, why in told_in_file.items() if why} == {2: [f"{NTK}change"]}
