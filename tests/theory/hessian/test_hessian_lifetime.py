"""Test when graphs are built, shared and freed, and that the model is left unchanged."""

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from lightning_normtheory import hessian_vector_product, rsc_ratio
from lightning_normtheory.autodiff import graph
from lightning_normtheory.hessian import hessian_operator, operator
from lightning_normtheory.hessian.operator import LossHessian
from lightning_normtheory.measuring.processes import Processes, Refusal
from lightning_normtheory.model.checks import trainable_parameters

from support.models import MODELS
from support.theory.hessian_cases import assembled, batches_of, ones_like, sum_square


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
    """Graphs in reference cycles would accumulate between two collections."""
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
    """Each process holds some of the batches; their parts are added up."""
    case = MODELS["wn-parametrized-dim-0"]
    model, batches = case.make(), batches_of(case, sizes=[3, 2, 2])

    def losses(part):
        return [lambda x=x, y=y: (sum_square(model(x), y), len(x)) for x, y in part]

    others = LossHessian(trainable_parameters(model), losses(batches[2:]))
    vector = torch.linspace(-1, 1, others.space.size, dtype=torch.float64)
    others @ vector
    theirs = iter([others._collect_gradients(), others._weighted_product(vector) * 2 / 7])
    sizes = []

    class Two(Processes):
        count = 2

        def sum(self, values):
            sizes.append(len(values))
            return values + next(theirs)

    ours = LossHessian(trainable_parameters(model), losses(batches[:2]), processes=Two())
    with hessian_operator(model, sum_square, batches) as expected:
        torch.testing.assert_close(ours @ vector, expected @ vector)
        torch.testing.assert_close(ours.gradient, expected.gradient)
    assert sizes == [others.space.size + 1, others.space.size]


def test_batches_that_do_not_count_are_run_and_left_out():
    """A process with fewer batches than the rest runs one more, so that a loss with collectives does not hang."""
    case = MODELS["mlp"]
    model, (x, y) = case.make(), case.data()
    finite = lambda: (sum_square(3 * model(x), y), 0)  # noqa: E731
    counted = lambda: (sum_square(model(x), y), len(x))  # noqa: E731
    hessian = LossHessian(trainable_parameters(model), [counted, finite])
    with hessian_operator(model, sum_square, [(x, y)]) as expected:
        torch.testing.assert_close(hessian @ expected.gradient, expected @ expected.gradient)
    with pytest.raises(ValueError, match="at least one sample"):
        _ = LossHessian(trainable_parameters(model), [finite]).gradient


class Normalizing(nn.Module):
    """Normalizes a trained weight before it uses it, in one of the ways that torch does or does not notice."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.write = nn.Linear(4, 3), nn.Linear(3, 2, bias=False), write

    def forward(self, x):
        scaled = (1 + x.square().mean()) * nn.functional.normalize(self.outer.weight.data, dim=1)
        self.write(self.outer.weight, scaled)
        return self.outer(torch.tanh(self.inner(x)))


WRITES = {
    "in place": lambda weight, value: torch.no_grad()(weight.copy_)(value),
    "past autograd": lambda weight, value: weight.data.copy_(value),
    "data replaced": lambda weight, value: setattr(weight, "data", value),
}


def dense_hessian(model, batches):
    """Each batch alone, at the weights that it sets."""
    total = 0.0
    for x, y in batches:
        model(x)
        scaled = {name: p.detach().clone() for name, p in model.named_parameters()}
        shapes = [(name, value.shape) for name, value in scaled.items()]

        def loss(theta, x=x, y=y, shapes=shapes):
            parts = theta.split([shape.numel() for _, shape in shapes])
            named = {name: part.view(shape) for (name, shape), part in zip(shapes, parts)}
            inner = torch.tanh(nn.functional.linear(x, named["inner.weight"], named["inner.bias"]))
            return sum_square(inner @ named["outer.weight"].T, y)

        flat = torch.cat([value.flatten() for value in scaled.values()])
        total = total + len(x) * torch.autograd.functional.hessian(loss, flat)
    return total / sum(len(x) for x, _ in batches)


@pytest.mark.parametrize("sizes", [[7], [3, 2, 2]], ids=str)
@pytest.mark.parametrize("memory", ["high", "low"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_model_that_writes_to_its_weights(write, memory, sizes):
    """Every graph is used at the weights that its own batch has set, although the next batch sets others."""
    model = Normalizing(write).double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batches = batches_of(MODELS["mlp"], sizes=sizes)
    batches = [(x, y[:, :2]) for x, y in batches]
    with hessian_operator(model, sum_square, batches, memory=memory) as hessian:
        columns = [hessian @ column for column in torch.eye(hessian.space.size, dtype=torch.float64)]
        names = list(hessian.space.parameters)
    assert names == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(torch.stack(columns), dense_hessian(model, batches), rtol=1e-10, atol=1e-12)


def test_processes_change_to_low_memory_together():
    """The graphs of this process are valid, but not those of another one."""
    case = MODELS["wn-parametrized-dim-0"]
    model, batches, calls = case.make(), batches_of(case, sizes=[3, 2, 2]), []

    class RefusedElsewhere(Processes):
        def run_on_all(self, action):
            calls.append(action())
            return Refusal(0) if len(calls) == 2 else calls[-1]  # the first call is the gradient

    runs = []

    def loss(x, y):
        runs.append(1)
        return sum_square(model(x), y), len(x)

    losses = [lambda x=x, y=y: loss(x, y) for x, y in batches]
    hessian = LossHessian(trainable_parameters(model), losses, processes=RefusedElsewhere())
    with hessian_operator(model, sum_square, batches) as expected:
        torch.testing.assert_close(hessian @ expected.gradient, expected @ expected.gradient)
        assert len(runs) == 6
        torch.testing.assert_close(hessian @ expected.gradient, expected @ expected.gradient)
        assert len(runs) == 9


def test_gradient_and_hessian_have_the_same_random_numbers():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    model = Noisy(4, 3).double()
    batches = batches_of(MODELS["mlp"], sizes=[3, 2, 2])
    with hessian_operator(model, sum_square, batches) as hessian:
        expected = float(hessian.gradient.square().sum())
    assert rsc_ratio(model, sum_square, batches).grad_norm_sq == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["bn", "wn-hook-dim-0", "tied", "lstm"])
def test_a_slow_product_can_be_stopped_in_the_middle(name, monkeypatch):
    case = MODELS[name]
    model, batches = case.make(), batches_of(case)
    expected = hessian_vector_product(model, sum_square, batches, ones_like(model))
    monkeypatch.setattr(operator, "_SLOW", 0.0)
    calls = []
    monkeypatch.setattr(graph, "_let_python_run", calls.append)
    found = hessian_vector_product(model, sum_square, batches, ones_like(model))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(calls) > len(expected)

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(graph, "_let_python_run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hessian_vector_product(model, sum_square, batches, ones_like(model))
