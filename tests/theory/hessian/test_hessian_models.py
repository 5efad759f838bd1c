"""What models and losses may do: each case once gave, or could give, a wrong Hessian without a word."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_normtheory import hessian_vector_product
from lightning_normtheory.hessian import hessian_operator

from support.models import MODELS, WEIGHT_NORM_FORMS, Graph, direction, length, parametrized_weight_norm
from support.oracles import difference_hessian, exact_gradient
from support.theory.hessian_cases import assembled, batches_of, sum_square


def test_a_loss_that_is_linear_has_no_curvature():
    model = nn.Linear(4, 3).double()
    x, y = MODELS["mlp"].data()
    vector = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    product = hessian_vector_product(model, lambda output, _: output.mean(), [(x, y)], vector)
    assert all(not value.any() for value in product.values())


def test_parameters_that_enter_linearly_couple_to_the_others():
    """f = a·tanh(bx): ∂²/∂a² = 0, ∂²/∂a∂b = x/cosh²(bx)."""
    model = Graph(
        lambda m, x: m.a(m.b(x).tanh()), b=nn.Linear(1, 1, bias=False), a=nn.Linear(1, 1, bias=False)
    ).double()
    x = torch.full((1, 1), 0.7, dtype=torch.float64)
    hessian = assembled(model, lambda output, _: output.sum(), [(x, x)])
    a, b = model.a.weight.item(), model.b.weight.item()
    tanh = torch.tanh(torch.tensor(0.7 * b, dtype=torch.float64))
    slope = 1 - tanh**2
    expected = torch.tensor([[-2 * a * 0.49 * tanh * slope, 0.7 * slope], [0.7 * slope, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(hessian, expected)


@pytest.mark.parametrize("form", WEIGHT_NORM_FORMS)
def test_regularizers_on_lengths_directions_and_weights(form):
    """The same parameters, inside of the WeightNorm and beside it."""
    case = MODELS[f"wn-{form}-dim-0"]
    model, batches = case.make(), batches_of(case)

    def loss(output, y):
        v, g, w = direction(model[0]), length(model[2]), model[0].weight
        return sum_square(output, y) + v.pow(4).sum() + g.exp().sum() + (w.pow(3) * v).sum()

    actual, expected = assembled(model, loss, batches), difference_hessian(model, loss, batches)
    assert (actual - expected).norm() < 1e-7 * expected.norm()


def test_weight_norm_of_something_that_is_no_parameter():
    """A direction that is itself computed, as under a second parametrization: the whole way stays in the graph."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.v, self.g = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.rand(3, 1))

        def forward(self, x):
            return (x @ torch._weight_norm(self.v.sinh(), self.g, dim=0).t()).tanh()

    model = Twice().double()
    batches = batches_of(MODELS["mlp"])
    actual, expected = assembled(model, sum_square, batches), difference_hessian(model, sum_square, batches)
    assert (actual - expected).norm() < 1e-7 * expected.norm()


def test_weight_norms_without_gradients_inside_the_loss():
    case = MODELS["wn-hook-dim-0"]
    model, batches = case.make(), batches_of(case)

    def loss(output, y):
        with torch.no_grad():
            scale = model(torch.ones(1, 4, dtype=torch.float64)).abs().sum()
        return sum_square(output, y) * scale

    with torch.no_grad():
        scale = model(torch.ones(1, 4, dtype=torch.float64)).abs().sum()
    torch.testing.assert_close(assembled(model, loss, batches), scale * assembled(model, sum_square, batches))


