"""The steps that long loops report."""

import pytest
import torch
from torch import nn

from lightning_normtheory import empirical_ntk, hessian_top_eigenvalue, predictor_hessian_norm
from lightning_normtheory.measuring.progress import listening, tick


def record_steps(action):
    steps = []
    with listening(steps.append):
        result = action()
    return steps, result


def test_nobody_hears_a_step_outside_of_the_block():
    steps, _ = record_steps(lambda: tick("product"))
    tick("product")
    assert steps == ["product"]


def test_an_error_ends_the_listening():
    steps = []
    with pytest.raises(RuntimeError), listening(steps.append):
        raise RuntimeError
    tick("product")
    assert steps == []


def test_both_listeners_hear_the_inner_steps():
    def both():
        inner, _ = record_steps(lambda: tick("pass"))
        tick("product")
        return inner

    outer, inner = record_steps(both)
    assert (inner, outer) == (["pass"], ["pass", "product"])


@pytest.mark.parametrize("which", ["algebraic", "smallest"])
@pytest.mark.parametrize("method", ["power", "lanczos"])
def test_every_product_with_the_hessian_is_a_step(method, which):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    batches = [(torch.randn(5, 3), torch.randn(5, 1)) for _ in range(2)]
    steps, pair = record_steps(
        lambda: hessian_top_eigenvalue(model, nn.functional.mse_loss, batches, method=method, which=which, tol=1e-2)
    )
    assert steps.count("product") == pair.hvps
    assert steps.count("batch") == len(batches)  # the gradient, which comes first


def test_every_backward_pass_of_the_kernel_is_a_step():
    n, k = 5, 3
    x = torch.randn(n, 2)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, k))
    steps, _ = record_steps(lambda: empirical_ntk(model, x, batch_stats=True, dtype=x.dtype))
    assert steps.count("pass") == n * k
    independent, _ = record_steps(lambda: empirical_ntk(model, x, batch_stats=False, dtype=x.dtype))
    assert independent.count("pass") >= k
    assert independent.count("block") >= 3  # at least one for each layer


def test_the_predictors_hessian_is_heard():
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    assert "product" in record_steps(lambda: predictor_hessian_norm(model, torch.randn(3, 2)))[0]
