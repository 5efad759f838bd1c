"""`HessianTrace`: what it logs is the theory floor's, shares the graph of λ_max, and does not depend on processes."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import HessianTrace, NormTheory
from lightning_normtheory.hessian import hessian_trace
from lightning_normtheory.hessian.operator import LossHessian

from support.lit import Classifier, loader, rows, tensors, trainer

TRACE = "normtheory/hessian_trace"


def fit(callback, module, data=None, **options):
    run = trainer([callback], max_epochs=2, **options)
    run.fit(module, data or loader(shuffle=False))
    return rows(run.default_root_dir)


@pytest.mark.parametrize("net", ["wn", "wn-hook", "plain"])
def test_logged_numbers_are_those_of_the_theory_floor(net):
    torch.manual_seed(0)
    module = Classifier(net)
    row = fit(HessianTrace(hvps=40, layers=True, on_error="raise"), module)[1]
    batches = [(x.double(), y) for x, y in zip(*(part.split(8) for part in tensors()))]
    expected = hessian_trace(module.net.double(), nn.functional.cross_entropy, batches, hvps=40, layers=True)
    # The same random vectors; the fit measures in float32, on sums over 50 samples.
    assert row[TRACE] == pytest.approx(expected.value, rel=1e-3)
    assert row[f"{TRACE}_error"] == pytest.approx(expected.standard_error, rel=0.05)
    assert row[f"{TRACE}_hvps"] == expected.hvps
    for layer, (value, error) in expected.layers.items():
        name = f"net.{layer}".replace(".", "_")
        assert row[f"normtheory_layers/hessian_trace__{name}"] == pytest.approx(value, rel=1e-3, abs=1e-4)
        assert row[f"normtheory_layers/hessian_trace_error__{name}"] == pytest.approx(error, rel=0.05)


def test_norm_theory_measures_it_on_request_with_the_graph_of_the_top_eigenvalue(monkeypatch):
    made = []
    original = LossHessian.__enter__
    monkeypatch.setattr(LossHessian, "__enter__", lambda self: made.append(1) or original(self))

    def measured(folder, **options):
        torch.manual_seed(0)
        made.clear()
        return fit(NormTheory(on_error="raise", **options), Classifier("wn"), default_root_dir=folder)

    plain, with_trace = measured("plain"), measured("trace", trace_hvps=20)
    assert len(made) == 2  # an operator for each epoch
    assert all(math.isfinite(row[TRACE]) for row in with_trace.values())
    for epoch, row in plain.items():
        assert TRACE not in row
        same = {name: value for name, value in row.items() if "seconds" not in name}
        assert {name: with_trace[epoch][name] for name in same} == same


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch cannot distribute")
def test_two_processes_measure_what_one_does(tmp_path):
    x, y = tensors(40)
    data = DataLoader(TensorDataset(x.double(), y), 8)  # three batches for one, two for the other
    measured = {}
    for devices in (1, 2):
        torch.manual_seed(0)
        strategy = {"strategy": "ddp_fork", "devices": devices} if devices > 1 else {}
        callback = HessianTrace(hvps=20, layers=True, on_error="raise")
        folder = tmp_path / str(devices)
        measured[devices] = fit(callback, Classifier("wn", lr=0.0).double(), data, default_root_dir=folder, **strategy)[
            1
        ]
    for name, value in measured[1].items():
        if "seconds" not in name:
            assert measured[2][name] == pytest.approx(value, rel=1e-9), name


def test_a_failure_is_nan_and_training_goes_on():
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.current_epoch == 1 else loss

    with pytest.warns(UserWarning, match="hessian_trace failed.*finite loss"):
        found = fit(HessianTrace(), Fails("plain"))
    assert math.isfinite(found[0][TRACE])
    assert all(math.isnan(found[1][f"{TRACE}{end}"]) for end in ("", "_error", "_hvps", "_seconds"))


def test_too_few_products_are_refused_at_once():
    with pytest.raises(ValueError, match="at least 12, but got 5"):
        HessianTrace(hvps=5)
    with pytest.raises(ValueError, match="at least 12, but got 5"):
        NormTheory(trace_hvps=5)


def test_an_unknown_use_of_memory_is_refused_at_once():
    with pytest.raises(ValueError, match="memory to be 'high' or 'low', but got 'hihg'"):
        HessianTrace(memory="hihg")
