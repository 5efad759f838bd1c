"""Test when graphs are built, shared and freed, and that the model is left unchanged."""

import gc
import random
import weakref

import numpy as np
import pytest
import torch

from lightning_normtheory import hessian_vector_product
from lightning_normtheory.hessian import hessian_operator
from lightning_normtheory.hessian.operator import LossHessian
from lightning_normtheory.measuring.processes import Processes
from lightning_normtheory.model.checks import trainable_parameters

from support.hessian_cases import assembled, batches_of, ones_like, sum_square
from support.models import MODELS


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
