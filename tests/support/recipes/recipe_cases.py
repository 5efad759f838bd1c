"""Every recipe at a size for tests, through the real command.

``cd tests && python -m support.recipes.recipe_cases`` records their losses again.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lightning_normtheory.record import jsonl

RECORDED = Path(__file__).with_name("recorded_losses.json")

# Options that make a run of some seconds of it.
SMALL = {
    "quickstart": ("--trainer.max_epochs=2", "--model.width=16", "--data.limit=300"),
    "wn-cifar10": ("--trainer.max_epochs=3", "--model.width=32", "--data.limit=300", "--data.batch_size=100"),
    "wn-mnist": ("--trainer.max_epochs=3", "--model.width=32", "--data.limit=300", "--data.batch_size=100"),
    "rsc-width": ("--trainer.max_epochs=3", "--model.width=16", "--data.limit=64"),
    "bn-margin": ("--trainer.max_epochs=2", "--model.width=64", "--data.limit=60"),
    "bn-dyadic": ("--trainer.max_epochs=2", "--model.width=256"),
    "wn-regimes": ("--trainer.max_epochs=3", "--model.width=512", "--data.n=16"),
    "linearity-width": ("--trainer.max_epochs=3", "--model.width=100"),
    "linearity-bottleneck": ("--trainer.max_epochs=3", "--model.width=200", "--model.bottleneck=5"),
    "resnet18-bn": ("--trainer.max_epochs=2", "--model.width=4", "--data.limit=64", "--data.batch_size=32"),
    "resnet18-wn": ("--trainer.max_epochs=2", "--model.width=4", "--data.limit=64", "--data.batch_size=32"),
}


def normtheory(*arguments, cwd, **environment):
    """Run the console script without a terminal, an account or W&B variables; return code, stdout, stderr."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | environment
    command = [str(Path(sys.executable).with_name("normtheory")), *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def numbers(folder):
    """Return everything that a run measured and logged, by epoch, except times."""
    (path,) = Path(folder).rglob("normtheory.jsonl")
    found = {}
    for line in jsonl.read(path):
        if "epoch" in line:
            found.setdefault(line["epoch"], {}).update({**line["user_metrics"], **line["metrics"]})
    return [{name: row[name] for name in sorted(row) if "seconds" not in name} for row in found.values()]


def losses(rows):
    """Return the loss of every epoch, on the probe or, if that is not measured, the epoch's mean."""
    return [row.get("normtheory/loss", row.get("train_loss")) for row in rows]


def run_all(folder, names=tuple(SMALL)):
    """Run each recipe in a folder of its name, two in parallel; return code, stdout, stderr by name."""

    def one(name):
        (folder / name).mkdir(parents=True)
        return normtheory("run", name, *SMALL[name], cwd=folder / name, WANDB_MODE="disabled", OMP_NUM_THREADS="1")

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp())
    for name, (code, _, err) in run_all(place).items():
        if code:
            sys.exit(f"{name}: {err}")
    RECORDED.write_text(json.dumps({name: losses(numbers(place / name)) for name in SMALL}, indent=1) + "\n")
