"""The command in this process: what it lists, where it finds names and options, and what it says of misspelt ones."""

import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import yaml

from lightning_normtheory.recipes import cli, figures, grid, recipe_cli, registry, sweep
from lightning_normtheory.recipes.cli import main
from lightning_normtheory.recipes.datasets import FashionMNISTSlice
from lightning_normtheory.recipes.option_errors import OptionError
from lightning_normtheory.recipes.recipe_cli import check_options, fit

SMALL = ["--trainer.max_epochs=1", "--model.width=8", "--data.limit=100", "--trainer.enable_progress_bar=false"]
FILE = """\
# normtheory run small
# normtheory sweep small --data.root DIR
#
# A network, 2.5 wide. It
# learns [slowly].
recipe:
  paper: ours
  data: noise
  time: 1 s
  figure: overview
"""


@pytest.fixture
def handed_on(monkeypatch):
    """What the command would train: name and options."""
    calls = []
    monkeypatch.setattr(recipe_cli, "fit", lambda name, options: calls.append((name, options)))
    return calls


@pytest.fixture
def swept(monkeypatch):
    """What the command would sweep."""
    calls = []
    monkeypatch.setattr(sweep, "sweep", lambda *arguments: calls.append(arguments) or 0)
    return calls


@pytest.fixture
def small_recipe(monkeypatch, tmp_path):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "small.yaml").write_text(FILE)
    monkeypatch.setattr(registry, "_FOLDER", folder)