def test_a_loss_with_a_gradient_inside():
    """A gradient penalty, through WeightNorm."""
    case = MODELS["wn-parametrized-dim-0"]
    model, batches = case.make(), batches_of(case)

    def penalty(output, y):
        x = y.detach().repeat(1, 2)[:, :4].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return sum_square(output, y) + slope.square().sum() / len(x)

    plain = exact_gradient(model, penalty, batches)
    with hessian_operator(model, penalty, batches) as hessian:
        torch.testing.assert_close(hessian.gradient, plain, rtol=1e-12, atol=1e-13)
        vector = torch.randn(hessian.space.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        product = hessian @ vector
    # First derivatives of the penalty hold second derivatives of the model, and these are wrong in torch itself, but
    # only in v–v: the penalty differentiates in x. So differences of its gradients are a valid reference.
    h = 1e-4
    parameters = list(model.parameters())

    def moved(t):
        start = 0
        for p in parameters:
            p.data += t * vector[start : start + p.numel()].view(p.shape)
            start += p.numel()
        return exact_gradient(model, penalty, batches)

    forward, backward = moved(h), moved(-2 * h)
    assert ((forward - backward) / (2 * h) - product).norm() < 1e-6 * product.norm()


@pytest.mark.parametrize("memory", ["high", "low"])
def test_gradient_checkpointing(memory):
    case = MODELS["wn-parametrized-dim-0"]
    plain = case.make()
    model = Graph(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=plain)
    expected = assembled(plain, sum_square, batches_of(case))
    torch.testing.assert_close(assembled(model, sum_square, batches_of(case), memory=memory), expected)


@pytest.mark.parametrize("name", ["wn-hook-dim-0", "wn-parametrized-dim-0", "bn"])
@pytest.mark.parametrize("how", ["module", "in place"])
def test_compiled_models(name, how):
    case = MODELS[name]
    model, batches = case.make().eval(), batches_of(case)
    expected = assembled(model, sum_square, batches)
    if how == "module":
        model = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
    sum_square(model(batches[0][0]), batches[0][1]).backward()  # compiled, as in a training step
    torch.testing.assert_close(assembled(model, sum_square, batches), expected)


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Tanh(), nn.Linear(6, 2)).double()
    x, y = torch.randint(0, 5, (7, 2)), torch.randn(7, 2, dtype=torch.float64)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    actual, expected = assembled(model, sum_square, batches), difference_hessian(model, sum_square, batches)
    assert (actual - expected).norm() < 1e-7 * expected.norm()


def test_mixed_dtypes_meet_in_the_wider_one():
    model = nn.Sequential(
        nn.Linear(4, 3).double(), nn.Tanh(), Graph(lambda m, x: m.inner(x.float()), inner=nn.Linear(3, 3))
    )
    x, y = MODELS["mlp"].data()
    with hessian_operator(model, sum_square, [(x, y.float())]) as hessian:
        product = hessian @ torch.ones(hessian.space.size, dtype=torch.float64)
    assert product.dtype == torch.float64
    assert product.abs().sum() > 0


class MovingAverage(nn.Module):
    """Writes into a buffer that it also reads, in place or not."""

    def __init__(self, inplace):
        super().__init__()
        self.layer, self.inplace = nn.Linear(4, 3), inplace
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x):
        h = self.layer(x)
        if self.inplace:
            self.mean.mul_(0.5).add_(h.detach().mean(0))
        else:
            self.mean = 0.5 * self.mean + h.detach().mean(0)
        return (h * self.mean).tanh()


@pytest.mark.parametrize("memory", ["high", "low"])
@pytest.mark.parametrize("inplace", [True, False])
def test_every_batch_and_every_product_finds_the_buffers_as_they_were(inplace, memory):
    torch.manual_seed(0)
    model, batches = MovingAverage(inplace).double(), batches_of(MODELS["mlp"])
    with hessian_operator(model, sum_square, batches, memory=memory) as hessian:
        vector = torch.linspace(-1, 1, hessian.space.size, dtype=torch.float64)
        assert torch.equal(hessian @ vector, hessian @ vector)
        products = hessian @ vector
    apart = torch.zeros_like(vector)
    for x, y in batches:
        with hessian_operator(model, sum_square, [(x, y)]) as hessian:
            apart += len(x) / 7 * (hessian @ vector)
    torch.testing.assert_close(products, apart, rtol=1e-12, atol=1e-13)
    assert model.mean.tolist() == [1.0] * 3


