"""The callbacks in LightningCLI, of either package."""

import importlib
import inspect
import json

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import yaml
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_normtheory.callbacks import DiagnosticCallback, NormTheory, RSCRatio

from support.lit import CALLBACKS


@pytest.mark.parametrize("package", [pl, lightning.pytorch], ids=["pytorch_lightning", "lightning"])
def test_lightning_cli_builds_it_from_yaml(package, tmp_path):
    cli = importlib.import_module(f"{package.__name__}.cli")
    config = {"trainer": {
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "accelerator": "cpu",
        "callbacks": [
            {"class_path": "lightning_normtheory.callbacks.NormTheory",
             "init_args": {"every_n_epochs": 2, "probe": 64}},
            {"class_path": "lightning_normtheory.callbacks.RSCRatio", "init_args": {
                "probe": {"class_path": "lightning_normtheory.callbacks.Probe", "init_args": {"samples": 32}},
                "prefix": "other"}},
        ],
    }}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    boring = importlib.import_module(f"{package.__name__}.demos.boring_classes")
    built = cli.LightningCLI(boring.BoringModel, run=False, args=["--config", str(path)])
    norm_theory, rsc = (c for c in built.trainer.callbacks if isinstance(c, (NormTheory, RSCRatio)))
    assert (norm_theory.every_n_epochs, norm_theory.probe.samples, rsc.probe.samples) == (2, 64, 32)


@pytest.mark.parametrize("package", [pl, lightning.pytorch], ids=["pytorch_lightning", "lightning"])
def test_lightning_cli_takes_a_function_without_annotations(package, tmp_path, monkeypatch):
    """It used to be refused: the argument's type said Tensor, and the function does not say what it returns."""
    (tmp_path / "users_functions.py").write_text("def function(module, batch):\n    return module(batch)\n")
    monkeypatch.syspath_prepend(tmp_path)
    functions = {"loss": "users_functions.function", "predict": "users_functions.function"}
    callback = {"class_path": "lightning_normtheory.callbacks.NormTheory", "init_args": functions}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"trainer": {"logger": False, "callbacks": [callback]}}))
    cli = importlib.import_module(f"{package.__name__}.cli")
    boring = importlib.import_module(f"{package.__name__}.demos.boring_classes")
    built = cli.LightningCLI(boring.BoringModel, run=False, args=["--config", str(path)])
    (ours,) = (each for each in built.trainer.callbacks if isinstance(each, NormTheory))
    assert ours.loss is ours.predict is importlib.import_module("users_functions").function


def test_lightning_cli_shows_and_accepts_every_argument(capsys):
    def output(code, last):
        with pytest.raises(SystemExit, match=code):
            LightningCLI(BoringModel, run=False, args=[*options, last])
        return capsys.readouterr()

    common = set(inspect.signature(DiagnosticCallback.__init__).parameters) - {"self"}
    options = []
    for callback in CALLBACKS:
        options += [f"--trainer.callbacks+=lightning_normtheory.callbacks.{callback.__name__}"]
        options += ["--trainer.callbacks.every_n_epochs=3"]
    printed = yaml.safe_load(output("0", "--print_config").out)["trainer"]["callbacks"]
    for callback, arguments in zip(CALLBACKS, (each["init_args"] for each in printed), strict=True):
        own = set(inspect.signature(callback.__init__).parameters) - {"self", "args", "kwargs"}
        assert set(arguments) == common | own
        assert arguments["every_n_epochs"] == 3
    shown = output("0", "--trainer.callbacks.help=lightning_normtheory.callbacks.NormTheory").out
    assert all(f".{name} " in shown for name in printed[CALLBACKS.index(NormTheory)]["init_args"])
    assert "the largest fraction of the training time" in shown  # the text of the base class
    assert "every_n_epoch" in output("2", "--trainer.callbacks.every_n_epoch=3").err
