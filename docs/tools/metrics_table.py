"""Write docs/metrics.md, the table of all metrics: ``python docs/tools/metrics_table.py``."""

import re
from pathlib import Path

from lightning_normtheory import callbacks
from lightning_normtheory.record.metrics import METRICS, Metric
from lightning_normtheory.view.panels import PANELS

PAGE = Path(__file__).resolve().parent.parent / "metrics.md"
CALLBACKS = (
    callbacks.MinWeightNorm,
    callbacks.RSCRatio,
    callbacks.HessianTopEigenvalue,
    callbacks.NTKLeastEigenvalue,
    callbacks.RademacherBound,
    callbacks.ConvergenceCertificate,
    callbacks.BatchNormTheory,
)
HEAD = """# Metrics

Everything that the callbacks log after every n-th epoch, as far as the network allows it; `NormTheory` logs what all of
them log together, without the predictor's Hessian. `LAYER` stands for the path of a layer with underscores for dots,
`GROUP` for the name of a parameter group, and `normtheory` for the callback's `prefix=`. W&B keeps the last value of
each in the run's summary, and the extreme that is named here. The panels are those of the W&B dashboard and of the
report; the definitions are in [measuring.md](measuring.md), the papers' names in [theorems.md](theorems.md).

`python docs/tools/metrics_table.py` writes this page.
"""


def documented(callback: type) -> set[str]:
    """The names in `METRICS` that a docstring mentions. After a name in full, ``…_rest`` stands for one that begins
    like it."""
    text, last = callback.__doc__ or "", ""
    found: set[str] = set()
    for layers, full, rest in re.findall(r"``(?:normtheory(_layers)?/(\w+)|…(\w+))``", text):
        if full:
            last = ("layers/" if layers else "") + re.sub("__(LAYER|GROUP)$", "__*", full)
            found.add(last)
        else:
            ends = [at.start() for at in re.finditer("_|$", last)]
            found |= {last[:end] + re.sub("__(LAYER|GROUP)$", "__*", rest) for end in ends}
    return found & {metric.name for metric in METRICS}


def groups() -> dict[str, list[Metric]]:
    """The metrics of each callback; those that more than one has are at the end."""
    owners = {
        metric: [callback.__name__ for callback in CALLBACKS if metric.name in documented(callback)]
        for metric in METRICS
    }
    names = [*(callback.__name__ for callback in CALLBACKS), "Every callback"]
    owner = {metric: those[0] if len(those) == 1 else names[-1] for metric, those in owners.items()}
    return {name: [metric for metric in METRICS if owner[metric] == name] for name in names}


def page() -> str:
    sections = [HEAD]
    for name, metrics in groups().items():
        rows = [_row(metric) for metric in metrics]
        head = "| metric | symbol | what it is | extreme | panel |\n|---|---|---|---|---|"
        sections.append(f"## {name}\n\n" + "\n".join([head, *rows]) + "\n")
    return "\n".join(sections)


def _row(metric: Metric) -> str:
    layer = metric.name.removeprefix("layers/")
    path = f"normtheory_layers/{layer}" if layer != metric.name else f"normtheory/{layer}"
    name = path.replace("*", "LAYER" if layer != metric.name else "GROUP")
    extreme = metric.summary.removesuffix("last").rstrip(",")
    shown = [f"{p.section}: {p.title}" for p in PANELS if metric.name in {line.metric for line in p.lines}][-1]
    cells = (f"`{name}`", metric.symbol, metric.meaning, extreme, shown)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
