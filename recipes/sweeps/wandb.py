"""The grid of a sweep as a sweep of W&B, whose agents run it on as many machines as there are."""

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
    """Write the configuration file of a W&B sweep with the runs of `sweep.sweep`.

    Args:
        path: of the file, which is replaced.
        name: of the recipe.
        grid: option → values; empty: the recipe's own.
        seeds: each point runs with the seeds 0 to seeds − 1; ``None``: as many as the recipe says.
        options: of every run.

    Raises:
        ValueError: if there is no such recipe, or the options do not go with the grid.
    """
    texts, seeds = complete(registry.recipe(name), grid, seeds, options)
    values = {option: [_typed(value) for value in those] for option, those in texts.items()}
    config = {
        "name": name,
        "project": _project(name),
        "program": "normtheory",  # the agent wants one, also where the command does without
        "method": "grid",
        "parameters": {
            option: {"values": those} for option, those in {**values, "seed_everything": [*range(seeds)]}.items()
        },
        "command": ["normtheory", "run", name, *options, "${args}"],
    }
    head = f"# wandb sweep {path}\n# wandb agent ID    (printed by the first; several agents share the runs)\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(head + yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _project(name: str) -> str:
    return registry.settings(name)["trainer"]["logger"]["init_args"]["project"]


def _typed(value: str) -> int | float | bool | str:
    """Numbers and booleans as such, which W&B can draw axes of.

    W&B writes a value on the command line as Python prints it. None and what is in lists would not be read back so,
    and stay text.

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
