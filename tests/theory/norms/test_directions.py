"""The directions of WeightNorm: on any tensor of any module, and growing under gradient descent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_normtheory import hessian_top_eigenvalue, min_weight_norm, weight_norms

from support.models import (
    WEIGHT_NORM_FORMS,
    Graph,
    direction,
)
from support.oracles import difference_hessian
from support.theory.norm_cases import FORMS, trained


def squared_norms(v: torch.Tensor, dim: int | None) -> torch.Tensor:
    return v.square().sum() if dim is None else v.movedim(dim, 0).flatten(1).square().sum(1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    form=st.sampled_from(sorted(WEIGHT_NORM_FORMS)),
    dim=st.sampled_from([0, 1, None]),
    seed=st.integers(0, 1000),
    learning_rate=st.floats(1e-3, 5.0),
)
def test_gradient_descent_lets_the_directions_grow(form, dim, seed, learning_rate):
    """∇_v L ⟂ v, so ‖v(s+1)‖² = ‖v(s)‖² + η²‖∇_v L‖² (DGM, eq. (2.3)), unit by unit."""
    torch.manual_seed(seed)
    normalize = WEIGHT_NORM_FORMS[form]
    layers = [normalize(nn.Linear(3, 4).double(), dim=dim), normalize(nn.Linear(4, 2).double(), dim=dim)]
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), learning_rate)
    for _ in range(3):
        before, smallest = [squared_norms(direction(layer).detach(), dim) for layer in layers], min_weight_norm(net)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        for layer, norms in zip(layers, before):
            gradients = squared_norms(direction(layer).grad, dim)
            expected = norms + learning_rate**2 * gradients
            # ⟨v, ∇_v L⟩ is zero up to 1e-16·‖v‖‖∇_v L‖, and enters with 2η.
            tolerance = 1e-14 * float((norms + learning_rate * (norms * gradients).sqrt() + expected).max())
            torch.testing.assert_close(squared_norms(direction(layer).detach(), dim), expected, rtol=0, atol=tolerance)
        assert min_weight_norm(net) >= smallest * (1 - 1e-14)


class Kernel(nn.Module):
    """A user's layer, whose parameter has a name of its own."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return x @ self.kernel


# Layer, name of the tensor, the axis that its norms do not run over, the forward pass.
ANYWHERE = {
    "transposed conv": (lambda: nn.ConvTranspose1d(4, 3, 2), "weight", 0, lambda m, x: m.layer(x).flatten(1)),
    "transposed conv, by output": (
        lambda: nn.ConvTranspose1d(4, 3, 2),
        "weight",
        1,
        lambda m, x: m.layer(x).flatten(1),
    ),
    "lstm": (lambda: nn.LSTM(2, 3, batch_first=True), "weight_hh_l0", 0, lambda m, x: m.layer(x)[0].flatten(1)),
    "gru, one norm": (
        lambda: nn.GRU(2, 3, batch_first=True),
        "weight_ih_l0",
        None,
        lambda m, x: m.layer(x)[0].flatten(1),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(2, 1, batch_first=True),
        "in_proj_weight",
        0,
        lambda m, x: m.layer(x, x, x, need_weights=False)[0].flatten(1),
    ),
    "embedding": (lambda: nn.Embedding(5, 3), "weight", 0, lambda m, x: m.layer(x.abs().long() % 5).flatten(1)),
    "user's": (Kernel, "kernel", 1, lambda m, x: m.layer(x.mT).flatten(1)),
    "user's, one norm": (Kernel, "kernel", None, lambda m, x: m.layer(x.mT).flatten(1)),
}


@FORMS
@pytest.mark.parametrize(("build", "name", "dim", "connect"), ANYWHERE.values(), ids=ANYWHERE.keys())
def test_weight_norm_on_any_tensor_of_any_module(normalize, build, name, dim, connect):
    """Norms from the definition, λ_max from differences of exact gradients."""
    torch.manual_seed(0)
    layer = trained(normalize(build(), name, dim=dim), name)
    model = Graph(lambda m, x: m.tanh(connect(m, x)), layer=layer, tanh=nn.Tanh()).double()
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    v = direction(layer, name).detach()
    units = [v] if dim is None else list(v.unbind(dim))
    ((found, norms),) = weight_norms(model).items()
    assert found == ("layer" if name == "weight" else f"layer.{name}")
    assert norms.tolist() == pytest.approx([float(unit.square().sum().sqrt()) for unit in units])
    y = torch.zeros_like(model(x)).detach()
    hessian = difference_hessian(model, nn.functional.mse_loss, [(x, y)])
    top = hessian_top_eigenvalue(model, nn.functional.mse_loss, [(x, y)], method="lanczos", tol=1e-6, max_hvps=500)
    assert top.value == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-6)
