"""A kernel inside `preserve_state`, whose reset it is given: the same as one that preserves the model itself."""

import pytest
import torch
from torch import nn

from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.ntk.empirical import tangent_kernel_of_batches

MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)), lambda: torch.randn(6, 5)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(12, 2)),
        lambda: torch.randint(20, (6, 3)),
    ),
}


def near_the_floor(model, x):
    """With a sample that is nearly another one, λ_min comes near its floor: the kernel is repeated in float64."""
    if x.is_floating_point():
        x[1] = x[0] + 1e-3
        return x.to(model[0].weight.dtype)
    x[1] = x[0]
    x[0, 0], x[1, 0] = 0, 1
    model[0].weight.requires_grad_(False)[:2] = torch.tensor([[1e-5], [2e-5]])
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_a_kernel_is_repeated_in_float64_from_the_models_own_parameters(name, dtype):
    torch.manual_seed(0)
    build, samples = MODELS[name]
    model = build().to(dtype)
    x = near_the_floor(model, samples())
    batches = [SampleBatch(x, len(x), len(x))]
    alone = tangent_kernel_of_batches(model, batches)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with preserve_state(model) as reset_state:
        shared = tangent_kernel_of_batches(model, batches, reset_state=reset_state)
    assert shared.dtype == alone.dtype == torch.float64
    assert shared.remark == alone.remark
    torch.testing.assert_close(shared.kernel, alone.kernel, rtol=0, atol=0)
    assert shared.lambda_min == alone.lambda_min
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {dtype}
