"""Read the options of a run from its config.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

__all__ = ["read_options"]


def read_options(config: Path) -> dict[str, Any]:
    """Return the options of a run, named as on the command line, such as ``{"model.width": 64}``.

    Raises:
        ValueError: if the file is missing or is not the config.yaml of a run.

    Example:
        >>> import tempfile
        >>> config = Path(tempfile.mkdtemp(), "config.yaml")
        >>> _ = config.write_text("model: {class_path: my.Net, init_args: {width: 8, sizes: [1, 2]}}")
        >>> read_options(config)
        {'model': 'Net', 'model.width': 8, 'model.sizes': (1, 2)}
    """
    if not config.exists():
        raise ValueError(f"Expected {config}, where `normtheory run` saves the options of a run, but it is missing.")
    try:
        return _flat(yaml.safe_load(config.read_text(encoding="utf-8")) or {})
    except (AttributeError, OSError, TypeError, UnicodeError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"Expected the options of a run in {config}, but it cannot be read: {error}") from error


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested options.

    The arguments of a class get the name of the option that holds it, whose value is the name of the class. Lists of
    classes are numbered; any other list is a value.

    Example:
        >>> _flat({"trainer": {"callbacks": [{"class_path": "NormTheory", "init_args": {"probe": 512}}]}})
        {'trainer.callbacks.0': 'NormTheory', 'trainer.callbacks.0.probe': 512}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix if key == "init_args" else f"{prefix}{key}."
        if key == "class_path":
            flat[prefix.removesuffix(".")] = str(value).split(".")[-1]
        elif isinstance(value, Mapping):
            flat.update(_flat(value, name))
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            flat.update(_flat({str(i): item for i, item in enumerate(value)}, name))
        else:
            flat[name.removesuffix(".")] = _hashable(value)
    return flat


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
