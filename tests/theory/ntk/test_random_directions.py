"""Estimates of the trace kernel from random directions: unbiased, with standard errors that are right."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_normtheory import empirical_ntk
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.ntk import strategies
from lightning_normtheory.ntk.directions import Cotangents
from lightning_normtheory.ntk.empirical import effort_for_batches
from lightning_normtheory.ntk.result import TangentKernel

from support.models import Graph
from support.oracles import dense_kernel, jacobian
from support.theory.hessian_cases import without_dropout
from support.theory.kernel_cases import KERNEL_MODELS, PARTS, SINGULAR, assert_equal

pytestmark = SINGULAR

# Dense layers, WeightNorm, convolutions, held and batch statistics of BatchNorm, tokens, parameters in the sample loop.
NETS = {
    "mlp": False,
    "conv": False,
    "wn-hook-dim-0": False,
    "wn-grouped-conv-dim-1": False,
    "bn": False,
    "bn-coupled": True,
    "tied-language-model": False,
    "prelu": False,
}
MODELS = {"bn-coupled": "bn"}


def wide(name):
    """A model of the table with more outputs, in mode train or eval, and its input."""
    case = KERNEL_MODELS[MODELS.get(name, name)]
    model = Graph(
        lambda m, x: torch.cat([f(m.inner(x)) for f in (torch.sin, torch.cos, torch.tanh, torch.square)], 1),
        inner=case.make(),
    )
    return without_dropout(model.double().train(NETS[name])), case.data()[0]


def of_signs(model, x, k, m, seed):
    """The kernels of single directions, from full Jacobians."""
    signs = Cotangents("trace", k, m, seed, torch.zeros((), dtype=torch.float64))[:]
    rows = torch.einsum("rk,nkp->rnp", signs, jacobian(model, x)[1])
    return rows @ rows.mT / k


@pytest.mark.parametrize("name", NETS)
def test_every_direction_is_that_of_the_jacobian(name):
    model, x = wide(name)
    found = empirical_ntk(model, x, directions=5, layers=True, seed=3)
    k = found.number_of_outputs
    singles = of_signs(model, x, k, 5, 3)
    torch.testing.assert_close(found.by_direction, singles, rtol=1e-10, atol=1e-10 * float(singles.abs().max()))
    torch.testing.assert_close(found.kernel, singles.mean(0), rtol=1e-10, atol=1e-10 * float(singles.abs().max()))
    assert found.coupled is NETS[name]
    assert found.directions == 5
    assert torch.equal(found.kernel, found.direction + found.length + found.rest)
    for part in PARTS[1:]:
        summed = sum(getattr(layer, part) for layer in found.layers.values())
        torch.testing.assert_close(summed, getattr(found, part), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["mlp", "wn-hook-dim-0"])
def test_as_many_directions_as_outputs_are_exact(name):
    model, x = wide(name)
    exact = empirical_ntk(model, x)
    found = empirical_ntk(model, x, directions=exact.number_of_outputs)
    assert found.directions is None
    assert torch.equal(found.kernel, exact.kernel)
    assert_equal(found, dense_kernel(model, x, "trace"))
    assert (found.trace_error, found.lambda_min_error, found.lambda_max_error) == (0.0, 0.0, 0.0)
    assert not found.kernel_error.any()


def variance_of_one(jacobians):
    """Var K(z)_ij/k² in closed form, for independent signs: Σ_{h<h'} (A_hh' + A_h'h)² with A_hh' = ⟨∇f_h, ∇f_h'⟩."""
    k = jacobians.shape[1]
    pairs = torch.einsum("ihp,jgp->ijhg", jacobians, jacobians)
    both = (pairs + pairs.mT).triu(1)
    return both.square().sum((2, 3)) / k**2


def check_seeds(name, seeds, m=4):
    model, x = wide(name)
    exact = empirical_ntk(model, x)
    found = [empirical_ntk(model, x, directions=m, seed=seed) for seed in range(seeds)]
    kernels = torch.stack([each.kernel for each in found])
    right = (variance_of_one(jacobian(model, x)[1]) / m).sqrt()
    scale = float(exact.kernel.abs().max())
    # The mean over the seeds has the error right/√seeds: none of the entries is more than 4.5 of them away.
    deviation = (kernels.mean(0) - exact.kernel).abs()
    assert bool((deviation <= 4.5 * right / seeds**0.5 + 1e-10 * scale).all())
    for part in PARTS[1:]:
        parts = torch.stack([getattr(each, part) for each in found])
        error = parts.std(0) / seeds**0.5
        assert bool(((parts.mean(0) - getattr(exact, part)).abs() <= 4.5 * error + 1e-10 * scale).all()), part
    # The squares of the stated errors are unbiased for the variance; over the seeds they scatter themselves.
    stated = torch.stack([each.kernel_error.square() for each in found])
    scatter = stated.std(0) / seeds**0.5
    assert bool(((stated.mean(0) - right.square()).abs() <= 4.5 * scatter + 1e-10 * scale**2).all())
    traces = torch.stack([each.kernel.trace() for each in found])
    errors = torch.tensor([each.trace_error for each in found]).double().square()
    ratio = errors.mean() / traces.var()
    assert 1 / 1.6 < ratio < 1.6
    # λ_min is concave, λ_max convex: on average too small and too large, up to the scatter of the averages.
    for name, sign in (("lambda_min", 1), ("lambda_max", -1)):
        excess = sign * (torch.tensor([getattr(each, name) for each in found]) - getattr(exact, name))
        assert float(excess.mean()) <= 4.5 * float(excess.std()) / seeds**0.5 + exact.floor


def test_unbiased_within_its_error():
    check_seeds("wn-hook-dim-0", 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_unbiased_within_its_error_over_many_seeds(name):
    check_seeds(name, 200)


def test_the_error_of_eigenvalues_is_that_of_their_scatter():
    """Where eigenvalues are far apart, the first order is enough."""
    torch.manual_seed(0)
    scales = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    model = nn.Sequential(nn.Linear(30, 6, bias=False), nn.Linear(6, 40, bias=False)).double()
    x = torch.linalg.qr(torch.randn(30, 4, dtype=torch.float64))[0].t() * scales.sqrt()[:, None]
    found = [empirical_ntk(model, x, directions=8, seed=seed) for seed in range(100)]
    for name in ("lambda_min", "lambda_max"):
        values = torch.tensor([getattr(each, name) for each in found])
        stated = torch.tensor([getattr(each, f"{name}_error") for each in found]).square().mean().sqrt()
        assert 1 / 1.4 < stated / values.std() < 1.4  # the scatter of 100 values is known to 7 %


def test_the_same_directions_every_time_and_no_random_number_of_the_user():
    model, x = wide("conv")
    state = torch.get_rng_state()
    first = empirical_ntk(model, x, directions=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(empirical_ntk(model, x, directions=3).kernel, first.kernel)
    assert not torch.equal(empirical_ntk(model, x, directions=3, seed=1).kernel, first.kernel)
    # More directions begin with the same ones.
    more = empirical_ntk(model, x, directions=4).by_direction[:3]
    torch.testing.assert_close(more, first.by_direction, rtol=1e-12, atol=1e-12)


def test_one_direction_has_no_error():
    model, x = wide("mlp")
    found = empirical_ntk(model, x, directions=1)
    assert found.directions == 1
    assert all(math.isnan(error) for error in (found.trace_error, found.lambda_min_error, found.lambda_max_error))
    assert found.lambda_min >= -found.floor


@pytest.mark.parametrize("options", [{"directions": 0}, {"directions": 2.0}, {"directions": 2, "outputs": "full"}])
def test_bad_directions(options):
    with pytest.raises(ValueError, match="Expected directions"):
        empirical_ntk(nn.Linear(2, 5), torch.ones(1, 2), **options)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), st.integers(1, 8), st.floats(1e-3, 1e3), st.integers(0, 9)
)
def test_positive_semidefinite_with_errors_that_are_no_numbers_below_zero(n, width, k, m, scale, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, k)).double()
    found = empirical_ntk(model, scale * torch.randn(n, 3, dtype=torch.float64), directions=m, seed=seed)
    assert found.lambda_min >= -found.floor
    errors = (found.trace_error, found.lambda_min_error, found.lambda_max_error)
    assert all(error >= 0 or (math.isnan(error) and found.directions == 1) for error in errors)
    # ‖u‖ = 1: no eigenvalue can scatter more than the whole matrix does.
    if found.directions is not None and m > 1:
        assert max(errors[1:]) <= float(found.kernel_error.norm()) * (1 + 1e-6) + 1e-12 * found.lambda_max


