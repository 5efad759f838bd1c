"""`preserve_state`: a deterministic function inside, and an unchanged model afterwards, to the last bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_normtheory.measuring.preserve import preserve_state

from support.feeding.feeding_parts import ActivatedBatchNorm, FrozenBatchNorm
from support.models import MODELS, hook_weight_norm, parametrized_weight_norm

CHOICES = pytest.mark.parametrize("batch_stats", [True, False, None])


def full_state(model: nn.Module) -> dict:
    """The state of a model and of the process, by value and by identity."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {
            name: tensor.detach().clone().view(torch.uint8).tolist() for name, tensor in tensors.items() if tensor.dim()
        },
        "counts": {name: tensor.item() for name, tensor in tensors.items() if not tensor.dim()},
        "identities": {name: id(tensor) for name, tensor in tensors.items()},
        "gradients": {name: (id(p.grad), p.grad is None or p.grad.tolist()) for name, p in model.named_parameters()},
        "flags": [module.training for module in model.modules()],
        "trained": [parameter.requires_grad for parameter in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "generators": (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),
    }


@CHOICES
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_left_as_it_was(name, training, batch_stats):
    case = MODELS[name]
    model = case.make().train(training)
    x, y = case.data()
    (model(x) - y).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = full_state(model)
    with preserve_state(model, batch_stats=batch_stats):
        (model(x) - y).square().sum().backward()
        torch.rand(3), random.random(), np.random.rand()
        model.remember_me = x
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        model.train(not training)
        assert full_state(model) != before
    assert full_state(model) == before
    del gradients  # kept alive until here, so that an id names one object


def test_inside_there_are_no_gradients():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    with preserve_state(model):
        assert model.weight.grad is None
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_the_gradient_of_a_frozen_parameter_is_kept():
    # Frozen after a backward pass: .grad stays, and the next optimizer step applies it.
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    model.bias.requires_grad_(False)
    gradient = model.bias.grad
    with preserve_state(model):
        pass
    assert model.bias.grad is gradient


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_model_that_is_cast_inside_is_cast_back(dtype):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model(torch.randn(4, 2)).sum().backward()
    before = full_state(model)
    with preserve_state(model):
        model.to(dtype)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert full_state(model) == before


def test_what_forward_hooks_collect_is_taken_back():
    # Hooks that collect activations are common, and run in every forward pass.
    model, seen = nn.Sequential(nn.Linear(2, 2)), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with preserve_state(model):
        model(torch.ones(1, 2))
        assert len(seen) == 1
    assert seen == []


def fail_inside(model: nn.Module) -> None:
    with preserve_state(model, batch_stats=True):
        model(torch.randn(4, 2))
        model.history.append(1)
        raise KeyError("inside")


def test_an_exception_restores_everything():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model.history = []
    before = full_state(model)
    with pytest.raises(KeyError, match="inside"):
        fail_inside(model)
    assert full_state(model) == before
    assert model.history == []


def test_an_error_on_entry_restores_everything():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.BatchNorm1d(2, track_running_stats=False))
    model[0].weight.grad = torch.ones(2)
    before = full_state(model)
    with pytest.raises(ValueError, match="track_running_stats"), preserve_state(model, batch_stats=False):
        pass
    assert full_state(model) == before


def test_nested():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    before = full_state(model)
    with preserve_state(model, batch_stats=True):
        with preserve_state(model, batch_stats=False):
            assert not model[0].training
        assert model[0].training
        assert not model[1].training
    assert full_state(model) == before


def test_dropout_is_off():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.RReLU()).train()
    x = torch.rand(2, 3, 4, 4)
    with preserve_state(model):
        assert torch.equal(model(x), x)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_dropout_is_off(kind):
    model = nn.Sequential(kind(2, 3, num_layers=2, dropout=0.9))
    x = torch.randn(5, 4, 2)
    expected = model.eval()(x)[0]
    model.train()
    with preserve_state(model):
        assert torch.equal(model(x)[0], expected)
        # In training mode, since cuDNN has no backward pass for recurrent layers in eval mode.
        assert model[0].training
    assert model[0].dropout == 0.9


@pytest.mark.parametrize("mode", [True, False])
def test_a_recurrent_layer_gets_its_flag_back(mode):
    model = nn.Sequential(nn.LSTM(2, 3, num_layers=2, dropout=0.5)).train(mode)
    with preserve_state(model):
        pass
    assert (model[0].training, model[0].dropout) == (mode, 0.5)


