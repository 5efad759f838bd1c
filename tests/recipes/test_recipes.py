"""The command, run as a user runs it."""

import csv
import json
import math
from functools import cache
from itertools import pairwise

import pytest
import yaml

from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.cli import main

from support.lit import rows
from support.recipes.recipe_cases import RECORDED, SMALL, losses, normtheory, numbers, run_all


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, *normtheory("run", "quickstart", cwd=folder)


def test_quickstart_learns_and_measures(quickstart):
    folder, code, _, err = quickstart
    assert code == 0, err
    measured = numbers(folder)
    assert len(measured) == 20
    assert all(math.isfinite(value) for row in measured for value in row.values())
    assert measured[-1]["val_accuracy"] > 0.7  # ten classes
    norms = [row["normtheory/min_weight_norm"] for row in measured]
    # plain SGD on WeightNorm: the norm cannot fall, but for float32 rounding of single steps
    assert all(b >= a * (1 - 20 * 3e-8) for a, b in pairwise(norms))


def test_quickstart_ends_with_a_table_and_names_its_file(quickstart):
    _, _, out, _ = quickstart
    assert "w_min" in out
    assert "λ_max" in out
    assert "normtheory.jsonl" in out


def test_quickstart_logs_to_wandb_offline(quickstart):
    folder, _, _, err = quickstart
    assert list(folder.rglob("offline-run-*/*.wandb"))
    assert "wandb sync" in err
    (config,) = folder.glob("normtheory_runs/quickstart/*/config.yaml")
    assert yaml.safe_load(config.read_text())["seed_everything"] == 0


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """Function of a recipe's name that runs it at the size for tests, once, and returns the folder."""

    @cache
    def small_run(name):
        folder = tmp_path_factory.mktemp("small")
        ((code, _, err),) = run_all(folder, [name]).values()
        assert code == 0, err
        return folder / name

    return small_run


# Recipes that take longest, also at this size.
LONG = ("resnet18", "linearity")


def test_every_recipe_has_a_size_for_tests():
    assert sorted(SMALL) == registry.names()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_one_seed_gives_one_run(small_run, tmp_path, name):
    ((code, _, err),) = run_all(tmp_path, [name]).values()
    assert code == 0, err
    first, second = numbers(small_run(name)), numbers(tmp_path / name)
    assert len(first) > 1
    assert first == second


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(LONG)) for name in SMALL]
)
def test_the_losses_are_those_that_were_recorded(small_run, name):
    assert losses(numbers(small_run(name))) == pytest.approx(json.loads(RECORDED.read_text())[name], rel=1e-3)


@pytest.mark.parametrize("name", ["quickstart", "wn-cifar10", "wn-mnist", "wn-regimes"])
def test_no_weight_vector_gets_shorter_by_plain_descent_on_weightnorm(small_run, name):
    norms = [row["normtheory/min_weight_norm"] for row in numbers(small_run(name))]
    # but for the rounding of float32, up to 3e-8 in each of at most 20 steps
    assert all(b >= a * (1 - 20 * 3e-8) for a, b in pairwise(norms))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(LONG)) for name in SMALL]
)
def test_a_run_draws_its_figure(small_run, name):
    (picture,) = small_run(name).rglob(f"{name}.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in picture.with_suffix(".svg").read_text()
    with picture.with_suffix(".csv").open(newline="") as file:
        assert any(math.isfinite(float(row["y"])) for row in csv.DictReader(file))
    assert picture.with_suffix(".txt").read_text().startswith(f"{name}: ")


@pytest.mark.slow
def test_lightnings_options_are_there(tmp_path):
    options = ("--trainer.max_epochs=1", "--trainer.logger=false", "--model.depth=3", "--data.batch_size=200")
    code, out, err = normtheory("run", "quickstart", *options, cwd=tmp_path)
    assert code == 0, err
    assert not list(tmp_path.rglob("*.wandb"))
    assert len([name for name in rows(tmp_path)[0] if "layers/weight_norm" in name]) == 3
    code, out, _ = normtheory("run", "quickstart", "--help", cwd=tmp_path)
    assert code == 0
    assert "--trainer.max_epochs" in out


def test_a_misspelled_option_is_refused(tmp_path):
    code, _, err = normtheory("run", "quickstart", "--trainer.max_epochz=1", cwd=tmp_path)
    assert code == 2
    assert "--trainer.max_epochz" in err
    assert "normtheory run quickstart --help" in err


@pytest.mark.slow
def test_a_run_can_be_resumed(tmp_path):
    small = ("run", "quickstart", "--trainer.logger=false", "--model.width=16", "--data.limit=300")
    code, _, err = normtheory(*small, "--trainer.max_epochs=1", cwd=tmp_path)
    assert code == 0, err
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    again = tmp_path / "again"
    again.mkdir()
    code, _, err = normtheory(*small, "--trainer.max_epochs=2", f"--ckpt_path={checkpoint}", cwd=again)
    assert code == 0, err
    assert sorted(rows(again)) == [1]


def test_a_misspelled_recipe_gets_the_nearest_name(capsys):
    assert main(["run", "quikstart"]) == 2
    assert "Did you mean 'quickstart'?" in capsys.readouterr().err


def test_no_recipe_named(capsys):
    with pytest.raises(SystemExit):
        main(["run"])
    assert "quickstart" in capsys.readouterr().err


def test_help_without_a_recipe(capsys):
    assert main(["run", "--help"]) == 0
    assert "recipe; see normtheory list" in capsys.readouterr().out


def test_every_recipe_opens_with_its_command(capsys):
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    for name in registry.names():
        assert registry.config_path(name).read_text().startswith(f"# normtheory run {name}\n")
        assert name in listed


def test_recipes_choose_a_device_only_for_a_reason():
    """Full-batch gradient descent cannot be shared out over the devices that Lightning finds."""
    for name in registry.names():
        config = yaml.safe_load(registry.config_path(name).read_text())
        data = config["data"]
        whole = "synthetic" in data["class_path"] or data["init_args"].get("full_batch_steps")
        assert config["trainer"].get("devices") == (1 if whole else None), name
        assert ("accelerator" in config["trainer"]) == (name == "quickstart"), name
