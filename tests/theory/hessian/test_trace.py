"""The trace of the Hessian against dense Hessians: unbiased, within its error, split by layer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_normtheory.hessian import hessian_operator, hessian_trace
from lightning_normtheory.hessian.eigenvalues import leading_eigenpairs
from lightning_normtheory.hessian.operator import LossHessian
from lightning_normtheory.hessian.trace import estimate_trace
from lightning_normtheory.model.layers import layer_of_parameter

from support.models import MODELS
from support.oracles import difference_hessian
from support.theory.hessian_cases import CASES, LOSSES, assembled, batches_of, prepared, sum_square


def dense_blocks(model, hessian):
    """The trace of each layer's diagonal block."""
    owners = [layer_of_parameter(name) for name, p in model.named_parameters() if p.requires_grad for _ in p.flatten()]
    traces = {}
    for owner, entry in zip(owners, hessian.diagonal().tolist()):
        traces[owner] = traces.get(owner, 0.0) + entry
    return traces


@pytest.fixture(scope="module")
def estimates():
    """For 200 seeds spread over the table of models: the estimate, and the dense Hessian it is an estimate of."""
    found, dense = [], {}
    cases = [case.values for case in CASES if not case.marks]
    for seed in range(200):
        name, loss, train = cases[seed % len(cases)]
        model, batches = prepared(name, train), batches_of(MODELS[name], loss)
        if (name, loss, train) not in dense:
            dense[name, loss, train] = dense_blocks(model, assembled(model, LOSSES[loss], batches))
        found.append(
            (hessian_trace(model, LOSSES[loss], batches, hvps=30, layers=True, seed=seed), dense[name, loss, train])
        )
    return found


@pytest.mark.slow
def test_the_trace_lies_within_three_standard_errors(estimates):
    inside = [abs(trace.value - sum(dense.values())) <= 3 * trace.standard_error for trace, dense in estimates]
    assert sum(inside) >= 0.95 * len(inside), f"{sum(inside)} of {len(inside)}"


@pytest.mark.slow
def test_the_trace_of_each_layer_lies_within_three_standard_errors(estimates):
    inside = [
        abs(value - dense[layer]) <= 3 * error
        for trace, dense in estimates
        for layer, (value, error) in trace.layers.items()
    ]
    assert sum(inside) >= 0.95 * len(inside), f"{sum(inside)} of {len(inside)}"


@pytest.mark.slow
def test_layers_add_up_and_none_is_missing(estimates):
    for trace, dense in estimates:
        assert trace.layers.keys() == dense.keys()
        total = sum(value for value, _ in trace.layers.values())
        assert total == pytest.approx(trace.value, rel=1e-12, abs=1e-9)
        assert trace.hvps <= 30


@pytest.mark.parametrize("name", ["wn-hook-dim-0", "bn", "tied"])
def test_products_are_those_of_the_true_hessian(name):
    """Against differences of exact gradients; every unit vector is used, so that the trace is exact."""
    model, batches = prepared(name, train=True), batches_of(MODELS[name])
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    expected = difference_hessian(model, sum_square, batches)
    trace = hessian_trace(model, sum_square, batches, hvps=size)
    assert trace.hvps == size
    assert trace.value == pytest.approx(float(expected.trace()), abs=1e-7 * float(expected.norm()) * math.sqrt(size))


class Quadratic(nn.Module):
    """L = ½θᵀAθ: the Hessian is A."""

    def __init__(self, A):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(len(A), dtype=A.dtype))
        self.A = A

    def forward(self, x):
        return (self.theta @ self.A @ self.theta / 2).expand(len(x), 1)


def symmetric(spectrum, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.as_tensor(spectrum, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64, generator=generator))[0]
    return Q @ (spectrum[:, None] * Q.t())


def trace_of(A, **options):
    x = torch.zeros(1, 1, dtype=A.dtype)
    return hessian_trace(Quadratic(A), lambda output, _: output.mean(), [(x, x)], **options)


