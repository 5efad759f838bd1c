"""A run on Lightning's command line, in this process."""

from pathlib import Path

import pytest
import pytorch_lightning as pl
import yaml

from lightning_normtheory.recipes.cli import lightning_cli, main
from lightning_normtheory.recipes.cli.lightning_cli import check_options, fit
from lightning_normtheory.recipes.datasets import FashionMNISTSlice

SMALL = ["--trainer.max_epochs=1", "--model.width=8", "--data.limit=100", "--trainer.enable_progress_bar=false"]


def test_a_run_ends_with_its_tables_and_its_figure(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert main(["run", *SMALL, "quickstart", "--output", "there"]) == 0
    out = capsys.readouterr().out
    (folder,) = Path("there/quickstart").iterdir()
    assert out.splitlines()[-2:] == [
        f"Every number of this run: {folder / 'normtheory.jsonl'}",
        f"Figure: {folder / 'quickstart.png'}",
    ]
    assert f"Report, for a browser: {(folder / 'report.html').resolve().as_uri()}" in out
    assert (folder / "report.html").exists()
    assert {path.name for path in folder.glob("quickstart.*")} == {
        f"quickstart.{x}" for x in ("png", "svg", "csv", "txt")
    }
    assert not Path("normtheory_runs").exists()
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["recipe"]["figure"] == "overview"
    assert saved["trainer"]["gradient_clip_val"] is None  # also what is null: a later file may say otherwise
    check_options("quickstart", [f"--config={folder / 'config.yaml'}"])


def test_a_run_without_a_logger_is_below_the_output_too():
    trainer = fit("quickstart", [*SMALL, "--trainer.logger=false", "--output=there"])
    assert trainer.default_root_dir.endswith("there")
    assert Path("there/normtheory_logs/version_0/quickstart.png").exists()
    assert [path.name for path in Path().iterdir()] == ["there"]


def test_folders_that_the_user_names_stay():
    options = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--trainer.default_root_dir=root"]
    trainer = fit("quickstart", [*SMALL, *options])
    assert trainer.default_root_dir.endswith("root")
    assert Path("logs/lightning_logs/version_0/quickstart.png").exists()
    assert not Path("normtheory_runs").exists()


class Described(FashionMNISTSlice):
    """Data that determine the inputs and outputs of the network."""

    features = 784
    number_of_classes = 12


def test_the_network_fits_the_data():
    options = ["--trainer.logger=false", f"--data={__name__}.Described", "--model.inputs=3", "--model.classes=2"]
    net = fit("quickstart", [*options, *SMALL]).model.net
    assert net[1].in_features == 784
    assert net[-1].out_features == 12


def test_a_figure_that_fails_does_not_fail_the_run(capsys):
    assert main(["run", "quickstart", *SMALL, "--trainer.logger=false", "--recipe.figure=none"]) == 0
    captured = capsys.readouterr()
    assert "normtheory: the figure could not be drawn: There is no figure 'none'." in captured.err
    assert "Figure:" not in captured.out
    assert captured.out.splitlines()[-1].startswith("Every number of this run: ")


def test_a_report_that_fails_does_not_fail_the_run(capsys, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_normtheory.view.html.report.write_report", full)
    assert main(["run", "quickstart", *SMALL, "--trainer.logger=false"]) == 0
    captured = capsys.readouterr()
    assert "normtheory: the report could not be written: [Errno 28] No space left on device" in captured.err
    assert "Report" not in captured.out


def test_an_error_of_the_training_is_not_taken_for_a_refused_option(monkeypatch):
    def fail(name, options):
        raise ValueError("of the user's code")

    monkeypatch.setattr(lightning_cli, "fit", fail)
    with pytest.raises(ValueError, match="of the user's code"):
        main(["run", "quickstart"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.root=/nowhere"], "normtheory: Expected MNIST in /nowhere, but did not find it."),
        (["--data.limit=0"], "normtheory: Expected limit to be a positive integer, but got 0."),
        (["--data.dataset=mnits"], "Did you mean 'mnist'?"),
    ],
)
def test_what_a_recipe_refuses_is_one_line(capsys, options, message):
    assert main(["run", "wn-mnist", *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


class Refusing(pl.LightningModule):
    def __init__(self) -> None:
        raise ValueError("the user's own")


def test_an_error_of_the_users_class_keeps_its_traceback():
    with pytest.raises(Exception, match="the user's own") as caught:
        main(["run", "wn-mnist", f"--model={__name__}.Refusing"])
    assert not isinstance(caught.value, SystemExit)


def test_saved_settings_repeat_a_run_elsewhere(tmp_path):
    small = ["--data.limit=50", "--model.width=4", "--trainer.max_epochs=1", "--trainer.logger=false"]
    assert main(["run", "wn-mnist", *small, f"--output={tmp_path / 'first'}"]) == 0
    (config,) = (tmp_path / "first").rglob("config.yaml")
    assert str(tmp_path) not in config.read_text()
    assert main(["run", "wn-mnist", f"--config={config}", f"--output={tmp_path / 'second'}"]) == 0
    curves = [next((tmp_path / name).rglob("wn-mnist.csv")).read_text() for name in ("first", "second")]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("name", ["rsc-width", "linearity-width"])
def test_steps_are_chosen_in_the_precision_of_the_run(name):
    small = ["--model.width=8", "--trainer.max_epochs=1", "--trainer.logger=false", "--trainer.precision=64-true"]
    assert main(["run", name, *small]) == 0
