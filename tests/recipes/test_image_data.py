"""Which images are taken, and the batches that the loaders make of them."""

import math
import pickle
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

from lightning_normtheory.callbacks import RSCRatio
from lightning_normtheory.recipes.datasets.images import Images
from lightning_normtheory.recipes.datasets.source import embedded_images

from support.lit import rows, trainer
from support.recipes.image_files import held, ready, write_folder


class Line(pl.LightningModule):
    """A linear network that records its training batches."""

    def __init__(self, inputs=784, classes=10):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].clone())
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.001)


def test_limit_draws_from_all_classes_whatever_the_seed(tmp_path):
    write_folder(tmp_path, n=10)
    drawn = []
    for seed in (0, 1):
        pl.seed_everything(seed)
        drawn.append(held(ready(dataset="folder", root=tmp_path, limit=9).train))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert len(drawn[0][0]) == 9
    assert drawn[0][1].unique().tolist() == [0, 1, 2]


def test_limit_takes_nothing_from_the_global_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    ready(limit=5)
    assert torch.equal(torch.rand(2), expected)


def test_a_larger_limit_adds_and_more_than_all_is_all():
    def taken(limit):
        return {tuple(x.tolist()) for x in held(ready(limit=limit, scale="unit", flatten=True).train)[0]}

    small, large, everything = taken(100), taken(200), taken(None)
    assert (len(small), len(large)) == (100, 200)
    assert small < large < everything
    assert len(ready(limit=9999).train) == 2000
    assert len(ready(limit=10).val) == 500


def test_classes_are_relabelled_in_their_order_before_limit():
    images, targets = embedded_images("train")
    data = ready(classes=[5, 3], limit=300, scale="unit")
    x, y = held(data.train)
    assert data.number_of_classes == 2
    assert len(x) == 300
    assert y.unique().tolist() == [0, 1]
    assert len(data.val) == 100
    whole = held(ready(classes=[5, 3], scale="unit").train)
    assert len(whole[0]) == 400
    of_class_5 = nn.functional.normalize(images[targets == 5].flatten(1).float())
    torch.testing.assert_close(whole[0][whole[1] == 0].flatten(1), of_class_5)


def test_classes_of_a_folder_read_only_their_files(tmp_path):
    write_folder(tmp_path)
    for path in (tmp_path / "train" / "cat").iterdir():
        path.write_bytes(b"never read")
    data = ready(dataset="folder", root=tmp_path, classes=[0, 2])
    assert data.source.endswith("12 + 4 images")


def test_a_class_without_validation_images(tmp_path):
    write_folder(tmp_path)
    for path in (tmp_path / "test" / "cat").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"validation images of the classes \[1\]"):
        ready(dataset="folder", root=tmp_path, classes=[1])


def test_signs():
    data = ready(classes=[3, 5], targets="sign")
    labels = held(ready(classes=[3, 5]).train)[1]
    signs = held(data.train)[1]
    assert signs.dtype == torch.float32
    assert torch.equal(signs, torch.where(labels == 1, 1.0, -1.0))
    assert held(data.val)[1].unique().tolist() == [-1.0, 1.0]
    assert data.number_of_classes == 2


def test_equal_arguments_give_equal_tensors():
    a, b = (ready(limit=50, classes=[1, 2, 7]) for _ in range(2))
    assert all(
        torch.equal(x, y) for x, y in zip((*a.train.tensors, *a.val.tensors), (*b.train.tensors, *b.val.tensors))
    )


def test_batches_are_the_samples_in_the_order_of_the_seed():
    data = ready(limit=70, batch_size=32)
    torch.manual_seed(5)
    batches = list(data.train_dataloader())
    torch.manual_seed(5)
    reference = list(DataLoader(data.train, 32, shuffle=True))
    assert [len(x) for x, _ in batches] == [32, 32, 6]
    for (x, y), (x_reference, y_reference) in zip(batches, reference):
        assert torch.equal(x, x_reference)
        assert torch.equal(y, y_reference)
    assert not torch.equal(torch.cat([x for x, _ in batches]), held(data.train)[0])


def test_setup_again_changes_nothing_and_every_stage_has_its_images():
    data = Images(limit=40)
    for stage in ("fit", "validate", "test", "predict"):
        data.setup(stage)
        kept = getattr(data, "kept", data.train)
        assert data.train is kept
        data.kept = kept
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert torch.equal(torch.cat([x for x, _ in loader]), held(data.val)[0])
    for stage in ("validate", "test", "predict"):  # each by itself, too
        alone = Images(limit=40)
        alone.setup(stage)
        assert len(alone.val) == 500


def test_a_trainer_fits_and_tests():
    data, module = Images(limit=64, batch_size=16), Line()
    runner = trainer(max_epochs=2)
    runner.fit(module, datamodule=data)
    assert runner.global_step == 8
    assert math.isfinite(runner.test(module, datamodule=data, verbose=False)[0]["val_loss"])


def test_the_data_can_be_sent_to_another_process(tmp_path):
    data = ready(dataset="folder", root=write_folder(tmp_path), augment=True)
    copy = pickle.loads(pickle.dumps(data))
    torch.manual_seed(0)
    expected = held(data.train)[0]
    torch.manual_seed(0)
    assert torch.equal(held(copy.train)[0], expected)


def test_full_batch_steps_all_see_all_images_in_one_order():
    data, module = Images(limit=30, full_batch_steps=4), Line()
    runner = trainer(max_epochs=2)
    runner.fit(module, datamodule=data)
    assert runner.global_step == 8
    assert all(torch.equal(x, data.train.tensors[0]) for x in module.seen)


def test_the_probe_of_a_full_batch_is_all_of_it(tmp_path):
    data, module, callback = Images(limit=512, full_batch_steps=3), Line(), RSCRatio(probe=512)
    losses = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            x, y = data.train.tensors
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(module(x), y)))

    trainer([Watch(), callback], max_epochs=2).fit(module, datamodule=data)
    (batch,) = callback.probe.batches(0, 1)
    probed, trained = (x.flatten(1).double() @ torch.arange(784.0).double() for x in (batch.data[0], module.seen[0]))
    assert torch.equal(probed.sort().values, trained.sort().values)
    measured = [row["normtheory/loss"] for _, row in sorted(rows(tmp_path).items())]
    assert measured == pytest.approx(losses, rel=1e-5)


def test_a_full_batch_is_for_one_process():
    data = ready(limit=30, full_batch_steps=4)
    data.trainer = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match=r"one process.*there are 2.*--trainer\.devices 1"):
        data.train_dataloader()


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter", "ignore::DeprecationWarning")
def test_lightnings_command_line_tells_the_model_what_the_data_is(tmp_path):
    class Linked(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("data.features", "model.inputs", apply_on="instantiate")
            parser.link_arguments("data.number_of_classes", "model.classes", apply_on="instantiate")

    def linked(*options):
        return Linked(Line, Images, run=False, args=list(options), save_config_callback=None)

    root = write_folder(tmp_path)
    cli = linked("--data.dataset=folder", f"--data.root={root}", "--data.classes=[0,2]", "--data.scale=sqrt_d")
    assert cli.model.net[1].weight.shape == (2, 192)
    assert (cli.datamodule.classes, cli.datamodule.scale) == ([0, 2], "sqrt_d")
    with pytest.raises(FileNotFoundError, match=r"Expected CIFAR-10 in .*nowhere"):
        linked("--data.dataset=cifar10", f"--data.root={tmp_path / 'nowhere'}")
