"""Hessian-vector products against differences of exact gradients, on the table of models."""

import gc
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_normtheory import hessian_operator, hessian_vector_product, rsc_ratio
from lightning_normtheory.hessian import LossHessian
from lightning_normtheory.rsc import trainable_parameters
from lightning_normtheory.second_derivatives import SecondDerivativeError

from models import MODELS, WEIGHT_NORM_FORMS, Graph, Model, direction, length, parametrized_weight_norm
from oracles import difference_hessian, exact_gradient


def sum_square(output, y):
    return (output - y).square().sum() / len(output)


LOSSES = {"square": sum_square, "cross entropy": nn.functional.cross_entropy}
TABLE = pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
SHORT_LAST = [4, 3]

# Every model with its running statistics, those with a BatchNorm also with the statistics of each batch.
CASES = [
    (name, loss, train)
    for name, case in MODELS.items()
    for loss in LOSSES
    for train in ((False, True) if case.coupled else (False,))
    if loss == "square" or len(case.outputs) == 1
]


def batches_of(case: Model, loss: str = "square", sizes=SHORT_LAST, dtype=torch.float64):
    x, y = case.data(sum(sizes), dtype=dtype)
    y = case.labels(len(y)) if loss == "cross entropy" else y
    return list(zip(x.split(sizes), y.split(sizes)))


def prepared(name: str, train: bool) -> nn.Module:
    """With dropout off, as the library measures: the references run the model as it is."""
    model = MODELS[name].make().train(train)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    return model


def assembled(model, loss, batches, **options) -> torch.Tensor:
    """The matrix (p, p) of the products with all unit vectors."""
    with hessian_operator(model, loss, batches, **options) as hessian:
        return torch.stack([hessian @ column for column in torch.eye(hessian.space.size, dtype=torch.float64)], 1)


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
    """`hessian_vector_product` speaks of parameters by name, and keeps no graph."""
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


# --- What a loss may do -----------------------------------------------------------------------------------------------


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
def test_regularisers_on_lengths_directions_and_weights(form):
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

    def penalised(model):
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
        actual = assembled(model, penalised(model), batches)
        expected = assembled(by_hand, penalised(by_hand), batches)
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


# --- Bad input --------------------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 3 * gradient * ctx.saved_tensors[0] ** 2


def ones_like(model):
    return {name: torch.ones_like(p) for name, p in model.named_parameters() if p.requires_grad}


def refused(error, match, model=None, loss=sum_square, batches=None, **options):
    model = model or MODELS["mlp"].make()
    batches = batches_of(MODELS["mlp"]) if batches is None else batches
    vector = options.pop("vector", None)
    vector = ones_like(model) if vector is None else vector
    with pytest.raises(error, match=match):
        hessian_vector_product(model, loss, batches, vector, **options)


def test_bad_losses_are_refused():
    refused(ValueError, "no graph.*detach", loss=lambda output, y: sum_square(output.detach(), y))
    refused(TypeError, "loss as a tensor, but got float", loss=lambda output, y: sum_square(output, y).item())
    refused(ValueError, r"scalar loss.*shape \(4, 3\)", loss=lambda output, y: output - y)
    refused(FloatingPointError, "finite loss, but batch 0 gives nan", loss=lambda o, y: sum_square(o, y) * float("nan"))
    refused(FloatingPointError, "batch 1 gives inf", loss=lambda o, y: sum_square(o, y) / (0.0 if len(o) == 3 else 1.0))


def test_operations_without_a_second_derivative_are_named():
    # Also where autograd would keep silent and take the gradient for a constant:
    refused(SecondDerivativeError, "Cube", loss=lambda output, y: Cube.apply(output).mean())
    refused(SecondDerivativeError, "Cube", loss=lambda output, y: Cube.apply(output).square().mean())
    bag = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 3)).double()
    indices, y = torch.randint(0, 5, (4, 2)), torch.randn(4, 3, dtype=torch.float64)
    refused(SecondDerivativeError, "embedding_bag", model=bag, batches=[(indices, y)])


