"""Write the caption of a figure: what is drawn, the settings of the runs, the result in the paper."""

import textwrap
from collections.abc import Sequence

from lightning_normtheory.recipes.recipe import Recipe
from lightning_normtheory.record.grouping import groups, named, values, varying
from lightning_normtheory.record.history import History

__all__ = ["caption"]

_SECTIONS = ("model.", "data.", "optimizer.", "lr_scheduler.")
_TRAINER = ("max_epochs", "max_steps", "precision", "gradient_clip_val", "accumulate_grad_batches")
_CALLBACK = ("probe", "samples", "ntk_samples", "ntk_outputs", "outputs")
_PLACES = ("root", "download", "num_workers")


def caption(recipe: Recipe, name: str, runs: Sequence[History], drawn: str) -> str:
    """Return paragraphs of at most 100 columns.

    Example:
        >>> from pathlib import Path
        >>> options = [{"model.width": m, "model.depth": 2, "seed_everything": s} for m in (8, 16) for s in (0, 1)]
        >>> runs = [History(Path(), "", "", options=each) for each in options]
        >>> recipe = Recipe(paper="WN, Figure 1", data="CIFAR-10", time="1 min", figure="rsc", reported="Larger.")
        >>> print(caption(recipe, "wn", runs, "(a) w_min."), end="")
        wn: WN, Figure 1, on CIFAR-10.
        <BLANKLINE>
        (a) w_min.
        <BLANKLINE>
        Varied: model.width 8, 16.
        Common: model.depth 2.
        Runs: 4, with 2 seeds for each setting (0, 1).
        <BLANKLINE>
        The paper reports: Larger.
    """
    varied = varying(runs)
    common = [key for key in runs[0].options if key not in varied and _affects_numbers(key) and _is_set(runs[0], key)]
    if any(run.source for run in runs):  # the source is exact: embedded images may have replaced the data set
        common = [key for key in common if key != "data.dataset"]
    settings = [
        *([f"Varied: {'; '.join(_all_values(runs, key) for key in varied)}."] if varied else []),
        *([f"Common: {'; '.join(_all_values(runs, key) for key in common)}."] if common else []),
        _seeds(runs),
    ]
    data = "; ".join(dict.fromkeys(run.source for run in runs if run.source)) or recipe.data
    parts = [f"{name}: {recipe.paper}, on {data}.", drawn, settings]
    parts += [f"The paper reports: {recipe.reported}"] if recipe.reported else []
    paragraphs = ["\n".join(_wrapped(line) for line in ([part] if isinstance(part, str) else part)) for part in parts]
    return "\n\n".join(paragraphs) + "\n"


def _all_values(runs: Sequence[History], key: str) -> str:
    return f"{key} {', '.join(named(value) for value in values(runs, key))}"


def _seeds(runs: Sequence[History]) -> str:
    if len(runs) == 1:
        return f"Runs: 1, with seed {named(runs[0].options.get('seed_everything'))}."
    counts = sorted({len(group.runs) for group in groups(runs)})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = ", ".join(named(seed) for seed in values(runs, "seed_everything"))
    return f"Runs: {len(runs)}, with {number} seed{'s' * (number != '1')} for each setting ({seeds})."


def _affects_numbers(key: str) -> bool:
    """Tell whether numbers depend on a setting, unlike on folders of data or on loggers."""
    last = key.split(".")[-1]
    if key.startswith("trainer.callbacks."):
        return last in _CALLBACK
    if key.startswith("trainer."):
        return last in _TRAINER
    return f"{key}.".startswith(_SECTIONS) and last not in _PLACES


def _is_set(run: History, key: str) -> bool:
    """Tell whether a value is set: None, trainer.max_steps = −1 and accumulate_grad_batches = 1 are not."""
    value = run.options[key]
    return value is not None and (key, value) not in (("trainer.max_steps", -1), ("trainer.accumulate_grad_batches", 1))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
