"""The panels of the dashboard and the report. Each metric names its panel in its declaration."""

from dataclasses import replace

from lightning_normtheory.view.panels import bounds, geometry, training, weightnorm
from lightning_normtheory.view.panels.panel import Line, Panel, declared_lines

__all__ = ["HEADLINES", "PANELS", "SECTIONS", "Line", "Panel"]

SECTIONS = ("Overview", "Optimization", "Curvature", "Kernel", "Generalization", "Layers", "WeightNorm", "BatchNorm")
# The five metrics that are shown in large print.
HEADLINES = ("min_weight_norm", "rsc_ratio", "ntk_lambda_min", "hessian_lambda_max", "rademacher_bound")
PANELS: tuple[Panel, ...] = tuple(
    replace(panel, lines=declared_lines(panel.key))
    for panel in (*training.PANELS, *geometry.PANELS, *weightnorm.PANELS, *bounds.PANELS)
)
