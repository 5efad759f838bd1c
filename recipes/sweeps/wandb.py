"""Write a grid as a W&B sweep, whose agents run it on any number of machines."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.sweeps.grid import complete

__all__ = ["write"]


def write(
    path: str | Path, name: str, grid: Mapping[str, Sequence[Any]], seeds: int | None, options: Sequence[str]
) -> None:
    """Write the configuration file of a W&B sweep with the same runs as `sweep.sweep`.

    Args:
        path: the file; it is overwritten.
        name: the recipe.
        grid: option → values; if empty, the recipe's grid.
        seeds: run each point with the seeds 0 to seeds − 1; ``None``: the recipe's number.
        options: for every run.

    Raises:
        ValueError: if there is no such recipe, or the options conflict with the grid.
    """
    texts, seeds = complete(registry.recipe(name), grid, seeds, options)
    values = {option: [_typed(value) for value in choices] for option, choices in texts.items()}
    config = {
        "name": name,
        "project": _project(name),
        "program": "normtheory",  # the agent requires one, although the command does not use it
        "method": "grid",
        "parameters": {
            option: {"values": choices} for option, choices in {**values, "seed_everything": [*range(seeds)]}.items()
        },
        "command": ["normtheory", "run", name, *options, "${args}"],
    }
    head = f"# wandb sweep {path}\n# wandb agent ID    (the first prints the ID; several agents share the runs)\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(head + yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _project(name: str) -> str:
    return registry.settings(name)["trainer"]["logger"]["init_args"]["project"]


def _typed(value: str) -> int | float | bool | str:
    """Convert numbers and booleans, for which W&B can draw axes.

    W&B writes a value on the command line as Python prints it. None and lists could not be read back from that, so they
    stay strings.

    Example:
        >>> [_typed(value) for value in ("64", "1e-3", "true", "null", "[1,null]", "007")]
        [64, 0.001, True, 'null', '[1,null]', '007']
    """
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if re.fullmatch(r"[+-]?(0|[1-9]\d*)", value):
        return int(value)
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.?\d+)([eE][+-]?\d+)?", value) and not re.match(r"[+-]?0\d", value):
        return float(value)
    return value
