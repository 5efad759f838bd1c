"""The command, run as a user runs it."""

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from lightning_normtheory.callbacks import record
from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.cli import main

from lit import rows

COMMAND = [str(Path(sys.executable).with_name("normtheory"))]


def run(*arguments, cwd, **environment):
    """The console script in a process without a terminal, an account, or a say about W&B."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | environment
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout, done.stderr


def numbers(folder):
    (path,) = Path(folder).rglob("normtheory.jsonl")
    lines = [line for line in record.read(path) if "epoch" in line]
    return [
        {k: v for k, v in {**line["metrics"], **line["user_metrics"]}.items() if "seconds" not in k} for line in lines
    ]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, *run("run", "quickstart", cwd=folder)


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


def test_one_seed_gives_one_run(tmp_path):
    small = ("run", "quickstart", "--trainer.max_epochs=2", "--model.width=16", "--data.limit=300")
    results = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        code, _, err = run(*small, cwd=tmp_path / name, WANDB_MODE="disabled")
        assert code == 0, err
        results.append(numbers(tmp_path / name))
    assert results[0] == results[1]


def test_lightnings_options_are_there(tmp_path):
    options = ("--trainer.max_epochs=1", "--trainer.logger=false", "--model.depth=3", "--data.batch_size=200")
    code, out, err = run("run", "quickstart", *options, cwd=tmp_path)
    assert code == 0, err
    assert not list(tmp_path.rglob("*.wandb"))
    assert len([name for name in rows(tmp_path)[0] if "layers/weight_norm" in name]) == 3
    code, out, _ = run("run", "quickstart", "--help", cwd=tmp_path)
    assert code == 0
    assert "--trainer.max_epochs" in out


def test_a_misspelt_option_is_refused(tmp_path):
    code, _, err = run("run", "quickstart", "--trainer.max_epochz=1", cwd=tmp_path)
    assert code == 2
    assert "--trainer.max_epochz" in err
    assert "normtheory run quickstart --help" in err


def test_a_run_can_be_resumed(tmp_path):
    small = ("run", "quickstart", "--trainer.logger=false", "--model.width=16", "--data.limit=300")
    code, _, err = run(*small, "--trainer.max_epochs=1", cwd=tmp_path)
    assert code == 0, err
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    again = tmp_path / "again"
    again.mkdir()
    code, _, err = run(*small, "--trainer.max_epochs=2", f"--ckpt_path={checkpoint}", cwd=again)
    assert code == 0, err
    assert sorted(rows(again)) == [1]


def test_a_misspelt_recipe_gets_the_nearest_name(capsys):
    assert main(["run", "quikstart"]) == 2
    assert "Did you mean 'quickstart'?" in capsys.readouterr().err


def test_no_recipe_named(capsys):
    with pytest.raises(SystemExit):
        main(["run"])
    assert "quickstart" in capsys.readouterr().err


def test_help_without_a_recipe(capsys):
    assert main(["run", "--help"]) == 0
    assert "of the recipe" in capsys.readouterr().out


def test_every_recipe_opens_with_its_command(capsys):
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    for name in registry.names():
        assert registry.config_path(name).read_text().startswith(f"# normtheory run {name}\n")
        assert name in listed