def test_a_rounding_error_below_the_sampling_error_is_not_reduced():
    """Near its floor an estimate is repeated in float64 only if that makes it better."""
    base = torch.diag(torch.tensor([1.0, 1e-6], dtype=torch.float64))
    options = {"outputs": "trace", "number_of_outputs": 9, "dtype": torch.float32, "parameters": 9, "lengths": 0}
    zero = torch.zeros_like(base)

    def near(singles):
        kernel = singles.mean(0)
        return TangentKernel(kernel, zero, zero, kernel, rank_limit=2, by_direction=singles, **options).near_floor

    assert near(torch.stack([base, base]))
    assert not near(torch.stack([0.5 * base, 1.5 * base]))


@pytest.fixture
def long_gradients(monkeypatch):
    """Count the gradients of small networks as those of large ones."""
    monkeypatch.setattr(strategies, "_SHORT", 0)


def chosen(k, most=12.0, *, samples=128, outputs="trace", train=False, probe=512):
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, k)).train(train)
    batches = [SampleBatch.whole(x) for x in torch.randn(samples, 4).split(32)]
    return effort_for_batches(model, batches, outputs=outputs, probe=probe, most=most)


@pytest.mark.usefixtures("long_gradients")
def test_exact_then_fewer_directions_then_fewer_samples():
    assert chosen(3)[:2] == (None, 128)
    assert chosen(1000)[:2] == (16, 128)
    found = [chosen(1000, most) for most in (6.0, 3.0, 1.5, 0.6, 0.3)]
    assert all(effort.cost <= most for effort, most in zip(found, (6.0, 3.0, 1.5, 0.6, 0.3)))
    assert all(b.directions <= a.directions and b.samples <= a.samples for a, b in itertools.pairwise(found))
    assert all(effort.samples == 128 for effort in found if effort.directions > 1)
    assert found[-1].directions == 1
    assert found[-1].samples < 128
    assert chosen(1000) == chosen(1000)


def test_cost_has_a_limit_for_any_number_of_outputs():
    assert all(chosen(k).cost <= 12.0 for k in (1, 10, 100, 1000, 10_000))


@pytest.mark.usefixtures("long_gradients")
def test_a_small_probe_has_short_gradients():
    assert chosen(50, samples=8, probe=8)[:2] != (None, 8)
    assert chosen(50, samples=8, probe=512)[:2] == (None, 8)


def test_where_a_gradient_takes_no_time_the_kernel_is_exact():
    assert chosen(50, samples=8, probe=8)[:2] == (None, 8)


@pytest.mark.usefixtures("long_gradients")
def test_samples_that_interact_take_a_pass_each():
    found = chosen(3, train=True)
    assert found.cost <= 12.0
    assert found.samples < 128


def test_what_the_user_asks_for_is_kept():
    assert chosen(1000, outputs="sum")[:2] == (None, 128)
    assert chosen(200, outputs="full")[:2] == (None, 2**14 // 200)
    with pytest.raises(ValueError, match="Use outputs='trace'"):
        chosen(20_000, outputs="full")