def test_wrong_gradients_in_disguise_are_refused():
    """Each would give a wrong number without a word."""
    inner = MODELS["mlp"].make()
    reentrant = Graph(lambda m, x: checkpoint(m.inner, x.requires_grad_(), use_reentrant=True), inner=inner)
    refused(ValueError, "use_reentrant=False", model=reentrant)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        rsc_ratio(reentrant, sum_square, batches_of(MODELS["mlp"]))
    by_hand = Graph(
        lambda m, x: x @ torch.ops.aten._weight_norm(m.layer.weight, m.layer.bias[:, None], 0).t(),
        layer=nn.Linear(4, 3),
    ).double()
    refused(SecondDerivativeError, "fused one that cannot be replaced", model=by_hand)
    in_a_dict = Graph(lambda m, x: {"logits": m.inner(x)}, inner=inner)
    refused(TypeError, "samples in front, but got dict", model=in_a_dict, loss=lambda o, y: sum_square(o["logits"], y))


def test_after_the_block_there_are_no_products():
    case = MODELS["bn"]
    for memory in ("high", "low"):
        with hessian_operator(case.make(), sum_square, batches_of(case), memory=memory) as hessian:
            hessian @ hessian.gradient
        with pytest.raises(RuntimeError, match="inside of the with block"):
            hessian @ hessian.gradient


def test_bad_models_and_vectors_are_refused():
    case = MODELS["mlp"]
    refused(TypeError, r"A single batch is written \[\(x, y\)\]", batches=batches_of(case)[0])
    refused(TypeError, "dict of tensors by the names '0.weight'.*but got Tensor", vector=torch.ones(51))
    refused(ValueError, "real parameters, but 'weight'", model=nn.Linear(4, 3, dtype=torch.complex64))
    with torch.inference_mode():
        refused(ValueError, "outside of torch.inference_mode")
    refused(ValueError, "trainable parameter", model=case.make().requires_grad_(False), vector={"0.weight": None})
    refused(ValueError, "hold none", batches=[])
    vector = ones_like(case.make())
    refused(ValueError, "'0.bias' is missing", vector={k: v for k, v in vector.items() if k != "0.bias"})
    refused(ValueError, "'bias' is not among them", vector={**vector, "bias": torch.ones(3)})
    refused(ValueError, r"shape \(6,\) for '0.bias', but got \(5,\)", vector={**vector, "0.bias": torch.ones(5)})
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
    refused(FloatingPointError, "finite", model=model)


# --- Nothing is left --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bn", "wn-hook-dim-0", "wn-parametrized-dim-0", "tied", "lstm"])
def test_nothing_is_changed(name):
    case = MODELS[name]
    model = case.make().train()
    (model(case.data()[0]) ** 2).sum().backward()
    before = {n: (id(v), v.clone()) for n, v in model.state_dict(keep_vars=True).items()}
    attributes = {n: {k: id(v) for k, v in vars(m).items() if k != "training"} for n, m in model.named_modules()}
    gradients = {n: (id(p.grad), p.grad.clone()) for n, p in model.named_parameters()}
    generators = (torch.get_rng_state(), random.getstate(), repr(np.random.get_state()))
    hessian_vector_product(model, sum_square, batches_of(case), ones_like(model))
    for n, value in model.state_dict(keep_vars=True).items():
        assert (id(value), torch.equal(value, before[n][1])) == (before[n][0], True)
    for n, p in model.named_parameters():
        assert (id(p.grad), torch.equal(p.grad, gradients[n][1])) == (gradients[n][0], True)
    assert {
        n: {k: id(v) for k, v in vars(m).items() if k != "training"} for n, m in model.named_modules()
    } == attributes
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), repr(np.random.get_state())) == generators[1:]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["bn", "wn-hook-dim-0", "wn-parametrized-dim-0"])
def test_no_tensor_outlives_the_operator(name):
    case = MODELS[name]
    model, batches = case.make(), batches_of(case)

    def live():
        hessian_vector_product(model, sum_square, batches, ones_like(model))
        assembled(model, sum_square, batches)
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    assert live() == live() == live()


