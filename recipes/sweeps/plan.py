"""Plan the runs of a sweep: their names, arguments and folders."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.sweeps.grid import points

__all__ = ["PlannedRun", "fingerprint", "plan"]

_LENGTH = 80  # of the readable part of a folder name; file systems allow 255 bytes, some systems a path of 260


@dataclass(frozen=True)
class PlannedRun:
    """One point of the grid with one seed.

    Args:
        label: the point and the seed, for display.
        arguments: of ``normtheory run``, without the output folder.
        folder: exists if and only if the run is finished.
    """

    label: str
    arguments: tuple[str, ...]
    folder: Path


def plan(
    name: str, grid: Mapping[str, Sequence[str]], seeds: int, options: Sequence[str], folder: Path
) -> list[PlannedRun]:
    """List the runs of a sweep. Runs and folders do not depend on the order of the options in the grid.

    Example:
        >>> first, second = plan("quickstart", {"model.width": ["64"]}, 2, ["--data.limit=100"], Path("here"))
        >>> second.label, " ".join(second.arguments)
        ('model.width=64 seed=1', 'quickstart --data.limit=100 --model.width=64 --seed_everything=1')
        >>> second.folder.name[:-8]
        'model.width=64_seed=1_'
    """
    runs = []
    for point in points(grid):
        for seed in range(seeds):
            choice = sorted(point.items())
            label = [f"{option}={value}" for option, value in [*choice, ("seed", str(seed))]]
            chosen = [f"--{option}={value}" for option, value in choice]
            arguments = (name, *options, *chosen, f"--seed_everything={seed}")
            runs.append(PlannedRun(" ".join(label), arguments, folder / f"{_safe(label)}_{fingerprint(arguments)}"))
    return runs


def fingerprint(arguments: Sequence[str]) -> str:
    """Hash the settings of the recipe's file, the options, and the YAML or JSON files that these name: eight digits.

    Comments and the section ``recipe`` do not count: they change no run.

    Args:
        arguments: the recipe, then the options.

    Example:
        >>> fingerprint(["quickstart", "--model.width=64"]) == fingerprint(["quickstart", "--model.width=65"])
        False
    """
    name, *options = arguments
    values = [option.partition("=")[2] or option for option in options]
    files = [value for value in values if value.endswith((".yaml", ".yml", ".json")) and os.path.isfile(value)]
    contents = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
    settings = registry.settings(name)
    return hashlib.sha256(json.dumps([*arguments, settings, contents]).encode()).hexdigest()[:8]


def _safe(label: Sequence[str]) -> str:
    """Make a name that is valid in every file system.

    Example:
        >>> _safe(["data.root=C:/images", "trainer.callbacks=[a, b]"])
        'data.root=C-images_trainer.callbacks=-a-b-'
    """
    return "_".join(re.sub(r"[^\w.=+-]+", "-", part, flags=re.ASCII) for part in label)[:_LENGTH]