def refusal(capsys, *arguments):
    """The last line on stderr of a command that is refused."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


# -- list and the registry ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 40, 80, 139, 140, 300])
def test_the_list_has_everything_at_any_width(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= width
    shown = "".join(out.split())
    for name in registry.names():
        recipe = registry.recipe(name)
        assert name in (out if width >= 60 else shown)
        assert recipe.time in out
        if width < 60:  # one column: all of a text is in a row
            sentence = cli._first_sentence(registry.description(name))
            for text in (recipe.paper, recipe.data, sentence):
                assert "".join(text.split()) in shown


def test_the_list_shows_brackets_and_the_first_sentence(small_recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    registry._FOLDER.joinpath("small.yaml").write_text(FILE.replace("2.5 wide", "[2.5] wide"))
    main(["list"])
    out = capsys.readouterr().out
    assert "A network, [2.5] wide." in out
    assert "It learns" not in out


def test_the_description_leaves_the_commands_out(small_recipe):
    assert registry.names() == ["small"]
    assert registry.description("small") == "A network, 2.5 wide. It learns [slowly]."


def test_every_file_has_the_section_recipe():
    for name in registry.names():
        recipe = registry.recipe(name)
        assert recipe.paper
        assert recipe.data
        assert recipe.time
        assert recipe.figure in figures.FIGURES, name
        assert registry.description(name), name


def test_a_file_without_the_section_is_named(small_recipe):
    registry._FOLDER.joinpath("small.yaml").write_text("seed_everything: 0\n")
    with pytest.raises(ValueError, match=r"small\.yaml has no section recipe"):
        registry.recipe("small")


def test_the_list_waits_for_torch_alone():
    """In a fresh interpreter, since this one has loaded everything."""
    code = (
        "import sys; from lightning_normtheory.recipes.cli import main; main(['list']); "
        "large = ('pytorch_lightning', 'lightning', 'wandb', 'matplotlib', 'torchvision'); "
        "print([name for name in large if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# -- where the name and the options are --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("quickstart", []),
        ("quickstart --trainer.max_epochs 5", ["--trainer.max_epochs=5"]),
        ("--trainer.max_epochs 5 quickstart", ["--trainer.max_epochs=5"]),
        ("--a.x 5 quickstart --b.y=6 --a.x 7", ["--a.x=5", "--b.y=6", "--a.x=7"]),
        ("--trainer.logger.project quickstart quickstart", ["--trainer.logger.project=quickstart"]),
        ("--trainer.max_steps -1 quickstart", ["--trainer.max_steps=-1"]),
        (
            "--trainer.callbacks+=A quickstart --trainer.callbacks.x=1",
            ["--trainer.callbacks+=A", "--trainer.callbacks.x=1"],
        ),
        ("-c mine.yaml quickstart", ["--config=mine.yaml"]),
        ("--print_config quickstart", ["--print_config"]),
        ("--print_config=skip_null quickstart", ["--print_config=skip_null"]),
        ("quickstart -h", ["--help"]),
        ("--help quickstart", ["--help"]),
        ("quickstart --model.help", ["--model.help"]),
        ("quickstart --model.link a=b", ["--model.link=a=b"]),
    ],
)
def test_options_stand_before_or_behind_the_name(arguments, options, handed_on):
    before = list(sys.argv)
    assert main(["run", *arguments.split()]) == 0
    assert handed_on == [("quickstart", options)]
    assert sys.argv == before  # Lightning starts further processes with it


def test_there_is_one_name(handed_on, capsys):
    assert "unrecognized arguments: another" in refusal(capsys, "run", "quickstart", "another")
    assert handed_on == []


@pytest.mark.parametrize(
    "arguments",
    [
        "quickstart --grid model.width=1,2 model.depth=3",
        "quickstart --grid model.width=1,2 --grid model.depth=3",
        "--grid model.width=1,2 --grid model.depth=3 quickstart",
        "--grid model.width=1,2 quickstart --grid model.depth=3",
    ],
)
def test_a_grid_of_several_options(arguments, swept):
    assert main(["sweep", *arguments.split()]) == 0
    grid = {"model.width": ["1", "2"], "model.depth": ["3"]}
    assert swept == [("quickstart", grid, None, 1, [], "normtheory_runs")]


def test_a_sweep_hands_on_what_it_is_told(swept):
    arguments = "--seeds 3 --trainer.max_epochs 2 quickstart --jobs 2 --output there --data.limit=9"
    assert main(["sweep", *arguments.split()]) == 0
    # an empty grid is the recipe's
    assert swept == [("quickstart", {}, 3, 2, ["--trainer.max_epochs=2", "--data.limit=9"], "there")]


def test_the_exit_code_of_a_sweep(monkeypatch):
    monkeypatch.setattr(sweep, "sweep", lambda *arguments: 130)
    assert main(["sweep", "quickstart"]) == 130


def test_a_sweep_of_wandb_runs_nothing(swept, tmp_path, capsys):
    path = tmp_path / "w.yaml"
    assert main(["sweep", "quickstart", "--grid", "model.width=1,2", "--seeds", "2", "--wandb-file", str(path)]) == 0
    assert swept == []
    assert yaml.safe_load(path.read_text())["parameters"]["model.width"] == {"values": [1, 2]}
    assert f"wandb sweep {path}" in capsys.readouterr().out


# -- what is misspelt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        ("rnu quickstart", "there is no command 'rnu'. Did you mean 'run'?"),
        ("run quikstart", "There is no recipe 'quikstart'. Did you mean 'quickstart'?"),
        ("sweep quikstart", "There is no recipe 'quikstart'. Did you mean 'quickstart'?"),
        ("run", "expected the name of a recipe"),
        ("sweep", "expected the name of a recipe"),
        ("list quickstart", "unrecognized arguments: quickstart"),
        ("run --trainer.max_epochz 5 quickstart", "no option --trainer.max_epochz. Did you mean --trainer.max_epochs?"),
        ("run quickstart --trainer.max_epoch=5", "no option --trainer.max_epoch. Did you mean --trainer.max_epochs?"),
        ("run quickstart --model.widht 5", "no option --model.widht. Did you mean --model.width?"),
        ("run quickstart --model.init_args.widht 5", "no option --model.widht. Did you mean --model.width?"),
        ("run quickstart --data.limt=5", "no option --data.limt. Did you mean --data.limit?"),
        ("run quickstart --trainer.logger.projct=x", "Did you mean --trainer.logger.project?"),
        ("run quickstart --trainer.callbacks.prob=5", "Did you mean --trainer.callbacks.probe?"),
        ("run quickstart --recipe.figur=x", "Did you mean --recipe.figure?"),
        ("run quickstart --ouput=x", "Did you mean --output?"),
        ("run quickstart --max_epochs=5", "Did you mean --trainer.max_epochs?"),
        ("run quickstart --lr=5", "Did you mean --model.lr?"),
        ("run quickstart --hlep", "Did you mean --help?"),
        ("run quickstart --nothing.like.it=5", "There is no option --nothing.like.it."),
        ("run quickstart --model.zzz=5", "There is no option --model.zzz. --model has: "),
        ("run quickstart --model.width abc", "--model.width does not take 'abc': it expects int."),
        (
            "run quickstart --trainer.max_epochs abc",
            "--trainer.max_epochs does not take 'abc': it expects ",
        ),
        (
            "run quickstart --trainer.max_epochs",
            "--trainer.max_epochs expects a value of type ",
        ),
        ("run quickstart --model Nothing", "--model does not take 'Nothing': it expects "),
        ("run quickstart -c nofile.yaml", "--config does not take 'nofile.yaml'."),
        ("sweep quickstart --grid model.widht=1,2", "no option --model.widht. Did you mean --model.width?"),
        ("sweep quickstart --grid model.depth=1 model.width=1,abc", "--model.width does not take 'abc'"),
        ("sweep quickstart --model.dept=1", "no option --model.dept. Did you mean --model.depth?"),
        ("sweep quickstart --sees 3", "no option --sees. Did you mean --seeds?"),
        ("sweep quickstart --seeds x", "argument --seeds: invalid int value: 'x'"),
        ("sweep quickstart --seeds 0", "Expected at least one seed, got 0."),
        ("sweep quickstart --grid model.width", "Expected OPTION=VALUE,VALUE"),
        ("sweep quickstart --wandb-file w.yaml --jobs 2", "--jobs and --output say nothing: leave them out"),
    ],
)
def test_the_last_line_says_what_is_wrong(arguments, last, swept, capsys):
    assert last in refusal(capsys, *arguments.split())
    assert swept == []


def test_a_refused_option_costs_no_page(capsys):
    """jsonargparse puts its usage in front."""
    for option in ("--model.widht=5", "--model.width=abc", "--trainer.max_epochz=5"):
        assert main(["run", "quickstart", option]) == 2
        tip, _ = capsys.readouterr().err.splitlines()
        assert tip.startswith("All options: normtheory run quickstart --help")


def test_a_value_that_is_no_plain_one_keeps_the_details(capsys):
    assert main(["run", "quickstart", "--trainer.callbacks+=Nothing"]) == 2
    err = capsys.readouterr().err
    assert "Nothing" in err.splitlines()[-1]
    assert len(err.splitlines()) > 3
    assert "usage:" not in err


def test_the_first_wrong_option_is_the_one_that_is_named():
    with pytest.raises(OptionError, match=r"no option --model\.widht"):
        check_options("quickstart", ["--data.limit=5", "--model.widht", "5", "--data.limt=5"])
    # a logger without its folder would be refused, with it it is not: the fault is behind it
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x"]
    with pytest.raises(OptionError, match=r"no option --trainer\.logger\.projct"):
        check_options("quickstart", [*logger, "--trainer.logger.projct=x"])
    # the options of a class that is not the recipe's
    with pytest.raises(OptionError, match=r"Did you mean --trainer\.logger\.flush_logs_every_n_steps"):
        check_options("quickstart", [*logger, "--trainer.logger.flush_logs_every_n_step=1"])


def test_checking_options_has_no_effect(tmp_path):
    import random

    state = random.getstate()
    check_options("quickstart", ["--seed_everything=1", "--output=there", "--trainer.callbacks.every_n_epochs=2"])
    assert random.getstate() == state
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", registry.names())
def test_the_settings_of_every_recipe_are_accepted(name):
    for option, values in registry.recipe(name).grid.items():
        check_options(name, [f"--{option}={grid.text(value)}" for value in values])


def test_help_of_the_commands(capsys):
    for arguments in (["--help"], ["list", "--help"], ["sweep", "--help"], ["sweep", "quickstart", "-h"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
    assert main(["run", "--help"]) == 0
    assert "--wandb-file FILE" in capsys.readouterr().out


def test_help_of_a_recipe_is_lightnings(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["run", "quickstart", "--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: normtheory run quickstart")
    assert "--trainer.gradient_clip_val" in out
    assert "--output" in out
    assert "--recipe.figure" in out


def test_the_configuration_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--print_config", "quickstart", "--model.width", "7"])
    assert yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["width"] == 7


# -- a run -------------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_its_tables_and_its_figure(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert main(["run", *SMALL, "quickstart", "--output", "there"]) == 0
    out = capsys.readouterr().out
    (folder,) = Path("there/quickstart").iterdir()
    assert out.splitlines()[-2:] == [
        f"Every number of this run: {folder / 'normtheory.jsonl'}",
        f"The figure: {folder / 'quickstart.png'}",
    ]
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
    """Data that say what a network for them is like."""

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
    assert "The figure:" not in captured.out
    assert captured.out.splitlines()[-1].startswith("Every number of this run: ")


def test_an_error_of_the_training_is_not_taken_for_a_refused_option(monkeypatch):
    def fail(name, options):
        raise ValueError("of the user's code")

    monkeypatch.setattr(recipe_cli, "fit", fail)
    with pytest.raises(ValueError, match="of the user's code"):
        main(["run", "quickstart"])


# -- what a class refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.root=/nowhere"], "normtheory: Expected MNIST in /nowhere, but it is not there."),
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
