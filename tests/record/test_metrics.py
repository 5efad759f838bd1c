"""The declarations of the metrics against what the callbacks log, the panels, the docstrings and the docs."""

import re
import tempfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory import callbacks
from lightning_normtheory.callbacks import HessianTopEigenvalue, HessianTrace, NormTheory, batchnorm_theory
from lightning_normtheory.norms import distance
from lightning_normtheory.record.metrics import METRICS, MetricInfo, find_error, find_metric
from lightning_normtheory.view.panels import PANELS, SECTIONS

import metrics_table
from support.lit import Classifier, Stream, loader, rows, trainer
from support.theory.theorem_cases import (
    Regression,
    dgm_network,
    paper_network,
    rsc_network,
    samples,
    two_classes,
    two_layers,
)

pytestmark = pytest.mark.filterwarnings("ignore")


class Convolution(Classifier):
    """WeightNorm on a convolution, cross-entropy, and SGD with momentum in two groups, one of them with a name."""

    def __init__(self):
        super().__init__("plain")
        layers = weight_norm(nn.Conv1d(1, 2, 3)), nn.Tanh(), nn.Flatten(), weight_norm(nn.Linear(8, 3))
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x[:, None])

    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters(), "name": "first"}, {"params": self.net[3].parameters()}]
        return torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=1e-4)


def long_directions():
    """DGM's network with α = 2, where the lengths dominate."""
    net = dgm_network(64)
    net[0].parametrizations.weight.original0.data /= 4
    return net


def few_entries():
    """More parameters than θ₀ is kept of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distance, "_MOST", 64)
        patch.setattr(distance, "_FEWEST", 8)
        return regression(long_directions(), samples(4))


def fit(added, module, train, validation=None):
    """The names that two epochs log, without prefix; the loggers get what the file has."""
    folder = Path(tempfile.mkdtemp(dir="."))
    made = trainer(added, max_epochs=2, default_root_dir=folder)
    made.fit(module, train, validation)
    written = {name for row in rows(folder).values() for name in row}
    assert written >= {name for name in made.callback_metrics if name.startswith("normtheory")}
    return {name.replace("normtheory_layers/", "layers/").removeprefix("normtheory/") for name in written}


def batch(data):
    return DataLoader(TensorDataset(*data), len(data[0]))


def regression(net, data, validation=None, **options):
    validation = None if validation is None else batch(validation)
    return fit([NormTheory(on_error="raise", **options)], Regression(net), batch(data), validation)


def binary(net):
    module = Regression(net, loss=nn.functional.binary_cross_entropy_with_logits)
    return fit([NormTheory(on_error="raise")], module, batch(two_classes()))


def wide_enough():
    """BN's theorem asks for astronomical widths: here it is content with any."""
    theorem = batchnorm_theory.batchnorm_theorem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            batchnorm_theory, "batchnorm_theorem", lambda **at: theorem(**at)._replace(width_ok=True, error_bound=0.5)
        )
        net = two_layers()
        net[1].bias.requires_grad_(False)  # keeps the form
        return binary(net)


def all_with_predictor(module, train, validation=None, **options):
    more = [HessianTopEigenvalue(predictor_samples=4, on_error="raise"), HessianTrace(layers=True, on_error="raise")]
    return fit([NormTheory(on_error="raise", **options), *more], module, train, validation)


