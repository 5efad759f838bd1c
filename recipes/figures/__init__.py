"""Draw the papers' figures from runs: PNG, SVG, a CSV table of the numbers, and a caption."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_normtheory.recipes.figures.caption import caption
from lightning_normtheory.recipes.figures.linearity import linearity
from lightning_normtheory.recipes.figures.margin import dyadic, margin
from lightning_normtheory.recipes.figures.overview import overview, practice
from lightning_normtheory.recipes.figures.panel import Drawing, Row
from lightning_normtheory.recipes.figures.regimes import regimes
from lightning_normtheory.recipes.figures.rsc import rsc
from lightning_normtheory.recipes.figures.style import style
from lightning_normtheory.recipes.figures.weightnorm import weightnorm
from lightning_normtheory.recipes.recipe import Recipe
from lightning_normtheory.record.history import History

__all__ = ["FIGURES", "Drawing", "draw"]

FIGURES: Mapping[str, Callable[[Sequence[History]], Drawing]] = {
    "overview": overview,
    "weightnorm": weightnorm,
    "rsc": rsc,
    "margin": margin,
    "dyadic": dyadic,
    "regimes": regimes,
    "linearity": linearity,
    "practice": practice,
}


def draw(recipe: Recipe, name: str, runs: Sequence[History], folder: Path) -> list[Path]:
    """Draw the figure of a recipe's runs to NAME.png, NAME.svg, NAME.csv and NAME.txt, and return these paths.

    Equal runs give equal files.

    Raises:
        ValueError: if there is no such figure, no run, or no run with the metrics of the figure.

    Example:
        >>> import tempfile
        >>> from lightning_normtheory.record.history import Row
        >>> run = History(Path(), "", "", rows=[Row(0, 2, 0.0, {}, {}, {"normtheory/loss": 0.5})])
        >>> recipe = Recipe(paper="none", data="noise", time="1 s", figure="overview")
        >>> [path.name for path in draw(recipe, "demo", [run], Path(tempfile.mkdtemp()))]
        ['demo.png', 'demo.svg', 'demo.csv', 'demo.txt']
    """
    if recipe.figure not in FIGURES:
        raise ValueError(f"There is no figure {recipe.figure!r}. Set recipe.figure to one of {', '.join(FIGURES)}.")
    if not runs:
        raise ValueError(f"Expected at least one run to draw {name!r}, but got none. Did every run fail?")
    drawing = FIGURES[recipe.figure](runs)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    png, svg, table, text = (folder / f"{name}.{ending}" for ending in ("png", "svg", "csv", "txt"))
    with style():
        drawing.figure.savefig(png)
        drawing.figure.savefig(svg, metadata={"Date": None})
    _write_table(table, drawing.table)
    drawn = drawing.caption
    if any(row["error"] for row in drawing.table):
        drawn += " Bars and bands: two standard errors over the seeds."
    text.write_text(caption(recipe, name, runs, drawn), encoding="utf-8")
    return [png, svg, table, text]


def _write_table(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
