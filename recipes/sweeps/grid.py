"""Parse the grid of a sweep: options and their values."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from lightning_normtheory.recipes.recipe import Recipe

__all__ = ["complete", "parse", "points", "text"]

_EXAMPLE = "Expected OPTION=VALUE,VALUE,... such as model.width=64,256"
_CLOSING = {"[": "]", "{": "}"}


def parse(items: Sequence[str]) -> dict[str, list[str]]:
    """Parse the options of a grid and their values, as text.

    A comma inside brackets, braces or quotes belongs to the value. Quotes around a whole value are removed.

    Raises:
        ValueError: if an item is not OPTION=VALUE,VALUE,..., or repeats an option or a value.

    Example:
        >>> parse(["model.width=64,256", "data.transforms=[a,b],null"])
        {'model.width': ['64', '256'], 'data.transforms': ['[a,b]', 'null']}
    """
    grid: dict[str, list[str]] = {}
    for item in items:
        option, equals, values = item.partition("=")
        option = option.strip()
        if not equals or not option.replace(".", "_").isidentifier():
            raise ValueError(f"{_EXAMPLE}, got {item!r}.")
        if option in grid:
            raise ValueError(f"The grid has {option} twice. Write all its values in one item: {option}=1,2,3.")
        grid[option] = [_unquote(value, item) for value in _split(values, item)]
        for value in grid[option]:
            if grid[option].count(value) > 1:
                raise ValueError(f"{item!r} has the value {value!r} twice. Remove one.")
    return grid


def points(grid: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """List every choice of one value per option; the last option changes fastest.

    Example:
        >>> points({"model.width": ["64", "256"], "data.d": ["1"]})
        [{'model.width': '64', 'data.d': '1'}, {'model.width': '256', 'data.d': '1'}]
        >>> points({})
        [{}]
    """
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def text(value: Any) -> str:
    """Format a value of a YAML file for the command line.

    Example:
        >>> [text(value) for value in (64, 1e-05, True, None, "relu", [1, None])]
        ['64', '1e-05', 'true', 'null', 'relu', '[1, null]']
    """
    return value if isinstance(value, str) else json.dumps(value)


def complete(
    recipe: Recipe, grid: Mapping[str, Sequence[Any]], seeds: int | None, options: Sequence[str]
) -> tuple[dict[str, list[str]], int]:
    """Return the grid, as text, and the number of seeds; where the user gives none, those of the recipe.

    Raises:
        ValueError: if there is no run, or the user has set an option that the sweep sets.

    Example:
        >>> recipe = Recipe(paper="", data="", time="", figure="", grid={"model.width": [64, 256]}, seeds=3)
        >>> complete(recipe, {}, None, [])
        ({'model.width': ['64', '256']}, 3)
        >>> complete(recipe, {}, None, ["--model.width", "8"])
        Traceback (most recent call last):
        ValueError: --model.width is in the grid and among the options. Remove one.
    """
    texts = {option: [text(value) for value in values] for option, values in (grid or recipe.grid).items()}
    seeds = recipe.seeds if seeds is None else seeds
    if seeds < 1:
        raise ValueError(f"Expected at least one seed, got {seeds}.")
    given = {option.partition("=")[0] for option in options}
    for option, remedy in {"seed_everything": "--seeds N takes the seeds 0 to N-1", "output": "use --output"}.items():
        if option in texts or f"--{option}" in given:
            raise ValueError(f"A sweep sets {option} of each run itself: {remedy}.")
    for option in texts:
        if f"--{option}" in given:
            raise ValueError(f"--{option} is in the grid and among the options. Remove one.")
    return texts, seeds


def _split(values: str, item: str) -> list[str]:
    """Split at commas outside brackets and quotes. As in YAML, a quote counts only at the beginning of a value."""
    parts, expected, quote, before, escaped = [""], "", "", ",", False
    for sign in values:
        if sign == "," and not expected and not quote:
            parts.append("")
            before = sign
            continue
        parts[-1] += sign
        if quote:
            if sign == quote and not escaped:
                quote, before = "", ","  # the next quote in 'it''s' continues it
            escaped = quote == '"' and sign == "\\" and not escaped
        elif sign in "\"'" and before in (",[{:" if expected else ","):
            quote = sign
        elif sign != " ":
            before = sign
            if sign in _CLOSING:
                expected = _CLOSING[sign] + expected
            elif sign in "]}":
                if not expected.startswith(sign):
                    raise ValueError(f"Unmatched {sign} in {item!r}. {_EXAMPLE}.")
                expected = expected[1:]
    if expected or quote:
        raise ValueError(f"Missing {quote or expected[0]} in {item!r}. {_EXAMPLE}.")
    return parts


def _unquote(value: str, item: str) -> str:
    value = value.strip()
    if not value:
        raise ValueError(f"Empty value in {item!r}; write '' for an empty string. {_EXAMPLE}.")
    if value[0] not in "\"'":
        return value
    try:
        unquoted = yaml.safe_load(value)
    except yaml.YAMLError:
        unquoted = None
    if not isinstance(unquoted, str):
        raise ValueError(f"The quotes in {value} of {item!r} do not enclose the whole value. {_EXAMPLE}.")
    return unquoted