def test_the_graph_is_released_without_the_garbage_collector():
    """Graphs in reference cycles would pile up between two collections."""
    case = MODELS["wn-parametrized-dim-0"]
    seen = []

    def loss(output, y):
        seen.append(weakref.ref(output))
        return sum_square(output, y)

    gc.collect()
    gc.disable()
    try:
        assembled(case.make(), loss, batches_of(case))
        assert [reference() for reference in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_graphs_are_built_once_or_for_every_product():
    case = MODELS["mlp"]
    for memory, expected in (("high", 2), ("low", 2 + 3 * 2)):
        calls = []

        def loss(output, y, calls=calls):
            calls.append(len(output))
            return sum_square(output, y)

        with hessian_operator(case.make(), loss, batches_of(case), memory=memory) as hessian:
            for _ in range(3):
                hessian @ hessian.gradient
        assert len(calls) == expected


def test_running_out_of_memory_turns_high_into_low():
    case = MODELS["wn-hook-dim-0"]
    model, (x, y) = case.make(), case.data()
    graphs_at_once = []

    def loss():
        if sum(reference() is not None for reference in graphs_at_once) >= 2:
            raise torch.cuda.OutOfMemoryError("out of memory")
        value = sum_square(model(x), y)
        graphs_at_once.append(weakref.ref(value))
        return value, len(x)

    hessian = LossHessian(trainable_parameters(model), [loss] * 3)
    product = hessian @ hessian.gradient
    with hessian_operator(model, sum_square, [(x, y)]) as expected:
        torch.testing.assert_close(product, expected @ expected.gradient)


def test_sums_of_several_processes():
    """Each process holds some of the batches; `exchange` adds up what they contribute."""
    case = MODELS["wn-parametrized-dim-0"]
    model, batches = case.make(), batches_of(case, sizes=[3, 2, 2])

    def losses(part):
        return [lambda x=x, y=y: (sum_square(model(x), y), len(x)) for x, y in part]

    others = LossHessian(trainable_parameters(model), losses(batches[2:]))
    vector = torch.linspace(-1, 1, others.space.size, dtype=torch.float64)
    others @ vector
    theirs = iter([others._collect_gradients(), others._weighted_product(vector) * 2 / 7])
    sizes = []

    def exchange(part, size):
        sizes.append(size)
        return part() + next(theirs)

    ours = LossHessian(trainable_parameters(model), losses(batches[:2]), exchange=exchange)
    with hessian_operator(model, sum_square, batches) as expected:
        torch.testing.assert_close(ours @ vector, expected @ vector)
        torch.testing.assert_close(ours.gradient, expected.gradient)
    assert sizes == [others.space.size + 1, others.space.size]


def test_batches_that_do_not_count_are_run_and_left_out():
    """A process with fewer batches than the others runs one more, so that a loss which waits for all is not alone."""
    case = MODELS["mlp"]
    model, (x, y) = case.make(), case.data()
    finite = lambda: (sum_square(3 * model(x), y), 0)  # noqa: E731
    counted = lambda: (sum_square(model(x), y), len(x))  # noqa: E731
    hessian = LossHessian(trainable_parameters(model), [counted, finite])
    with hessian_operator(model, sum_square, [(x, y)]) as expected:
        torch.testing.assert_close(hessian @ expected.gradient, expected @ expected.gradient)
    with pytest.raises(ValueError, match="at least one sample"):
        _ = LossHessian(trainable_parameters(model), [finite]).gradient


def test_parametrized_weights_inside_cached_blocks():
    """`parametrize.cached()` keeps effective weights: one from before must not stand in for ours."""
    model = nn.Sequential(parametrized_weight_norm(nn.Linear(4, 3)), nn.Tanh()).double()
    batches = batches_of(MODELS["mlp"])
    expected = assembled(model, sum_square, batches)
    with parametrize.cached():
        model(batches[0][0])
        torch.testing.assert_close(assembled(model, sum_square, batches), expected)
