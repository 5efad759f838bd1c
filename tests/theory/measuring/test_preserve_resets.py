"""`preserve_state`: a reset between batches brings everything back."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_normtheory.measuring.preserve import preserve_state


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
