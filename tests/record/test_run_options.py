"""A run with its options, as figures need it."""

import math

import pytest
from pytorch_lightning import LightningModule

from lightning_normtheory.callbacks import RSCRatio
from lightning_normtheory.callbacks.output import run_file
from lightning_normtheory.record import jsonl
from lightning_normtheory.record.history import read_history

from support.lit import Classifier, loader, trainer
from support.recipes.figure_cases import NAN, writer


@pytest.fixture
def run(tmp_path):
    return writer(tmp_path)


def test_options_are_named_as_on_the_command_line(run):
    options = run({"width": 8, "sizes": [1, [2]], "act": {"class_path": "torch.nn.Tanh"}}, [{"loss": 1.0}]).options
    assert options["model.width"] == 8
    assert options["model.sizes"] == (1, (2,))
    assert options["model.act"] == "Tanh"
    assert options["trainer.callbacks.0.probe"] == 512
    assert options["seed_everything"] == 0
    assert not any("init_args" in name or "class_path" in name for name in options)


def test_rows_of_an_epoch_are_merged_and_the_last_counts(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {width: 8}")
    for epoch, value in ((1, 5.0), (0, 1.0), (0, NAN)):  # resumed, and one value that is not a number
        line = {"epoch": epoch, "step": epoch, "metrics": {"normtheory/loss": value}, "user_metrics": {"val": value}}
        jsonl.append(tmp_path / "normtheory.jsonl", {}, line)
    rows = read_history(tmp_path).rows
    assert [row.epoch for row in rows] == [0, 1]
    assert math.isnan(rows[0].metrics["loss"])
    assert rows[1] == (1, 1, 0.0, {"loss": 5.0}, {"val": 5.0}, {"val": 5.0, "normtheory/loss": 5.0}, {})


class Dated(Classifier):
    """Logs the epoch."""

    def training_step(self, batch, batch_idx):
        self.log("train_epoch", float(self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        LightningModule.log(self, "val_epoch", float(self.current_epoch))


def test_a_real_run_has_every_number_in_its_own_epoch(tmp_path):
    """Also what another callback measures, which the rows of the first one repeat, an epoch late and in float32."""
    fit = trainer([RSCRatio(), RSCRatio(prefix="softmax")], num_sanity_val_steps=0)
    fit.fit(Dated(), loader(), loader(shuffle=False))
    (run_file.folder(fit) / "config.yaml").write_text("seed_everything: 0")
    rows = [row.logged for row in read_history(tmp_path).rows]
    assert [row["train_epoch"] for row in rows] == [row["val_epoch"] for row in rows] == [0, 1, 2]
    assert [row["softmax/loss"] for row in rows] == [row["normtheory/loss"] for row in rows]


def test_no_run_several_runs_no_settings(tmp_path, run):
    with pytest.raises(ValueError, match=r"Expected one normtheory\.jsonl .* none"):
        read_history(tmp_path)
    first = run({}, [{"loss": 1.0}]).path.parent
    run({}, [{"loss": 1.0}])
    with pytest.raises(ValueError, match=r"but there is 2: .*0, .*1\."):
        read_history(tmp_path)
    (first / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"Expected .*config\.yaml"):
        read_history(first)
