"""The command in this process: how it finds names and options, and what it passes on."""

import subprocess
import sys

import pytest
import yaml

from lightning_normtheory.recipes.cli import lightning_cli, main
from lightning_normtheory.recipes.sweeps import sweep

from support.recipes.cli_cases import refusal
from support.view.report_cases import awkward_rows, write_run


@pytest.fixture
def handed_on(monkeypatch):
    """Record what the command would train: name and options."""
    calls = []
    monkeypatch.setattr(lightning_cli, "fit", lambda name, options: calls.append((name, options)))
    return calls


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


@pytest.mark.parametrize("arguments", ["--help", "list", "report run", "report --text run", "run quikstart", "rnu"])
def test_an_answer_that_trains_nothing_loads_nothing_large(arguments, tmp_path):
    """In a fresh interpreter, since this one has loaded everything."""
    write_run(tmp_path / "run", awkward_rows())
    large = ("torch", "pytorch_lightning", "lightning", "torchmetrics", "torchvision", "numpy", "matplotlib", "wandb")
    code = (
        "import atexit, sys; from lightning_normtheory.recipes.cli import main; "
        f"atexit.register(lambda: print([name for name in {large} if name in sys.modules])); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert len((done.stdout + done.stderr).splitlines()) > 1
    assert (tmp_path / "run" / "report.html").exists() == (arguments == "report run")


@pytest.mark.parametrize(("command", "package"), [("list", "rich"), ("run quickstart", "jsonargparse")])
def test_without_the_extra_its_name_is_said(monkeypatch, capsys, command, package):
    """As after a plain pip install: None in sys.modules is a module that cannot be found."""
    for name in [
        name for name in sys.modules if name == package or name.startswith((f"{package}.", "pytorch_lightning.cli"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    for module in ("commands.list", "lightning_cli"):
        monkeypatch.delitem(sys.modules, f"lightning_normtheory.recipes.cli.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(command.split()) == 2
    assert f'needs {package}: pip install -e ".[recipes]"' in capsys.readouterr().err


def test_a_misspelled_option_of_the_dashboard_is_refused_before_a_missing_one(capsys):
    with pytest.raises(SystemExit):
        main(["dashboard", "--projct", "demo"])
    assert "--projct" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["dashboard"])
    assert "--project P" in capsys.readouterr().err


def test_the_specification_of_the_dashboard_is_printed(capsys):
    assert main(["dashboard", "--project", "demo", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert '"normtheory/hessian_lambda_max"' in printed
    assert main(["dashboard", "--project", "demo", "--dry-run", "--axis", "step"]) == 0
    assert capsys.readouterr().out.count('"trainer/global_step"') == printed.count('"epoch"') > 0
    assert main(["dashboard", "--project", "demo", "--dry-run", "--prefix", "a/b"]) == 2
    assert "prefix of a callback" in capsys.readouterr().err


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 2
    assert "normtheory COMMAND --help" in capsys.readouterr().out


def test_a_reader_that_has_enough_is_no_error():
    """As ``normtheory … | head`` does; more than a pipe holds, so that writing fails."""
    code = (
        "import sys; from lightning_normtheory.recipes import cli\n"
        "from lightning_normtheory.recipes.cli.commands import list\n"
        "list.main = lambda arguments: print('x' * 10**7) or 0; sys.exit(cli.main(['list']))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child.stdout.read(10)
    child.stdout.close()
    assert (child.stderr.read(), child.wait()) == ("", 0)
