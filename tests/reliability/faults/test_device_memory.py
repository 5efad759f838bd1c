"""The memory of a device: how much measurements take, that they give it back, and that the run survives its end."""

import gc
import math
import time

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import hessian_top_eigenvalue, rsc_ratio
from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory, RSCRatio
from lightning_normtheory.callbacks.measurement.curvature import Curvature
from lightning_normtheory.hessian import hessian_trace
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.snapshot import Snapshot

from support.accelerator import device as standin
from support.accelerator import on_device
from support.accelerator import trainer as device_trainer
from support.lit import Classifier, loader, trainer
from support.measuring.full_state import full_state

NETS = {
    "weight norm": lambda: [weight_norm(nn.Linear(128, 256)), nn.Tanh(), weight_norm(nn.Linear(256, 128))],
    "plain": lambda: [nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128)],
    "batch norm": lambda: [nn.Linear(128, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 128)],
}


def model_and_batches(name, device):
    torch.manual_seed(0)
    model = nn.Sequential(*NETS[name]()).to(device)
    batches = [(torch.randn(4, 128).to(device), torch.randint(128, (4,)).to(device)) for _ in range(3)]
    return model, batches, sum(p.nbytes for p in model.parameters())


def lambda_max(model, batches, **options):
    return hessian_top_eigenvalue(model, nn.functional.cross_entropy, batches, method="lanczos", tol=1e-2, **options)


def least_peak(function):
    """Of a few calls: in some, autograd's thread lets go of the tensors of a backward pass late."""
    return min(standin.peak(function) for _ in range(4))


@on_device("cuda", "mps")
@pytest.mark.parametrize("name", NETS)
def test_the_largest_eigenvalue_takes_twelve_times_the_model_beyond_a_training_step(device, name):
    model, batches, size = model_and_batches(name, device)
    lambda_max(model, batches, max_hvps=2)
    limit = 12 * size + standin.peak(
        lambda: nn.functional.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    )
    model.zero_grad()
    assert least_peak(lambda: lambda_max(model, batches, memory="low")) <= limit
    assert least_peak(lambda: lambda_max(model, batches[:1])) <= limit


def comes_back_to(bytes):
    """Whether the allocated memory does, as soon as autograd's thread has let go of the last graph."""
    for _ in range(500):
        if torch.ops.standin.memory()[0] <= bytes:  # less, if it held one of an earlier test
            return True
        time.sleep(0.01)
    return False


@on_device("cuda", "mps")
def test_memory_is_given_back_without_the_garbage_collector(device):
    model, batches, _ = model_and_batches("weight norm", device)
    loss = nn.functional.cross_entropy
    gc.collect()
    gc.disable()
    try:
        before = torch.ops.standin.memory()[0]
        rsc_ratio(model, loss, batches)
        assert comes_back_to(before)
        lambda_max(model, batches)
        assert comes_back_to(before)
        hessian_trace(model, loss, batches)
        assert comes_back_to(before)
    finally:
        gc.enable()


@on_device("cuda", "mps")
def test_a_full_device_is_restored(device):
    """With no byte left: parameters, gradients, buffers, and those that were replaced."""
    model, batches, _ = model_and_batches("batch norm", device)
    nn.functional.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    before = full_state(model)
    snapshot = Snapshot(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[1].running_mean.add_(1)
    model[0].bias.data, model[3].weight.grad = torch.ones(256, device=device), None
    model[1].running_var = torch.ones(256, device=device)
    with standin.memory_limit(0):
        snapshot.restore()
    assert full_state(model) == before


def out_of_memory_in(function, which):
    """Let an allocation of a call fail. Return whether there were so many."""
    with standin.failing_allocation(which) as happened:
        try:
            function()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
    return happened[0]


def check_every_allocation(name, device, step):
    model, batches, _ = model_and_batches(name, device)
    loss = nn.functional.cross_entropy
    loss(model(batches[0][0]), batches[0][1]).backward()
    before = full_state(model)
    for function in (lambda: lambda_max(model, batches, max_hvps=8), lambda: rsc_ratio(model, loss, batches)):
        which = 1
        while out_of_memory_in(function, which):
            assert full_state(model) == before, which
            which += step
        assert which > 1


@on_device("cuda")
@pytest.mark.parametrize("name", ["weight norm", "batch norm"])
def test_the_model_is_the_same_after_an_allocation_that_failed(device, name):
    check_every_allocation(name, device, 61)


@pytest.mark.slow
@on_device("cuda", "mps")
@pytest.mark.parametrize("name", NETS)
def test_the_model_is_the_same_whichever_allocation_failed(device, name):
    check_every_allocation(name, device, 7)


class Scarce(pl.Callback):
    """Placed before and after the callback that measures: limits what it may allocate."""

    def __init__(self, further):
        self.further = further

    def on_train_epoch_end(self, *_):
        torch.ops.standin.set_limit(0 if self.further is None else torch.ops.standin.memory()[0] + self.further)


def fit(callbacks, folder):
    torch.manual_seed(0)
    module = Classifier("wn")
    run = trainer(callbacks, max_epochs=2, default_root_dir=folder, **device_trainer.arguments())
    run.fit(module, loader(40, 8, shuffle=False))
    metrics = {key.split("/")[-1]: float(value) for key, value in run.callback_metrics.items()}
    return [p.detach().cpu() for p in module.parameters()], metrics


@on_device("cuda", pytest.param("mps", marks=pytest.mark.slow))
@pytest.mark.parametrize("further", [0, 3000, 6000])
@pytest.mark.filterwarnings("ignore")
def test_a_fit_goes_on_when_a_measurement_runs_out_of_memory(device, further, tmp_path):
    bare, _ = fit([], tmp_path / "bare")
    weights, _ = fit([Scarce(further), NormTheory(probe=16, ntk_samples=8), Scarce(None)], tmp_path / "measured")
    assert all(map(torch.equal, bare, weights))


@on_device("cuda", "mps")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("further", "first"), [(None, "high"), (5000, "low")])
def test_graphs_are_kept_only_if_there_is_room_for_them(device, further, first, tmp_path):
    """Without an attempt that runs out of memory."""
    attempts, original = [], Curvature._on_operator

    def attempt(self, requests, memory, vectors):
        attempts.append(memory)
        return original(self, requests, memory, vectors)

    Curvature._on_operator = attempt
    try:
        fit([Scarce(further), HessianTopEigenvalue(probe=16, method="lanczos"), Scarce(None)], tmp_path)
    finally:
        Curvature._on_operator = original
    assert attempts[0] == first


@on_device("cuda")
@pytest.mark.filterwarnings("ignore")
def test_less_memory_gives_the_same_numbers(device, tmp_path):
    """λ_max under each limit, in bytes, that is enough to measure it."""
    _, enough = fit([RSCRatio(probe=16), HessianTopEigenvalue(probe=16, method="lanczos")], tmp_path / "enough")
    found = []
    for further in range(14000, 3000, -1500):
        measuring = [RSCRatio(probe=16), HessianTopEigenvalue(probe=16, method="lanczos")]
        _, metrics = fit([Scarce(further), *measuring, Scarce(None)], tmp_path / str(further))
        if math.isfinite(metrics["hessian_lambda_max"]):
            found.append(metrics)
    assert len(found) > 2
    for metrics in found:
        assert metrics["hessian_lambda_max"] == pytest.approx(enough["hessian_lambda_max"], rel=2e-3)
