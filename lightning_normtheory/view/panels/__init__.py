"""What is shown where: the panels of the dashboard and of the report, every metric in at least one of them."""

from lightning_normtheory.view.panels import bounds, geometry, training
from lightning_normtheory.view.panels.panel import Line, Panel, Role

__all__ = ["HEADLINES", "PANELS", "SECTIONS", "Line", "Panel", "Role"]

SECTIONS = ("Overview", "Optimization", "Curvature", "Kernel", "Generalization", "Layers", "BatchNorm")
# The five numbers that are shown large, and the panel that each is read from.
HEADLINES = {
    "min_weight_norm": "Smallest weight norm",
    "rsc_ratio": "Restricted strong convexity",
    "ntk_lambda_min": "Least eigenvalue of the tangent kernel",
    "hessian_lambda_max": "Sharpness and the edge of stability",
    "rademacher_bound": "Rademacher complexity",
}
PANELS: tuple[Panel, ...] = (*training.PANELS, *geometry.PANELS, *bounds.PANELS)
