"""Draw quantities over the epochs, one panel each."""

from collections.abc import Sequence

from lightning_normtheory.recipes.figures.curves import Curve, along_rows
from lightning_normtheory.recipes.figures.panel import Drawing, Panel, Row, nothing_to_draw
from lightning_normtheory.recipes.figures.style import BLACK, colors, new_figure, style
from lightning_normtheory.record.grouping import Group, groups
from lightning_normtheory.record.run import Run

__all__ = ["overview", "practice"]

# 2/η, and its generalization to SGD with momentum or weight decay
_EDGE, _LIMIT = "normtheory/hessian_edge", "normtheory/hessian_stability_limit"
# metric: (name in the table, title, words in the caption)
_QUANTITIES = {
    "normtheory/loss": ("loss", "loss $L$ on the probe", "the loss on the probe"),
    "train_loss": ("train loss", "training loss", "the mean training loss"),
    "val_accuracy": ("accuracy", "validation accuracy", "the accuracy on the validation set"),
    "normtheory/min_weight_norm": ("w_min", r"$w_{\min}$", "w_min, the smallest norm of a weight vector"),
    "normtheory/rsc_ratio": ("R", r"$R = \|\nabla L\|^2 / L$", "R = ‖∇L‖²/L"),
    "normtheory/hessian_lambda_max": (
        "lambda_max",
        r"$\lambda_{\max}(\nabla^2 L)$, limit of stability (dashed)",
        "λ_max of the Hessian with the stability limit of the next step (dashed where finite; 2/η, or 2(1 + β)/η with "
        "momentum β)",
    ),
    "normtheory/ntk_lambda_min": (
        "lambda_min(K)",
        r"$\lambda_{\min}(K)$",
        "λ_min of the tangent kernel K",
    ),
}
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
def overview(runs: Sequence[Run]) -> Drawing:
    """Draw loss, w_min, R, λ_max with its limit and λ_min(K) over the epochs, one curve per varied setting."""
    return _over_epochs("overview", runs, _OVERVIEW, by=())


@style()
def practice(runs: Sequence[Run]) -> Drawing:
    """Draw training loss, accuracy, w_min, λ_max with its limit, λ_min(K) and R over the epochs, one curve per norm."""
    return _over_epochs("practice", runs, _PRACTICE, by=("model.norm",))


def _over_epochs(figure_name: str, runs: Sequence[Run], metrics: Sequence[str], by: Sequence[str]) -> Drawing:
    split = groups(runs, by=by)
    found = {metric: [along_rows(group.label or "run", group.runs, metric) for group in split] for metric in metrics}
    shown = {metric: curves for metric, curves in found.items() if any(curves)}
    if not shown:
        raise nothing_to_draw(figure_name, f"one of {', '.join(metrics)}", runs)
    figure, axes = new_figure(len(shown))
    table: list[Row] = []
    panels: list[Panel] = []
    for letter, place, (metric, curves) in zip("abcdef", axes, shown.items()):
        name, title, _ = _QUANTITIES[metric]
        panel = Panel(place, name, table)
        for group, curve, color in zip(split, curves, colors(split)):
            panel.draw(curve, color, label=group.label)
        if metric.endswith("hessian_lambda_max"):
            _draw_edges(panel, split)
        panel.title(f"({letter}) {title}", "epoch")
        panel.whole_epochs()
        panel.log_y()
        panels.append(panel)
    panels[0].legend_below()
    parts = "; ".join(f"({letter}) {_QUANTITIES[metric][2]}" for letter, metric in zip("abcdef", shown))
    return Drawing(figure, table, f"After each epoch: {parts}.")


def _draw_edges(panel: Panel, split: Sequence[Group]) -> None:
    """Draw the stability limit, as a single line if it is the same for all runs."""
    edges = [
        along_rows(group.named("limit"), group.runs, _LIMIT) or along_rows(group.named("limit"), group.runs, _EDGE)
        for group in split
    ]
    if len({(tuple(edge.x), tuple(edge.y)) for edge in edges}) == 1:
        common = edges[0]
        panel.guide(Curve("limit", common.x, common.y, common.error, common.seeds), BLACK)
        return
    for edge, color in zip(edges, colors(split)):
        panel.guide(edge, color)
