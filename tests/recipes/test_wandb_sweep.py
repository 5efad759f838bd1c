"""The grid as a sweep of W&B."""

import os
from pathlib import Path
from unittest import mock

import pytest
import yaml

from lightning_normtheory.recipes.cli import main
from lightning_normtheory.recipes.sweeps import wandb
from lightning_normtheory.recipes.sweeps.grid import parse


def expanded(path, **chosen):
    """The command that W&B's agent starts."""
    from wandb import wandb_agent

    config = yaml.safe_load(Path(path).read_text())
    environment = {"WANDB_SWEEP_ID": "s"}  # which the command `wandb agent` sets
    with mock.patch.dict(os.environ, environment), mock.patch.object(wandb_agent, "AgentProcess") as process:
        agent = wandb_agent.Agent(mock.Mock(), mock.Mock(), sweep_id="s")
        agent._sweep_command = config["command"]
        given = {name: {"value": value} for name, value in chosen.items()}
        agent._command_run({"type": "run", "run_id": "1", "program": config["program"], "args": given})
    return process.call_args.kwargs["command"]


def test_the_grid_as_a_sweep_of_wandb(capsys):
    grid = parse(["model.width=8,16", "model.lr=1e-3", "trainer.barebones=true,false", "trainer.callbacks=[],null"])
    wandb.write("w.yaml", "quickstart", grid, 2, ["--trainer.max_epochs=1", "--data.limit", "100"])
    text = Path("w.yaml").read_text()
    assert text.startswith("# wandb sweep w.yaml\n# wandb agent ID")
    config = yaml.safe_load(text)
    assert config["method"] == "grid"
    assert config["project"] == "quickstart"
    assert {option: value["values"] for option, value in config["parameters"].items()} == {
        "model.width": [8, 16],
        "model.lr": [0.001],
        "trainer.barebones": [True, False],
        "trainer.callbacks": ["[]", "null"],
        "seed_everything": [0, 1],
    }
    last = {option: value["values"][-1] for option, value in config["parameters"].items()}
    for chosen in (last, {**last, "trainer.barebones": True, "trainer.callbacks": "[]"}):
        program, *arguments = expanded("w.yaml", **chosen)
        assert program == "normtheory"
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--print_config"])
        assert caught.value.code in (0, None)
        read = yaml.safe_load(capsys.readouterr().out)
        assert read["seed_everything"] == 1
        assert read["model"]["init_args"] | {"width": 16, "lr": 0.001} == read["model"]["init_args"]
        assert read["trainer"]["max_epochs"] == 1
        assert read["trainer"]["barebones"] is chosen["trainer.barebones"]
        assert read["trainer"]["callbacks"] == yaml.safe_load(chosen["trainer.callbacks"])
        assert read["data"]["init_args"]["limit"] == 100
