"""Draw WN, Figures 1 and 2: the smallest weight norm, and the ratios R and L_t/L_{t−1}, for several widths."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from lightning_normtheory.recipes.figures.curves import along_rows
from lightning_normtheory.recipes.figures.panel import Drawing, FigurePanel, Row, nothing_to_draw
from lightning_normtheory.recipes.figures.style import colors, new_figure, style
from lightning_normtheory.record.grouping import groups
from lightning_normtheory.record.history import History, on_one_axis

__all__ = ["weightnorm"]

_NORM, _RATIO, _LOSS_RATIO = "normtheory/min_weight_norm", "normtheory/rsc_ratio", "normtheory/loss_ratio"
_CAPTION = (
    "(a) w_min, the smallest norm of a weight vector. (b) R = ‖∇L‖²/L (solid, left) and the ratio of"
    " the loss to that of the previous measurement (dashed, right)."
)


@style()
def weightnorm(runs: Sequence[History]) -> Drawing:
    """Draw (a) w_min over the epochs or steps, (b) R and the loss ratio; a curve per width."""
    runs = on_one_axis(runs)
    split = groups(runs, by=("model.width",))
    norms, ratios, loss_ratios = (
        [along_rows(group.label or "run", group.runs, metric) for group in split]
        for metric in (_NORM, _RATIO, _LOSS_RATIO)
    )
    if not any([*norms, *ratios, *loss_ratios]):
        raise nothing_to_draw("weightnorm", f"{_NORM}, {_RATIO} or {_LOSS_RATIO}", runs)
    figure, (left, right) = new_figure(2)
    table: list[Row] = []
    a, b, c = (FigurePanel(axes, name, table) for axes, name in _axes(left, right).items())
    for group, norm, ratio, loss_ratio, color in zip(split, norms, ratios, loss_ratios, colors(split)):
        a.draw(norm, color, label=group.label)
        b.draw(ratio, color)
        c.draw(loss_ratio, color, line="--")
    a.title("(a) smallest weight norm", runs[0].axis, r"$w_{\min}$")
    b.title(r"(b) $R$ (solid) and loss ratio (dashed)", runs[0].axis, r"$R = \|\nabla L\|^2 / L$")
    c.axes.set_ylabel(r"$L_t / L_{t-1}$")
    for panel in (a, b):
        panel.whole_epochs()
        panel.log_y()
    if any(ratios) and any(loss_ratios):  # draw one above the other
        b.room(above=0.8)
        c.room(below=0.8)
    a.legend_below()
    return Drawing(figure, table, _CAPTION)


def _axes(left: Axes, right: Axes) -> dict[Axes, str]:
    """Add a second vertical axis on the right."""
    twin = right.twinx()
    twin.spines["right"].set_visible(True)
    twin.grid(False)
    return {left: "w_min", right: "R", twin: "loss ratio"}