def test_a_loss_that_differentiates_with_respect_to_the_parameters():
    """A penalty on the norm of the gradient. The reference has no WeightNorm: w = g v/‖v‖ by hand."""

    def penalized(model):
        def loss(output, y):
            value = sum_square(output, y)
            gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
            return value + sum(gradient.square().sum() for gradient in gradients)

        return loss

    class ByHand(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.bias, self.g, self.v = layer.bias, length(layer), direction(layer)

        def forward(self, x):
            return nn.functional.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True), self.bias).tanh()

    batches = batches_of(MODELS["mlp"])
    for form in WEIGHT_NORM_FORMS.values():
        layer = form(nn.Linear(4, 3)).double()
        model, by_hand = nn.Sequential(layer, nn.Tanh()), ByHand(layer)
        actual = assembled(model, penalized(model), batches)
        expected = assembled(by_hand, penalized(by_hand), batches)
        torch.testing.assert_close(actual, expected)


def test_an_ensemble_under_vmap():
    """Weights inside of a transform do not say that they require a gradient."""
    layer = parametrized_weight_norm(nn.Linear(4, 3)).double()

    def ensemble(m, x):
        stacked = {name: torch.stack([p, 2 * p]) for name, p in m.layer.named_parameters()}
        return torch.vmap(lambda theta: torch.func.functional_call(m.layer, theta, (x,)))(stacked).tanh().sum(0)

    model, batches = Graph(ensemble, layer=layer), batches_of(MODELS["mlp"])
    expected = difference_hessian(model, sum_square, batches)
    assert (assembled(model, sum_square, batches) - expected).norm() < 1e-7 * expected.norm()


def test_a_length_that_is_made_anew_in_every_pass():
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.v = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return (x @ torch._weight_norm(self.v, torch.ones(3, 1, dtype=x.dtype), 0).t()).tanh()

    model, batches = Unit().double(), batches_of(MODELS["mlp"])
    expected = difference_hessian(model, sum_square, batches)
    for memory in ("high", "low"):
        assert (assembled(model, sum_square, batches, memory=memory) - expected).norm() < 1e-7 * expected.norm()


def test_weights_that_are_changed_in_place():
    def halved(m, x):
        return nn.functional.linear(x, m.layer.weight.mul_(0.5)).tanh()

    model = Graph(halved, layer=parametrized_weight_norm(nn.Linear(4, 3, bias=False)).double())
    batches = batches_of(MODELS["mlp"])
    expected = difference_hessian(model, sum_square, batches)
    assert (assembled(model, sum_square, batches) - expected).norm() < 1e-7 * expected.norm()


def test_sums_over_many_batches_of_a_half_precision_model():
    """L'' = 1 for every batch: in half precision the sum of 2000 would stop at 2048 or be off by percents."""
    model = nn.Linear(1, 1, bias=False).half()
    batch = (torch.full((1, 1), 0.5**0.5).half(), torch.zeros(1, 1).half())
    with hessian_operator(model, sum_square, [batch] * 2000) as hessian:
        assert float(hessian @ torch.ones(1)) == pytest.approx(1.0, rel=2e-3)
    weight_normed = parametrized_weight_norm(nn.Linear(1, 1, bias=False)).half()
    with hessian_operator(weight_normed, sum_square, [batch] * 5) as hessian:
        assert (hessian @ torch.tensor([1.0, 0.0])).tolist() == pytest.approx([1.0, 0.0], abs=1e-2)


def test_another_thread_trains_another_model_undisturbed():
    """The replacement for forward passes inside of a backward pass must not reach other threads."""
    model, batches = MODELS["wn-hook-dim-0"].make(), batches_of(MODELS["wn-hook-dim-0"])
    other = parametrized_weight_norm(nn.Linear(4, 3))
    found = []

    def train():
        other(torch.ones(1, 4)).sum().backward()
        found.append(direction(other).grad is not None)

    with hessian_operator(model, sum_square, batches) as hessian, hessian._weights.in_backward():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert found == [True]
    assert torch._weight_norm is torch.nn.utils.parametrizations.torch._weight_norm
    assert torch._weight_norm.__name__ == "_weight_norm"


def test_parametrized_weights_inside_cached_blocks():
    """`parametrize.cached()` keeps effective weights: one from before must not stand in for ours."""
    model = nn.Sequential(parametrized_weight_norm(nn.Linear(4, 3)), nn.Tanh()).double()
    batches = batches_of(MODELS["mlp"])
    expected = assembled(model, sum_square, batches)
    with parametrize.cached():
        model(batches[0][0])
        torch.testing.assert_close(assembled(model, sum_square, batches), expected)
