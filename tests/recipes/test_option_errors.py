"""Messages about misspelled names, options and values, and the help."""

import pytest
import yaml

from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.cli import main
from lightning_normtheory.recipes.cli.lightning_cli import check_options
from lightning_normtheory.recipes.cli.option_errors import OptionError
from lightning_normtheory.recipes.sweeps import grid

from support.recipes.cli_cases import refusal


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
        ("run quickstart --model.zzz=5", "There is no option --model.zzz. Options of --model: "),
        ("run quickstart --model.width abc", "--model.width expects int, got 'abc'."),
        ("run quickstart --trainer.max_epochs abc", "--trainer.max_epochs expects … int … , got 'abc'."),
        ("run quickstart --trainer.max_epochs", "--trainer.max_epochs expects … int … , got nothing."),
        ("run quickstart --model Nothing", "--model expects … , got 'Nothing'."),
        ("run quickstart -c nofile.yaml", "--config does not accept 'nofile.yaml'."),
        ("sweep quickstart --grid model.widht=1,2", "no option --model.widht. Did you mean --model.width?"),
        ("sweep quickstart --grid model.depth=1 model.width=1,abc", "--model.width expects int, got 'abc'"),
        ("sweep quickstart --model.dept=1", "no option --model.dept. Did you mean --model.depth?"),
        ("sweep quickstart --sees 3", "no option --sees. Did you mean --seeds?"),
        ("sweep quickstart --seeds x", "argument --seeds: invalid int value: 'x'"),
        ("sweep quickstart --seeds 0", "Expected at least one seed, got 0."),
        ("sweep quickstart --grid model.width", "Expected OPTION=VALUE,VALUE"),
        ("sweep quickstart --wandb-file w.yaml --jobs 2", "runs nothing: omit --jobs and --output"),
    ],
)
def test_the_last_line_says_what_is_wrong(arguments, last, swept, capsys):
    line = refusal(capsys, *arguments.split())
    assert all(part in line for part in last.split(" … "))
    assert swept == []


def test_a_refused_option_costs_no_page(capsys):
    """jsonargparse prints its usage first."""
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
