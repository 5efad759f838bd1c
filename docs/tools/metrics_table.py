"""Write docs/metrics.md, the table of all metrics: ``python docs/tools/metrics_table.py``."""

from pathlib import Path

from lightning_normtheory.record.metrics import METRICS, MetricInfo
from lightning_normtheory.view.panels import PANELS

PAGE = Path(__file__).resolve().parent.parent / "metrics.md"
HEAD = """# Metrics

Every metric that the callbacks log after each n-th epoch or step, if it is defined for the network. `NormTheory` logs
the metrics of all callbacks except the traces of layers; that of the whole Hessian with `trace_hvps`. In the names,
`LAYER` is the path of a layer with underscores for dots, `GROUP` is the name of a parameter group, `THEOREM` is a
theorem, such as `wn_5_1` or `dgm_4_1`, and `normtheory` is the callback's `prefix=`.
W&B keeps the last value of each metric in the run's summary, and the extreme in the table.
The last column is the panel in the W&B dashboard and in the report. [measuring.md](measuring.md) has the definitions,
[glossary.md](glossary.md) terms and short names of papers.

`python docs/tools/metrics_table.py` writes this page from `lightning_normtheory/record/catalog`.
"""
_TITLES = "| metric | symbol | meaning | kind | extreme | panel |\n|---|---|---|---|---|---|"


def page() -> str:
    """Return the text of the page."""
    sections = [HEAD]
    for callback in dict.fromkeys(metric.callback for metric in METRICS):
        rows = [_row(metric) for metric in METRICS if metric.callback == callback]
        sections.append("\n".join([f"## {callback or 'Every callback'}\n", _TITLES, *rows]) + "\n")
    return "\n".join(sections)


def _row(metric: MetricInfo) -> str:
    layer = metric.name.removeprefix("layers/")
    path = f"normtheory_layers/{layer}" if layer != metric.name else f"normtheory/{layer}"
    of_number = "THEOREM" if layer.startswith("theorem__") else "GROUP"
    name = path.replace("*", "LAYER" if layer != metric.name else of_number)
    panel = next(panel for panel in PANELS if panel.key == metric.panel)
    kind = "" if metric.kind == "number" else metric.kind
    cells = (f"`{name}`", metric.symbol, metric.meaning, kind, metric.extreme, f"{panel.section}: {panel.title}")
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