CASES = {
    "WN's own form": lambda: regression(paper_network(8, 2, 2.0), samples(), samples(8, seed=1)),
    "RSC's own form": lambda: regression(rsc_network(), samples(norm=3**0.5)),
    "DGM's form": lambda: regression(dgm_network(), samples(4)),
    "DGM's form, long directions": few_entries,
    "BN's form": lambda: binary(two_layers()),
    "BN's form, wide enough": wide_enough,
    "convolution, momentum, groups": lambda: all_with_predictor(Convolution(), loader(16), loader(8), max_overhead=0.5),
    "BatchNorm, Adam": lambda: all_with_predictor(Classifier("bn-dropout"), loader(16), loader(8), ntk_directions=2),
    "no normalization, a stream": lambda: all_with_predictor(Classifier("plain"), DataLoader(Stream(16), 8)),
    "hook, few measurements": lambda: all_with_predictor(Classifier("wn-hook"), loader(16), max_overhead=1e-9),
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """What each case logs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("fits"))
        torch.manual_seed(0)
        return {case: run() for case, run in CASES.items()}


def matching(name):
    return [metric for metric in METRICS if fnmatchcase(name, metric.name)]


@pytest.mark.parametrize("case", CASES)
def test_every_logged_name_is_one_metric(logged, case):
    assert len(logged[case]) > 10
    for name in logged[case]:
        assert [metric.name for metric in matching(name)] == [find_metric(name).name], name


def test_every_metric_is_logged(logged):
    names = set().union(*logged.values())
    assert [metric.name for metric in METRICS if not any(fnmatchcase(name, metric.name) for name in names)] == []


def test_each_case_has_what_it_is_there_for(logged):
    assert "wn_alpha" in logged["WN's own form"]
    assert "generalization_gap" in logged["WN's own form"]
    assert "generalization_gap" not in logged["RSC's own form"]
    assert "rsc_threshold" in logged["RSC's own form"]
    assert "certificate_dgm_v" in logged["DGM's form"]
    assert "certificate_dgm_g" in logged["DGM's form, long directions"]
    assert "batchnorm_error_bound" not in logged["BN's form"]
    assert "hessian_edge__first" in logged["convolution, momentum, groups"]
    assert "hessian_stability_limit" not in logged["BatchNorm, Adam"]
    assert "min_weight_norm" not in logged["no normalization, a stream"]


def test_an_unknown_name_stands_for_itself():
    for name in ("no_metric_of_ours", "hessian_edge__"):
        assert find_metric(name) == MetricInfo(name, name, "", "")
        assert find_metric(name).summary == "last"


def test_the_list_is_well_formed():
    assert [name for name, n in Counter(metric.name for metric in METRICS).items() if n > 1] == []
    for metric in METRICS:
        assert metric.symbol, metric.name
        assert metric.meaning, metric.name
        assert metric.summary in ("last", "min,last", "max,last")
        assert metric.name.count("*") == metric.name.endswith("__*")
        assert (metric.kind == "flag") == metric.meaning.startswith(("1 if ", "1 in ", "1 while ")), metric.name
        assert (metric.kind == "seconds") == metric.name.endswith("seconds"), metric.name
        assert find_metric(metric.name.replace("*", "net_0")) is metric


def test_an_error_belongs_to_one_number_and_has_a_panel_of_details():
    declared = {metric.name: metric for metric in METRICS}
    details = {panel.key for panel in PANELS if panel.detail}
    errors = [metric for metric in METRICS if metric.error_of]
    assert len({metric.error_of for metric in errors}) == len(errors)
    for metric in errors:
        measured = declared[metric.error_of]
        assert measured.kind == metric.kind == "number", metric.name
        assert not measured.error_of, metric.name
        assert "*" not in metric.name or (metric.name[-3:], metric.error_of[-3:]) == ("__*", "__*"), metric.name
        assert metric.panel in details, metric.name  # the dashboard draws it there
        assert metric.panel not in (measured.panel, measured.also_in), metric.name
        name = metric.error_of.replace("*", "net_0")
        assert find_error(name) == (metric.name.replace("*", "net_0"), metric)


def test_the_errors_that_the_callbacks_log_are_declared_with_their_widths():
    widths = {metric.name: (metric.error_of, metric.band) for metric in METRICS if metric.error_of}
    assert widths["hessian_lambda_max_residual"] == ("hessian_lambda_max", 1)
    assert widths["predictor_hessian_norm_residual"] == ("predictor_hessian_norm", 1)
    assert widths["hessian_trace_error"] == ("hessian_trace", 2)
    assert widths["layers/hessian_trace_error__*"] == ("layers/hessian_trace__*", 2)
    assert widths["ntk_lambda_min_error"] == ("ntk_lambda_min", 2)
    assert widths["ntk_lambda_max_error"] == ("ntk_lambda_max", 2)


def test_every_metric_is_in_the_panels_it_names_and_every_line_is_a_metric():
    keys = {panel.key for panel in PANELS}
    assert [metric.name for metric in METRICS if metric.panel not in keys or metric.also_in not in {"", *keys}] == []
    lines = {(panel.key, line.metric) for panel in PANELS for line in panel.lines}
    named = {(key, metric.name) for metric in METRICS for key in (metric.panel, metric.also_in) if key}
    assert lines == named


@pytest.mark.parametrize("case", CASES)
def test_every_logged_name_is_in_a_panel(logged, case):
    lines = {line.metric for panel in PANELS for line in panel.lines}
    assert [name for name in logged[case] if not any(fnmatchcase(name, line) for line in lines)] == []


def test_panels_are_in_known_sections_with_titles_of_their_own():
    assert {panel.section for panel in PANELS} == set(SECTIONS)
    assert [key for key, n in Counter((panel.section, panel.title) for panel in PANELS).items() if n > 1] == []
    assert [key for key, n in Counter(panel.key for panel in PANELS).items() if n > 1] == []
    for panel in PANELS:
        assert panel.lines, panel.title
        assert panel.about, panel.title
        assert len({line.metric for line in panel.lines}) == len(panel.lines), panel.title


def mentioned(docstring):
    """The metrics that a docstring names. After a name in full, ``…_rest`` stands for one that begins like it."""
    last, found = "", set()
    for layers, full, rest in re.findall(r"``(?:normtheory(_layers)?/(\w+)|…(\w+))``", docstring):
        if full:
            last = ("layers/" if layers else "") + re.sub("__(LAYER|GROUP|THEOREM)$", "__*", full)
            found.add(last)
        else:
            ends = [at.start() for at in re.finditer("_|$", last)]
            found |= {last[:end] + re.sub("__(LAYER|GROUP|THEOREM)$", "__*", rest) for end in ends}
    return found


@pytest.mark.parametrize("name", sorted({metric.callback for metric in METRICS}))
def test_the_docstring_of_its_callback_mentions_every_metric(name):
    classes = [name] if name else ["DiagnosticCallback", "MinWeightNorm"]  # every callback logs it: any may mention it
    found = set().union(*(mentioned(getattr(callbacks, each).__doc__) for each in classes))
    assert [metric.name for metric in METRICS if metric.callback == name and metric.name not in found] == []


def test_a_docstring_that_says_less_is_noticed():
    docstring = "``normtheory/hessian_edge``, ``…_distance`` and ``normtheory_layers/weight_norm__LAYER``."
    expected = {"hessian_edge", "hessian_edge_distance", "layers/weight_norm__*"}
    assert mentioned(docstring) & {metric.name for metric in METRICS} == expected


def test_the_page_of_the_docs_is_up_to_date():
    assert metrics_table.PAGE.read_text(encoding="utf-8") == metrics_table.page(), (
        "run: python docs/tools/metrics_table.py"
    )
