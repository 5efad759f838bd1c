"""Find recipes by name: one YAML file each, which begins with the commands that run it and a description."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from lightning_normtheory.recipes.recipe import Recipe
from lightning_normtheory.recipes.suggestions import did_you_mean

__all__ = ["config_path", "description", "names", "recipe", "settings"]

_FOLDER = Path(str(files(__package__))) / "configs"


def names() -> list[str]:
    """List the names of all recipes.

    Example:
        >>> "quickstart" in names()
        True
    """
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def config_path(name: str) -> Path:
    """Return the YAML file of a recipe.

    Raises:
        ValueError: if there is no recipe of that name; the message suggests the nearest one.

    Example:
        >>> config_path("quickstrat")
        Traceback (most recent call last):
        ValueError: There is no recipe 'quickstrat'. Did you mean 'quickstart'? Recipes: ...quickstart...
    """
    if name not in names():
        hint = did_you_mean(name, names())
        raise ValueError(f"There is no recipe {name!r}.{hint} Recipes: {', '.join(names())}.")
    return _FOLDER / f"{name}.yaml"


def description(name: str) -> str:
    """Return the comment at the top of a recipe, without the commands.

    Example:
        >>> description("quickstart").split(",")[0]
        'A WeightNorm tanh network on the Fashion-MNIST images included in this package'
    """
    lines = []
    for line in config_path(name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("# ").rstrip()
        if text and not text.startswith("normtheory "):
            lines.append(text)
    return " ".join(lines)


def recipe(name: str) -> Recipe:
    """Read the section ``recipe`` of a recipe's YAML file.

    Raises:
        ValueError: if the section is missing.

    Example:
        >>> recipe("quickstart").data
        'embedded Fashion-MNIST images'
    """
    config = _read(name)
    if "recipe" not in config:
        path = config_path(name)
        raise ValueError(f"{path} has no section recipe. Add one with at least paper, data, time and figure.")
    return Recipe(**config["recipe"])


def settings(name: str) -> dict[str, Any]:
    """Read all other sections: the settings of the run.

    Example:
        >>> settings("quickstart")["model"]["init_args"]["depth"]
        2
    """
    return {section: value for section, value in _read(name).items() if section != "recipe"}


def _read(name: str) -> dict[str, Any]:
    return yaml.safe_load(config_path(name).read_text(encoding="utf-8"))
