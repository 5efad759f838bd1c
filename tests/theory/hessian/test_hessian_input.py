"""What `hessian_vector_product` refuses, and what it says."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_normtheory import hessian_vector_product, rsc_ratio
from lightning_normtheory.autodiff.second_derivatives import SecondDerivativeError
from lightning_normtheory.hessian import hessian_operator

from support.models import MODELS, Cube, Graph, direction
from support.theory.hessian_cases import assembled, batches_of, ones_like, sum_square


def assert_refused(error, match, model=None, loss=sum_square, batches=None, **options):
    model = model or MODELS["mlp"].make()
    batches = batches_of(MODELS["mlp"]) if batches is None else batches
    vector = options.pop("vector", None)
    vector = ones_like(model) if vector is None else vector
    with pytest.raises(error, match=match):
        hessian_vector_product(model, loss, batches, vector, **options)


def test_bad_losses_are_assert_refused():
    assert_refused(ValueError, "no graph.*detach", loss=lambda output, y: sum_square(output.detach(), y))
    assert_refused(TypeError, "loss to be a tensor, but got float", loss=lambda output, y: sum_square(output, y).item())
    assert_refused(ValueError, r"scalar loss.*shape \(4, 3\)", loss=lambda output, y: output - y)
    assert_refused(
        FloatingPointError, "finite loss, but batch 0 gives nan", loss=lambda o, y: sum_square(o, y) * float("nan")
    )
    assert_refused(
        FloatingPointError, "batch 1 gives inf", loss=lambda o, y: sum_square(o, y) / (0.0 if len(o) == 3 else 1.0)
    )


def test_operations_without_a_second_derivative_are_named():
    # Also where autograd would keep silent and take the gradient for a constant:
    assert_refused(SecondDerivativeError, "Cube", loss=lambda output, y: Cube.apply(output).mean())
    assert_refused(SecondDerivativeError, "Cube", loss=lambda output, y: Cube.apply(output).square().mean())
    bag = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 3)).double()
    indices, y = torch.randint(0, 5, (4, 2)), torch.randn(4, 3, dtype=torch.float64)
    assert_refused(SecondDerivativeError, "embedding_bag", model=bag, batches=[(indices, y)])


def test_wrong_gradients_in_disguise_are_assert_refused():
    """Each would give a wrong number without a word."""
    inner = MODELS["mlp"].make()
    reentrant = Graph(lambda m, x: checkpoint(m.inner, x.requires_grad_(), use_reentrant=True), inner=inner)
    assert_refused(ValueError, "use_reentrant=False", model=reentrant)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        rsc_ratio(reentrant, sum_square, batches_of(MODELS["mlp"]))
    by_hand = Graph(
        lambda m, x: x @ torch.ops.aten._weight_norm(m.layer.weight, m.layer.bias[:, None], 0).t(),
        layer=nn.Linear(4, 3),
    ).double()
    assert_refused(SecondDerivativeError, "fused one that cannot be replaced", model=by_hand)
    in_a_dict = Graph(lambda m, x: {"logits": m.inner(x)}, inner=inner)
    assert_refused(
        TypeError, "samples in front, but got dict", model=in_a_dict, loss=lambda o, y: sum_square(o["logits"], y)
    )


def test_after_the_block_there_are_no_products():
    case = MODELS["bn"]
    for memory in ("high", "low"):
        with hessian_operator(case.make(), sum_square, batches_of(case), memory=memory) as hessian:
            hessian @ hessian.gradient
        with pytest.raises(RuntimeError, match="inside the with block"):
            hessian @ hessian.gradient


def test_bad_models_and_vectors_are_assert_refused():
    case = MODELS["mlp"]
    assert_refused(TypeError, r"Write a single batch as \[\(x, y\)\]", batches=batches_of(case)[0])
    assert_refused(TypeError, "dict of tensors by the names '0.weight'.*but got Tensor", vector=torch.ones(51))
    assert_refused(ValueError, "real parameters, but 'weight'", model=nn.Linear(4, 3, dtype=torch.complex64))
    with torch.inference_mode():
        assert_refused(ValueError, "outside of torch.inference_mode")
    assert_refused(
        ValueError, "trainable parameter", model=case.make().requires_grad_(False), vector={"0.weight": None}
    )
    assert_refused(ValueError, "hold none", batches=[])
    vector = ones_like(case.make())
    assert_refused(ValueError, "'0.bias' is missing", vector={k: v for k, v in vector.items() if k != "0.bias"})
    assert_refused(ValueError, "'bias' is not among them", vector={**vector, "bias": torch.ones(3)})
    assert_refused(ValueError, r"shape \(6,\) for '0.bias', but got \(5,\)", vector={**vector, "0.bias": torch.ones(5)})
    with pytest.raises(ValueError, match="'high' or 'low', but got 'medium'"):
        assembled(case.make(), sum_square, batches_of(case), memory="medium")
    with (
        hessian_operator(case.make(), sum_square, batches_of(case)) as hessian,
        pytest.raises(ValueError, match=r"vector of 51 entries, but got shape \(3,\)"),
    ):
        hessian @ torch.ones(3)


def test_a_zero_direction_is_not_hidden():
    """WeightNorm divides by ‖v‖ = 0."""
    model = MODELS["wn-hook-dim-0"].make()
    direction(model[0]).data[2] = 0.0
    assert_refused(FloatingPointError, "finite", model=model)