@given(seed=st.integers(0, 10**6), size=st.integers(31, 60), rank=st.integers(0, 10))
@settings(max_examples=30, deadline=None)
def test_what_the_sketch_captures_is_exact(seed, size, rank):
    """A rank of at most hvps/3, with either sign: nothing is left to estimate, and what is stated is rounding."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.zeros(size, dtype=torch.float64)
    spectrum[:rank] = torch.randn(rank, dtype=torch.float64, generator=generator)
    trace = trace_of(symmetric(spectrum, seed), hvps=30, seed=seed)
    scale = float(spectrum.abs().sum())
    assert trace.standard_error <= 1e-8 * scale
    assert abs(trace.value - float(spectrum.sum())) <= 1e-8 * scale


def test_the_estimate_is_unbiased_and_its_standard_error_is_that_of_many_draws():
    A = symmetric([10.0, -5.0, *torch.linspace(0.0, 1.0, 78).tolist()])
    draws = [trace_of(A, hvps=18, seed=seed) for seed in range(200)]
    values = torch.tensor([draw.value for draw in draws], dtype=torch.float64)
    spread = float(values.std())
    # The mean of the draws is within four of its own standard errors.
    assert abs(float(values.mean()) - float(A.trace())) <= 4 * spread / math.sqrt(len(draws))
    # The mean of squared standard errors estimates the variance, to about √(2/200) and √(2/(9·200)).
    stated = math.sqrt(sum(draw.standard_error**2 for draw in draws) / len(draws))
    assert stated == pytest.approx(spread, rel=0.2)


def test_more_products_give_a_smaller_error_than_random_signs_alone():
    """A spectrum 1/k²: Hutchinson's error with m products is √(2/m)·‖A‖_F up to the diagonal."""
    A = symmetric([1 / k**2 for k in range(1, 201)])
    errors = [trace_of(A, hvps=m).standard_error for m in (15, 30, 60, 120)]
    assert errors == sorted(errors, reverse=True)
    plain = math.sqrt(2 / 30) * float((A - A.diagonal().diag()).norm())
    assert errors[1] < plain / 10


def test_the_same_seed_gives_the_same_estimate_and_leaves_the_generators_alone():
    A = symmetric(torch.linspace(-1.0, 1.0, 50).tolist())
    state = torch.get_rng_state()
    assert trace_of(A, seed=3) == trace_of(A, seed=3)
    assert trace_of(A, seed=3).value != trace_of(A, seed=4).value
    assert torch.equal(state, torch.get_rng_state())


def test_single_precision_agrees_within_its_error():
    A = symmetric([100.0, 10.0, *torch.linspace(0.0, 1.0, 300).tolist()])
    trace = trace_of(A.float(), hvps=30)
    assert abs(trace.value - float(A.trace())) <= 3 * trace.standard_error


def test_a_linear_loss_has_the_trace_zero():
    model = nn.Linear(40, 1).double()
    x = torch.randn(3, 40, dtype=torch.float64)
    trace = hessian_trace(model, lambda output, _: output.mean(), [(x, x)], layers=True)
    assert trace == (0.0, 0.0, trace.hvps, {"weight": (0.0, 0.0)})


def test_frozen_parameters_are_not_part_of_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model[0].requires_grad_(False)
    batches = batches_of(MODELS["mlp"])
    trace = hessian_trace(model, sum_square, batches, layers=True)
    assert list(trace.layers) == ["2"]
    assert trace.value == pytest.approx(float(assembled(model, sum_square, batches).trace()))


def test_it_shares_the_graph_of_the_gradient(monkeypatch):
    """With λ_max, or with whatever else asks the same operator: the loss is differentiated once."""
    differentiated = []
    original = LossHessian._differentiate
    monkeypatch.setattr(
        LossHessian, "_differentiate", lambda self, index, *rest: differentiated.append(index) or original(self, index)
    )
    model, batches = prepared("mlp", train=False), batches_of(MODELS["mlp"])
    with hessian_operator(model, sum_square, batches) as hessian:
        leading_eigenpairs(hessian, 1, method="lanczos", which="algebraic", tol=1e-2, max_hvps=20)
        estimate_trace(hessian, 30)
    assert differentiated == list(range(len(batches)))


@pytest.mark.parametrize("hvps", [0, 11, 30.0, True, None])
def test_too_few_products_are_refused(hvps):
    with pytest.raises(ValueError, match="at least 12, but got"):
        hessian_trace(nn.Linear(2, 1), sum_square, [], hvps=hvps)