def batch_normalized(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()


def running_normalized(x: torch.Tensor) -> torch.Tensor:
    return (x - 1.0) / (4.0 + 1e-5) ** 0.5


def batch_norm(training: bool) -> nn.Module:
    layer = nn.BatchNorm1d(2, affine=False).train(training).double()
    layer.running_mean.fill_(1.0)
    layer.running_var.fill_(4.0)
    return layer


# The statistics that each BatchNorm uses, by its own flag and by the caller's choice.
STATISTICS = {
    (True, None): batch_normalized,
    (False, None): running_normalized,
    (True, True): batch_normalized,
    (False, True): batch_normalized,
    (True, False): running_normalized,
    (False, False): running_normalized,
}


@pytest.mark.parametrize(("choice", "expected"), STATISTICS.items(), ids=[str(choice) for choice in STATISTICS])
def test_which_statistics_are_used(choice, expected):
    training, batch_stats = choice
    model = nn.Sequential(batch_norm(training))
    x = torch.randn(6, 2, dtype=torch.float64)
    with preserve_state(model, batch_stats=batch_stats):
        torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-14)
    assert model[0].running_mean.tolist() == [1.0, 1.0]
    assert int(model[0].num_batches_tracked) == 0


def test_a_frozen_batch_norm_in_a_model_that_trains_stays_frozen():
    model = nn.Sequential(batch_norm(False), batch_norm(True)).double()
    model.training = True
    x = torch.randn(6, 2, dtype=torch.float64)
    with preserve_state(model):
        first = model[0](x)
        torch.testing.assert_close(first, running_normalized(x), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model(x), batch_normalized(first), rtol=1e-12, atol=1e-14)
    assert [module.training for module in model.modules()] == [True, False, True]


def test_without_running_statistics_there_is_no_choice():
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False, track_running_stats=False)).double()
    x = torch.randn(6, 2, dtype=torch.float64)
    for batch_stats in (True, None):
        with preserve_state(model.eval(), batch_stats=batch_stats):
            torch.testing.assert_close(model(x), batch_normalized(x), rtol=1e-12, atol=1e-14)
    with (
        pytest.raises(ValueError, match=r"BatchNorm1d '0' keeps none.*True or None"),
        preserve_state(model, batch_stats=False),
    ):
        pass


def instance_normalized(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


@CHOICES
@pytest.mark.parametrize("training", [True, False])
def test_instance_norm_always_uses_each_sample(training, batch_stats):
    """It does not use the batch, so batch_stats does not affect it."""
    model = nn.Sequential(nn.InstanceNorm1d(2)).train(training)
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    with preserve_state(model, batch_stats=batch_stats):
        torch.testing.assert_close(model(x), instance_normalized(x), rtol=1e-12, atol=1e-14)


def test_instance_norm_with_running_statistics_is_restored():
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True))
    before = full_state(model)
    with preserve_state(model, batch_stats=True):
        model(torch.randn(3, 2, 5))
        assert model[0].running_mean.abs().min() > 0
    assert full_state(model) == before


def test_randomness_that_cannot_be_switched_off_repeats():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x) + random.random() + np.random.rand() + nn.functional.dropout(x)

    model, x = Noisy(), torch.ones(3)
    with preserve_state(model):
        first = model(x)
    with preserve_state(model):
        assert torch.equal(model(x), first)
    with preserve_state(model, seed=1):
        assert not torch.equal(model(x), first)


@pytest.mark.parametrize("normalize", [hook_weight_norm, parametrized_weight_norm])
def test_weight_norm_is_as_before(normalize):
    model = normalize(nn.Linear(2, 2))
    weight = model.weight
    with preserve_state(model):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight, weight)
    if normalize is hook_weight_norm:
        assert model.weight is weight


@CHOICES
@pytest.mark.parametrize("training", [True, False])
def test_a_graph_from_before_can_still_be_differentiated(training, batch_stats):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).train(training)
    x = torch.randn(5, 2)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    loss = model(x).square().sum()
    with preserve_state(model, batch_stats=batch_stats):
        model(x).sum().backward()
    actual = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


