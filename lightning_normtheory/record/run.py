"""A run as it lies on the disk: its settings, and what was measured in each epoch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from lightning_normtheory.record import history, jsonl

__all__ = ["Run", "read_run"]


@dataclass(frozen=True)
class Run:
    """What a figure is drawn from.

    Args:
        folder: where its files are.
        settings: the options of the command line, such as ``{"model.width": 64, "trainer.max_epochs": 5}``.
        rows: one per measured epoch, in order: ``epoch``, ``step`` and every metric.
        source: the data that it was trained on, where it says so.

    Example:
        >>> Run(Path("runs/1"), {"model.width": 64}, [{"epoch": 0, "step": 20, "normtheory/loss": 0.9}]).settings
        {'model.width': 64}
    """

    folder: Path
    settings: dict[str, Any]
    rows: list[dict[str, float]]
    source: str = ""


def read_run(folder: Path) -> Run:
    """The run whose normtheory.jsonl is the only one below a folder, with the config.yaml beside it.

    Raises:
        ValueError: if there is not exactly one, or no config.yaml that can be read.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp(), "demo", "1")
        >>> row = {"epoch": 0, "step": 2, "metrics": {"normtheory/loss": 0.5}, "user_metrics": {"val_loss": 0.6}}
        >>> jsonl.append(folder / "normtheory.jsonl", {}, row)
        >>> _ = (folder / "config.yaml").write_text("model: {class_path: Net, init_args: {width: 8}}")
        >>> run = read_run(folder.parent)
        >>> run.settings, run.rows
        ({'model': 'Net', 'model.width': 8}, [{'epoch': 0, 'step': 2, 'val_loss': 0.6, 'normtheory/loss': 0.5}])
    """
    found = sorted(Path(folder).rglob("normtheory.jsonl"))
    if len(found) != 1:
        what = f"{len(found)}: {', '.join(str(path.parent) for path in found[:3])}" if found else "none"
        raise ValueError(
            f"Expected one normtheory.jsonl below {folder}, but there is {what}. "
            "Name the folder of one run that has measured at least one epoch."
        )
    config = found[0].with_name("config.yaml")
    if not config.exists():
        raise ValueError(f"Expected {config}, where `normtheory run` leaves the settings of a run, but it is missing.")
    try:
        settings = _flat(yaml.safe_load(config.read_text(encoding="utf-8")) or {})
    except (AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"Expected the settings of a run in {config}, but it cannot be read: {error}") from error
    source = config.with_name("source.txt")
    rows = history.merge(line for line in jsonl.read(found[0]) if "epoch" in line)
    return Run(
        config.parent,
        settings,
        [{"epoch": row.epoch, "step": row.step, **row.users, **row.metrics} for row in rows],
        source.read_text(encoding="utf-8").strip() if source.exists() else "",
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dictionary, named as on the command line.

    A class's arguments belong to whoever holds it, whose own value is the class's name. A list of classes counts by
    position; any other list is a value.

    Example:
        >>> _flat({"model": {"class_path": "my.Net", "init_args": {"width": 8, "sizes": [1, 2]}}, "seed_everything": 0})
        {'model': 'Net', 'model.width': 8, 'model.sizes': (1, 2), 'seed_everything': 0}
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
