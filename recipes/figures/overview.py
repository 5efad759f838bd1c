"""Draw quantities over the epochs or steps, one panel each."""

from collections.abc import Sequence

from lightning_normtheory.recipes.figures.curves import FigureCurve, along_rows
from lightning_normtheory.recipes.figures.panel import Drawing, FigurePanel, Row, nothing_to_draw
from lightning_normtheory.recipes.figures.style import BLACK, colors, new_figure, style
from lightning_normtheory.record.grouping import Group, groups
from lightning_normtheory.record.history import History, on_one_axis
from lightning_normtheory.record.metrics import find_metric

__all__ = ["overview", "practice"]

# 2/η, and its generalization to SGD with momentum or weight decay
_EDGE, _LIMIT = "normtheory/hessian_edge", "normtheory/hessian_stability_limit"
# ASCII names in the table, where the symbol is not ASCII.
_NAMES = {
    "normtheory/loss": "loss",
    "normtheory/hessian_lambda_max": "lambda_max",
    "normtheory/ntk_lambda_min": "lambda_min(K)",
}
# Metrics that the recipes' modules log: name in the table, title, caption.
_USERS = {
    "train_loss": ("train loss", "training loss", "mean training loss"),
    "val_accuracy": ("accuracy", "validation accuracy", "accuracy on the validation set"),
}
_LIMIT_CAPTION = (
    ", with the stability limit of the next step (dashed; 2/η, for momentum β 2(1 + β)/η) where it is finite"
)
_OVERVIEW = (
    "normtheory/loss",
    "normtheory/min_weight_norm",
    "normtheory/rsc_ratio",
    "normtheory/hessian_lambda_max",
    "normtheory/ntk_lambda_min",
)
_PRACTICE = (
    "train_loss",
    "val_accuracy",
    "normtheory/min_weight_norm",
    "normtheory/hessian_lambda_max",
    "normtheory/ntk_lambda_min",
    "normtheory/rsc_ratio",
)


@style()
def overview(runs: Sequence[History]) -> Drawing:
    """Draw loss, w_min, R, λ_max with its limit and λ_min(K) over the epochs, one curve per varied setting."""
    return _over_epochs("overview", runs, _OVERVIEW, by=())


@style()
def practice(runs: Sequence[History]) -> Drawing:
    """Draw training loss, accuracy, w_min, λ_max with its limit, λ_min(K) and R over the epochs, one curve per norm."""
    return _over_epochs("practice", runs, _PRACTICE, by=("model.norm",))


def _over_epochs(figure_name: str, runs: Sequence[History], metrics: Sequence[str], by: Sequence[str]) -> Drawing:
    runs = on_one_axis(runs)
    split = groups(runs, by=by)
    found = {metric: [along_rows(group.label or "run", group.runs, metric) for group in split] for metric in metrics}
    shown = {metric: curves for metric, curves in found.items() if any(curves)}
    if not shown:
        raise nothing_to_draw(figure_name, f"one of {', '.join(metrics)}", runs)
    figure, axes = new_figure(len(shown))
    table: list[Row] = []
    panels: list[FigurePanel] = []
    for letter, place, (metric, curves) in zip("abcdef", axes, shown.items()):
        name, title, _ = _texts(metric)
        panel = FigurePanel(place, name, table)
        for group, curve, color in zip(split, curves, colors(split)):
            panel.draw(curve, color, label=group.label)
        if metric.endswith("hessian_lambda_max"):
            _draw_edges(panel, split)
        panel.title(f"({letter}) {title}", runs[0].axis)
        panel.whole_epochs()
        panel.log_y()
        panels.append(panel)
    panels[0].legend_below()
    parts = "; ".join(f"({letter}) {_texts(metric)[2]}" for letter, metric in zip("abcdef", shown))
    each = "measured step" if runs[0].axis == "step" else "epoch"
    return Drawing(figure, table, f"After each {each}: {parts}.")


def _texts(metric: str) -> tuple[str, str, str]:
    """Return the name in the table, the title, and the text of the caption."""
    if metric in _USERS:
        return _USERS[metric]
    info = find_metric(metric.removeprefix("normtheory/"))
    limit = _LIMIT_CAPTION if metric.endswith("hessian_lambda_max") else ""
    return _NAMES.get(metric, info.symbol), info.tex, f"{info.symbol}, the {info.meaning}{limit}"


def _draw_edges(panel: FigurePanel, split: Sequence[Group]) -> None:
    """The limit of stability, in one line where all runs have the same steps."""
    edges = [
        along_rows(group.named("limit"), group.runs, _LIMIT) or along_rows(group.named("limit"), group.runs, _EDGE)
        for group in split
    ]
    if len({(tuple(edge.x), tuple(edge.y)) for edge in edges}) == 1:
        common = edges[0]
        panel.guide(FigureCurve("limit", common.x, common.y, common.error, common.seeds), BLACK)
        return
    for edge, color in zip(edges, colors(split)):
        panel.guide(edge, color)
