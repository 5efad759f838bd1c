"""``torch.set_default_device`` and ``with torch.device(...)`` change nothing that is measured."""

import contextlib

import pytest
import torch
from torch import nn

from lightning_normtheory import empirical_ntk, hessian_top_eigenvalue, predictor_hessian_norm, rsc_ratio, weight_norms
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.callbacks import HessianTrace, NormTheory
from lightning_normtheory.hessian import hessian_trace

from support import lit
from support.accelerator import on_device
from support.accelerator.trainer import arguments


@contextlib.contextmanager
def set_globally(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def measured(net, x, y):
    loss, batches = nn.functional.cross_entropy, [(x, y)]
    options = {"max_hvps": 20, "batch_stats": False}
    return [
        empirical_ntk(net, x).kernel,
        empirical_ntk(net, x, directions=4).kernel,
        *(hessian_top_eigenvalue(net, loss, batches, method=m, **options).value for m in ("power", "lanczos")),
        hessian_trace(net, loss, batches, hvps=12).value,
        predictor_hessian_norm(net, x[:2], **options),
        rsc_ratio(net, loss, batches).ratio,
        *weight_norms(net).values(),
        record_forward(net, x).sources[0].constants.lipschitz,
    ]


@pytest.mark.parametrize("default", [set_globally, torch.device])
def test_functions_ask_for_no_default_device(default):
    """Tensors on "meta" have no values: any use of one fails."""
    torch.manual_seed(0)
    net = nn.Sequential(lit.weight_norm(nn.Linear(lit.FEATURES, 8)), nn.Mish(), nn.Linear(8, lit.CLASSES)).eval()
    x, y = lit.tensors(9)
    expected = measured(net, x, y)
    with default("meta"):
        found = measured(net, x, y)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(f), torch.as_tensor(e))


@on_device("cuda")
@pytest.mark.parametrize(("default", "net"), [(set_globally, "wn"), (torch.device, "bn")])
def test_a_training_is_measured_as_without_a_default_device(device, default, net, tmp_path):
    def run(context, folder):
        torch.manual_seed(0)
        callbacks = [NormTheory(on_error="raise"), HessianTrace(on_error="raise")]
        trainer = lit.trainer(callbacks, max_epochs=1, default_root_dir=folder, **arguments())
        module, data = lit.Classifier(net), lit.loader(32, shuffle=False)  # torch's sampler draws on the default device
        with context:
            trainer.fit(module, data, data)
        return {name: float(v) for name, v in trainer.callback_metrics.items() if "seconds" not in name}

    without = run(contextlib.nullcontext(), tmp_path / "without")
    assert run(default(device), tmp_path / "with") == pytest.approx(without, rel=0, abs=0, nan_ok=True)
