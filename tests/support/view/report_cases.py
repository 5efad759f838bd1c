"""Runs as files, for the tests of the report with and without a browser."""

import json
import math
import random
from html.parser import HTMLParser

import yaml

from lightning_normtheory.record import jsonl
from lightning_normtheory.record.history import read_histories
from lightning_normtheory.record.metrics import METRICS
from lightning_normtheory.view.html.report import write_report

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{data}}"
THEOREMS = [
    {"theorem": "WN, Theorem 5.1", "verdict": "generalized", "reasons": ["10 outputs", "‖x‖ is 3, not 1"]},
    {"theorem": "WN, Theorem 6.1", "verdict": "applies", "reasons": []},
    {"theorem": "BN, Theorem 2.1", "verdict": "does not apply", "reasons": ["no BatchNorm"]},
]


def write_run(folder, rows, *, run="demo/1", config=None, theorems=THEOREMS, settings=None, reasons=(), **header):
    """A normtheory.jsonl of `rows` (epoch → metrics; names that begin with a capital are the user's), and its path.

    With ``axis="step"`` in the header: step → metrics.

    Args:
        config: of the config.yaml beside it, if any.
        reasons: by name, of metrics that are NaN or missing in every epoch.
        header: what else the header has.
    """
    path = folder / "normtheory.jsonl"
    about = {"callback": "NormTheory", "prefix": "normtheory", "probe": 64, "loss": "training_step"}
    header = {
        "run": run,
        "versions": {"torch": "2.9"},
        "settings": {**about, "batch_stats": "as trained", **(settings or {})},
        "theorems": theorems,
        **header,
    }
    prefix = header["settings"]["prefix"]
    by_steps = header.get("axis") == "step"
    for position, metrics in rows.items():
        ours = {_full(prefix, name): value for name, value in metrics.items() if not name[0].isupper()}
        row = {
            "epoch": 0 if by_steps else position,
            "step": position if by_steps else 10 * (position + 1),
            "time": 1.7e9 + 60 * position,
            "metrics": ours,
            "user_metrics": {name: value for name, value in metrics.items() if name[0].isupper()},
            "reasons": {_full(prefix, name): why for name, why in dict(reasons).items()},
        }
        jsonl.append(path, header, row)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return path


def _full(prefix, name):
    layer = name.removeprefix("layers/")
    return f"{prefix}_layers/{layer}" if layer != name else f"{prefix}/{name}"


def report(output, *paths):
    return write_report([history for path in paths for history in read_histories(path)], output)


def awkward_rows():
    """What a plot can stumble over: gaps, infinities, signs, extremes, an epoch that is missing, a lone point."""
    nan, inf = math.nan, math.inf
    condition = [1e3, inf, 2e3, nan, 0.1 + 0.2, -inf, 1e300, 5e-324]
    return {
        epoch: {
            "loss": 2.0 / (epoch + 1),
            "min_weight_norm": 1 / 3 + epoch * 1e-9,
            "rsc_ratio": 0.5,
            "ntk_condition_number": condition[i],
            "generalization_gap": (-1) ** i * 0.01 * (i + 1),
            "generalization_bound": 1e5 * (i + 1),
            "hessian_lambda_max": 3.0 + epoch,
            "hessian_edge": 10.0,
            "rademacher_bound": 123456.789,
            "grad_norm_sq": nan,
            "certificate_alpha": -22.5 + i,
            "layers/weight_norm__net_0": 0.5 + epoch,
            "layers/weight_norm__net_2": 0.25,
            "Train_Loss": 1.5 / (epoch + 1),
            "Val_Loss": 1.6 / (epoch + 1),
            "Accuracy": 0.1 * epoch,
            **({"ntk_lambda_min": 1e-5 * (epoch + 1)} if i % 3 == 0 else {}),
        }
        for i, epoch in enumerate([0, 1, 2, 3, 5, 6, 7, 8])
    }


def sweep(folder, widths=(64, 256), seeds=(0, 1), epochs=4):
    """The paths of runs that differ in the width and the seed; λ_max crosses 2/η in the wide ones."""
    paths = []
    for width in widths:
        for seed in seeds:
            config = {"seed_everything": seed, "model": {"class_path": "my.Net", "init_args": {"width": width}}}
            rows = {
                epoch: {
                    "hessian_lambda_max": width / 64 * (1 + epoch) + 0.01 * seed,
                    "hessian_edge": 10.0,
                    "min_weight_norm": 0.5 + 0.01 * seed,
                    "layers/weight_norm__net_0": width + epoch,
                    "Val_Loss": 1.0 / (epoch + 1 + seed),
                }
                for epoch in range(epochs)
            }
            paths.append(write_run(folder / f"{width}-{seed}" / "demo" / "x", rows, run="demo/x", config=config))
    return paths


def many_runs(folder, runs=20, epochs=200):
    """Files with every metric there is."""
    names = [metric.name.replace("*", f"net_{i}") for metric in METRICS for i in range(6 if "*" in metric.name else 1)]
    numbers = random.Random(0)
    for i in range(runs):
        level = {name: numbers.lognormvariate(0, 2) for name in [*names, "Train_Loss", "Val_Loss", "Accuracy"]}
        path = folder / str(i) / "normtheory.jsonl"
        path.parent.mkdir(parents=True)
        head = {"schema": 1, "run": f"demo/{i}", "settings": {"prefix": "normtheory"}, "theorems": THEOREMS}
        lines = [json.dumps(head)]
        for epoch in range(epochs):
            level = {name: value * math.exp(numbers.gauss(0, 0.03)) for name, value in level.items()}
            ours = {_full("normtheory", name): value for name, value in level.items() if not name[0].isupper()}
            users = {name: value for name, value in level.items() if name[0].isupper()}
            row = {"epoch": epoch, "step": epoch, "time": 1.7e9 + epoch, "metrics": ours, "user_metrics": users}
            lines.append(json.dumps(row))
        path.write_text("\n".join(lines) + "\n")
        yield path


class Page(HTMLParser):
    """What a browser would make of a file: elements as (tag, attributes), the text of each, and the data."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self._open = [], {}, []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.data = json.loads(self.text_of("script", id="data"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "input", "br"):
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag):
        position = self._open.pop()
        assert self.elements[position][0] == tag, (self.elements[position], tag)

    def handle_data(self, data):
        for position in self._open:
            self.texts[position] = self.texts.get(position, "") + data

    def all(self, tag, **attributes):
        """The texts of the elements with these attributes; ``class_`` is one of several classes."""
        wanted = attributes.pop("class_", None)
        return [
            self.texts.get(i, "")
            for i, (name, found) in enumerate(self.elements)
            if name == tag
            and all(found.get(key.replace("_", "-")) == value for key, value in attributes.items())
            and (wanted is None or wanted in (found.get("class") or "").split())
        ]

    def text_of(self, tag, **attributes):
        (text,) = self.all(tag, **attributes)
        return text

    def attributes(self, tag, name):
        return [found[name] for tag_name, found in self.elements if tag_name == tag and name in found]


def one(tmp_path, rows=None, **about):
    """The page of one run."""
    return Page(report(tmp_path / "report.html", write_run(tmp_path / "run", rows or awkward_rows(), **about)))