class Counting(nn.Module):
    """Keeps its buffer under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.alias = self.count

    def forward(self, x):
        self.alias.add_(1.0)
        return x * self.count


def test_a_buffer_with_a_second_name_stays_one_tensor():
    model = Counting()
    with preserve_state(model):
        assert model.alias is model.count
        assert model(torch.ones(1)).tolist() == [1.0]
    assert model.count.tolist() == [0.0]
    assert model.alias is model.count


def train(steps: int, measure: bool) -> dict[str, torch.Tensor]:
    """Train for some steps with random numbers, with or without a measurement after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), parametrized_weight_norm(nn.Linear(4, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for step in range(steps):
        if step % 2 == 0:  # gradients accumulate over two steps
            optimizer.zero_grad()
        (model(torch.randn(6, 2)) ** 2).mean().backward()
        if measure:
            with preserve_state(model, batch_stats=step % 3 == 0):
                model(torch.randn(6, 2)).sum().backward()
                torch.optim.SGD(model.parameters(), 1.0).step()
        optimizer.step()
    return model.state_dict()


def test_training_does_not_notice():
    plain, measured = train(6, measure=False), train(6, measure=True)
    assert all(torch.equal(value, measured[name]) for name, value in plain.items())


def test_cuda_is_not_initialized():
    with preserve_state(nn.Linear(2, 2)):
        pass
    assert not torch.cuda.is_initialized()


class Stateful(nn.Module):
    """Everything that a step may move."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("center", torch.zeros(2))
        self.plain, self.steps, self.history, self.by_name = torch.zeros(2), 0, [], {"last": None}
        self.array, self.generator = np.zeros(2), torch.Generator().manual_seed(1)


MOVES = {
    "trained, in place": lambda m: torch.no_grad()(lambda: m.trained.weight.mul_(2))(),
    "trained, past autograd": lambda m: m.trained.weight.data.mul_(2),
    "frozen, in place": lambda m: m.frozen.weight.mul_(2),
    "frozen, data replaced": lambda m: setattr(m.frozen.weight, "data", m.frozen.weight.data * 2),
    "frozen, copied from trained": lambda m: m.frozen.load_state_dict(m.trained.state_dict()),
    "parameter replaced": lambda m: setattr(m.frozen, "weight", nn.Parameter(torch.zeros(2, 2))),
    "unfrozen": lambda m: m.frozen.requires_grad_(True),
    "gradient": lambda m: setattr(m.trained.weight, "grad", torch.ones(2, 2)),
    "buffer": lambda m: m.center.add_(1),
    "buffer replaced": lambda m: setattr(m, "center", m.center + 1),
    "plain tensor": lambda m: m.plain.add_(1),
    "array": lambda m: m.array.__iadd__(1),
    "counter": lambda m: setattr(m, "steps", m.steps + 1),
    "list": lambda m: m.history.append(1),
    "dict": lambda m: m.by_name.update(last=1),
    "generator": lambda m: torch.rand(1, generator=m.generator),
    "mode": lambda m: m.train(),
    "module added": lambda m: setattr(m, "extra", nn.Linear(1, 1)),
}


def inner_state(model: Stateful) -> str:
    """Everything by value: buffers are new copies after each reset."""
    parameters = {name: (p.tolist(), p.requires_grad, p.grad) for name, p in model.named_parameters()}
    buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    plain = (model.plain.tolist(), model.steps, model.history, model.by_name, model.array.tolist())
    flags = [module.training for module in model.modules()]
    return repr((parameters, buffers, plain, flags, model.generator.get_state().tolist()))


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_reset_brings_back_everything(move):
    model = Stateful()
    model.trained(torch.ones(1, 2)).sum().backward()
    with preserve_state(model) as reset_state:
        before = inner_state(model)
        for _ in range(2):
            move(model)
            assert inner_state(model) != before
            reset_state()
            assert inner_state(model) == before
        move(model)
    assert model.trained.weight.grad is not None


CHANGED = {
    "trained, in place": "trained",
    "trained, past autograd": "trained",
    "frozen, data replaced": "frozen",
    "buffer": None,
    "counter": None,
}


@pytest.mark.parametrize(("name", "changed"), CHANGED.items(), ids=CHANGED)
def test_a_reset_says_which_parameters_had_changed(name, changed):
    model = Stateful()
    with preserve_state(model) as reset_state:
        MOVES[name](model)
        expected = [] if changed is None else [id(getattr(model, changed).weight)]
        assert [id(tensor) for tensor in reset_state()] == expected
        assert reset_state() == []


@pytest.mark.parametrize("name", ["trained, in place", "trained, past autograd", "frozen, data replaced"])
def test_a_graph_of_weights_that_changed_is_not_differentiated_at_others(name):
    """Torch does not notice a write through ``data``: the second batch would change the graph of the first."""
    model, x = Stateful(), torch.ones(1, 2, requires_grad=True)
    with preserve_state(model) as reset_state:
        MOVES[name](model)
        output = model.frozen(model.trained(x)).sum()
        reset_state()
        MOVES[name](model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output, x)


@pytest.mark.parametrize("name", ["buffer", "buffer replaced", "plain tensor", "counter"])
def test_graphs_of_other_batches_stay_valid(name):
    model, x = Stateful(), torch.ones(1, 2, requires_grad=True)
    with preserve_state(model) as reset_state:
        expected = torch.autograd.grad((model.trained(x) * model.center).sum(), x)[0]
        reset_state()
        output = (model.trained(x) * model.center).sum()
        reset_state()
        MOVES[name](model)  # in the next batch
        assert torch.equal(torch.autograd.grad(output, x)[0], expected)


@pytest.mark.parametrize(("batch_stats", "training"), [(None, True), (True, True), (False, False)])
def test_a_batch_norm_of_another_class_behaves_as_in_training(batch_stats, training):
    """It was switched to eval mode, and the loss of another function than the trained one was measured."""
    model = nn.Sequential(ActivatedBatchNorm(3), FrozenBatchNorm(3))
    with preserve_state(model, batch_stats=batch_stats):
        assert [module.training for module in model] == [training, False]
    assert [module.training for module in model] == [True, True]
