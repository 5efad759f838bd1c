"""The recipes by name: one YAML file each, which opens with the command that runs it and a description."""

import difflib
from importlib.resources import files
from pathlib import Path

__all__ = ["config_path", "description", "names"]

_FOLDER = Path(str(files(__package__))) / "configs"


def names() -> list[str]:
    """Every recipe.

    Example:
        >>> "quickstart" in names()
        True
    """
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def config_path(name: str) -> Path:
    """The YAML file of a recipe.

    Raises:
        ValueError: with the nearest name, if there is none of that name.

    Example:
        >>> config_path("quickstrat")
        Traceback (most recent call last):
        ValueError: There is no recipe 'quickstrat'. Did you mean 'quickstart'? Recipes: quickstart.
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"There is no recipe {name!r}.{hint} Recipes: {', '.join(names())}.")
    return _FOLDER / f"{name}.yaml"


def description(name: str) -> str:
    """The comment at the top of a recipe, without the command.

    Example:
        >>> description("quickstart").split(",")[0]
        'A WeightNorm tanh network on the Fashion-MNIST images that come with this package'
    """
    lines = []
    for line in config_path(name).read_text(encoding="utf-8").splitlines()[1:]:
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines).strip()
