"""Hessian-vector products against differences of exact gradients, on the table of models."""

import pytest
import torch

from lightning_normtheory import hessian_vector_product
from lightning_normtheory.hessian import hessian_operator
from lightning_normtheory.model.checks import trainable_parameters

from support.models import MODELS
from support.oracles import difference_hessian, exact_gradient
from support.theory.hessian_cases import CASES, LOSSES, TABLE, assembled, batches_of, prepared, sum_square


@pytest.mark.parametrize(("name", "loss", "train"), CASES)
def test_every_product_equals_differences_of_exact_gradients(name, loss, train):
    model, batches = prepared(name, train), batches_of(MODELS[name], loss)
    actual = assembled(model, LOSSES[loss], batches)
    expected = difference_hessian(model, LOSSES[loss], batches)
    scale = expected.norm()
    # Column by column, relative to the product itself; columns that are zero up to rounding, relative to the whole.
    errors = (actual - expected).norm(dim=0) / expected.norm(dim=0).clamp_min(1e-3 * scale)
    assert errors.max() < 1e-7
    assert (actual - actual.t()).norm() < 1e-10 * scale


@pytest.mark.parametrize(("name", "loss", "train"), CASES)
def test_random_products_one_by_one(name, loss, train):
    """`hessian_vector_product` takes and returns vectors by parameter name, and keeps no graph."""
    model, batches = prepared(name, train), batches_of(MODELS[name], loss)
    parameters = trainable_parameters(model)
    generator = torch.Generator().manual_seed(1)
    vector = {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in parameters.items()}
    product = hessian_vector_product(model, LOSSES[loss], batches, vector)
    assert {n: v.shape for n, v in product.items()} == {n: p.shape for n, p in parameters.items()}
    with hessian_operator(model, LOSSES[loss], batches) as hessian:
        expected = hessian @ hessian.space.flatten(vector)
    torch.testing.assert_close(torch.cat([v.flatten() for v in product.values()]), expected, rtol=1e-12, atol=1e-13)


@TABLE
def test_the_gradient_is_a_by_product(case):
    model, batches = case.make().eval(), batches_of(case)
    with hessian_operator(model, sum_square, batches) as hessian:
        torch.testing.assert_close(hessian.gradient, exact_gradient(model, sum_square, batches), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sizes", [[7], [3, 3, 1], [1] * 7], ids=str)
@pytest.mark.parametrize("name", ["wn-hook-dim-0", "bn", "tied", "conv", "wn-shared-hook"])
def test_the_split_of_the_samples_does_not_matter(name, sizes):
    case = MODELS[name]
    model = case.make().eval()
    expected = assembled(model, sum_square, batches_of(case))
    torch.testing.assert_close(
        assembled(model, sum_square, batches_of(case, sizes=sizes)), expected, rtol=1e-11, atol=1e-13
    )


def test_batch_statistics_are_chosen_by_the_caller():
    case = MODELS["bn"]
    batches = batches_of(case)
    of_the_batch, running = (assembled(case.make().train(mode), sum_square, batches) for mode in (True, False))
    assert (of_the_batch - running).norm() > 1e-2 * running.norm()
    for model in (case.make().train(), case.make().eval()):
        assert torch.equal(assembled(model, sum_square, batches, batch_stats=True), of_the_batch)
        assert torch.equal(assembled(model, sum_square, batches, batch_stats=False), running)
        assert torch.equal(assembled(model, sum_square, batches), of_the_batch if model.training else running)


@TABLE
def test_float32_models_come_close(case):
    """Also a check of what runs in float32 only, such as fused recurrent layers."""
    exact = assembled(case.make().eval(), sum_square, batches_of(case))
    model, batches = case.make(torch.float32).eval(), batches_of(case, dtype=torch.float32)
    with hessian_operator(model, sum_square, batches) as hessian:
        for seed in range(3):
            vector = torch.randn(hessian.space.size, generator=torch.Generator().manual_seed(seed))
            assert (hessian @ vector - exact @ vector.double()).norm() < 1e-4 * exact.norm() * vector.norm()


@TABLE
def test_low_memory_gives_the_same(case):
    model, batches = case.make().eval(), batches_of(case)
    with (
        hessian_operator(model, sum_square, batches, memory="high") as high,
        hessian_operator(model, sum_square, batches, memory="low") as low,
    ):
        vector = torch.linspace(-1, 1, high.space.size, dtype=torch.float64)
        for _ in range(2):
            torch.testing.assert_close(high @ vector, low @ vector, rtol=1e-12, atol=1e-13)
            vector = high @ vector
