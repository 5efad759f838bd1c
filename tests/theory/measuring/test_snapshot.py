"""Restore all state that a forward pass may change."""

import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import Dataset

from lightning_normtheory.measuring.snapshot import Snapshot

from support.measuring.snapshot_states import ARRAYS, GENERATORS, METRICS, PLAIN, AverageMeter, State, bits, nested_list
from support.models import hook_weight_norm


def table(states: dict[str, State]):
    return pytest.mark.parametrize("state", states.values(), ids=states.keys())


def check(state: State, hold: Callable[[Any], nn.Module]) -> None:
    value = state.make()
    model = hold(value)
    before = state.look(value)
    snapshot = Snapshot(model)
    state.change(value)
    assert state.look(value) != before
    snapshot.restore()
    assert state.look(value) == before


def attribute(value: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    model.state = value
    return model


def deeper(value: Any) -> nn.Module:
    """Hold the value in a dict in a list of an object of a submodule."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[1].helper = SimpleNamespace(parts=[{"value": value}])
    return model


HOLDERS = pytest.mark.parametrize("hold", [attribute, deeper])


@HOLDERS
@table(PLAIN)
def test_plain_objects(state, hold):
    check(state, hold)


@HOLDERS
@table(ARRAYS)
def test_arrays(state, hold):
    check(state, hold)


@HOLDERS
@table(GENERATORS)
def test_generators(state, hold):
    check(state, hold)


def metric_state(metric: nn.Module) -> str:
    """The state of a metric: its values, its counters and its cache."""
    parts = metric.values() if isinstance(metric, torchmetrics.MetricCollection) else [metric]
    return repr([(part.metric_state, part._update_count, part._computed) for part in parts])


@pytest.mark.filterwarnings("ignore:.*compute.*was called before.*:UserWarning")
@pytest.mark.parametrize("hold", [attribute, deeper, lambda metric: nn.ModuleDict({"metric": metric})])
@pytest.mark.parametrize("first", [[], [1.0]], ids=["fresh", "used"])
@table(METRICS)
def test_torchmetrics(state, first, hold):
    def make():
        metric = state.make()
        for value in first:
            arguments = (torch.eye(3), torch.tensor([0, 1, 2])) if "Accuracy" in type(metric).__name__ else (value,)
            metric.update(*arguments)
        return metric

    if not first and state is METRICS["reset"]:
        first = [2.0]  # a reset must change something
    check(State(make, state.change, metric_state), hold)


class Emptied(list):
    """A container of the user's own, with attributes."""


@HOLDERS
@pytest.mark.parametrize("make", [dict, OrderedDict, list, deque, set, Emptied], ids=lambda make: make.__name__)
def test_empty_containers_are_empty_again(make, hold):
    value = make()
    if make in (OrderedDict, Emptied):
        value.note = [1]
    snapshot = Snapshot(hold(value))
    if isinstance(value, dict):
        value["key"] = 1
    else:
        (value.add if make is set else value.append)(1)
    if make in (OrderedDict, Emptied):
        value.note.append(2)
    snapshot.restore()
    assert len(value) == 0
    assert getattr(value, "note", [1]) == [1]


def test_identities_are_kept():
    model = nn.BatchNorm1d(2)
    model.history, model.plain = [1], torch.zeros(2)
    objects = [model.running_mean, model.weight, model.history, model.plain]
    snapshot = Snapshot(model)
    model.running_mean, model.weight = torch.ones(2), nn.Parameter(torch.zeros(2))
    model.history, model.plain = [2], torch.ones(2)
    snapshot.restore()
    assert all(a is b for a, b in zip(objects, [model.running_mean, model.weight, model.history, model.plain]))
    assert model.history == [1]


def test_what_did_not_change_is_not_written():
    # A write would increase the version counter and break a graph that waits for its backward pass.
    model = nn.BatchNorm1d(2)
    model.plain = torch.tensor([float("nan"), -0.0])
    snapshot = Snapshot(model)
    model.running_mean.add_(1.0)
    versions = {name: value._version for name, value in model.state_dict(keep_vars=True).items()}
    snapshot.restore()
    after = {name: value._version for name, value in model.state_dict(keep_vars=True).items()}
    assert model.plain._version == 0
    assert {name for name in after if after[name] != versions[name]} <= {"running_mean"}
    assert model.running_mean.tolist() == [0.0, 0.0]


MODEL_CHANGES = {
    "parameter through data": lambda m: m[0].weight.data.add_(1),
    "parameter, data replaced": lambda m: setattr(m[0].weight, "data", torch.zeros(3, 2)),
    "parameter, longer": lambda m: setattr(m[0].weight, "data", torch.zeros(5, 2)),
    "parameter under no_grad": lambda m: torch.no_grad()(lambda: m[0].weight.add_(1))(),
    "parameter replaced": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 2))),
    "parameter removed": lambda m: setattr(m[0], "bias", None),
    "parameter added": lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(1))),
    "buffer in place": lambda m: m[1].running_mean.add_(1),
    "buffer replaced": lambda m: setattr(m[1], "running_mean", torch.ones(3)),
    "buffer removed": lambda m: setattr(m[1], "running_mean", None),
    "buffer added": lambda m: m.register_buffer("extra", torch.zeros(1)),
    "forward pass": lambda m: m(torch.randn(4, 2)),
    "module replaced": lambda m: setattr(m, "1", nn.Identity()),
    "module added": lambda m: m.append(nn.Tanh()),
    "eval": lambda m: m.eval(),
    "one flag": lambda m: m[1].eval(),
    "options": lambda m: setattr(m[1], "momentum", 0.9),
    "frozen": lambda m: m[0].requires_grad_(False),
    "unfrozen": lambda m: m[3].requires_grad_(True),
    "hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "gradient dropped": lambda m: m.zero_grad(),
    "gradient replaced": lambda m: setattr(m[0].weight, "grad", torch.zeros(3, 2)),
    "gradient of a frozen parameter dropped": lambda m: setattr(m[3].weight, "grad", None),
}


def model_with_gradients() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))
    model(torch.randn(4, 2)).square().sum().backward()
    model[3].requires_grad_(False)  # its .grad remains, and an optimizer would apply it
    return model


def look_at_model(model: nn.Module) -> dict:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {name: (id(tensor), bits(tensor), tensor.requires_grad) for name, tensor in tensors.items()},
        "gradients": {n: (id(p.grad), None if p.grad is None else bits(p.grad)) for n, p in model.named_parameters()},
        "modules": [(name, id(module), module.training, module.extra_repr()) for name, module in model.named_modules()],
        "hooks": [list(module._forward_hooks) for module in model.modules()],
    }


@pytest.mark.parametrize("change", MODEL_CHANGES.values(), ids=MODEL_CHANGES.keys())
def test_modules(change):
    model = model_with_gradients()
    kept = [parameter.grad for parameter in model.parameters()]  # keeps ids unique
    before = look_at_model(model)
    snapshot = Snapshot(model)
    change(model)
    assert look_at_model(model) != before
    snapshot.restore()
    assert look_at_model(model) == before
    del kept


def test_tied_storage_survives():
    # A view of a parameter, as in a flattened model, must still share its memory afterwards.
    model = nn.Linear(2, 2)
    view = model.weight.data.view(-1)
    snapshot = Snapshot(model)
    model.weight.data = torch.zeros(2, 2)
    snapshot.restore()
    view.fill_(7.0)
    assert model.weight.tolist() == [[7.0, 7.0], [7.0, 7.0]]


def test_weight_of_the_hook_form_is_the_same_object():
    model = hook_weight_norm(nn.Linear(2, 2))
    weight = model.weight
    snapshot = Snapshot(model)
    model(torch.ones(1, 2))
    assert model.weight is not weight
    snapshot.restore()
    assert model.weight is weight


def test_several_roots():
    first, second = [1], {"a": 1}
    snapshot = Snapshot(first, second)
    first.append(2)
    second["b"] = 2
    snapshot.restore()
    assert (first, second) == ([1], {"a": 1})


def test_a_snapshot_can_be_restored_again():
    model = AverageMeter()
    snapshot = Snapshot(model)
    for _ in range(2):
        model.update(1.0)
        snapshot.restore()
        assert (model.count, model.history) == (0, [])


def test_what_had_changed_is_returned():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    snapshot = Snapshot(model)
    assert snapshot.restore() == []
    model[0].weight.data.add_(1)
    model[1].bias.data = torch.zeros(2)
    model[2].weight.grad = torch.ones(2, 2)
    assert {id(tensor) for tensor in snapshot.restore()} == {id(model[0].weight), id(model[1].bias)}
    assert snapshot.restore() == []


@pytest.mark.parametrize("memcmp", [True, False])
def test_bits_are_compared(memcmp, monkeypatch):
    """In any layout, and also where there is no memcmp."""
    if not memcmp:
        monkeypatch.setattr("lightning_normtheory.measuring.same_bits._memcmp", None)
    model = nn.Module()
    model.nan, model.zero = torch.tensor([float("nan")]), torch.tensor([0.0, 1.0])
    model.columns, model.odd = torch.zeros(2, 3).T, torch.zeros(3, dtype=torch.bool)
    model.strided, model.empty = torch.zeros(4)[::2], torch.zeros(0)
    model.arrays = [np.zeros(2000), np.zeros((50, 60)).T, np.zeros(2)]
    snapshot = Snapshot(model)
    assert snapshot.restore() == []
    model.zero[0] = -0.0
    model.columns[2, 1], model.odd[2], model.strided[1] = 1, True, 1
    for array in model.arrays:
        array[-1] = -0.0
    assert len(snapshot.restore()) == 4
    assert str(model.zero.tolist()) == "[0.0, 1.0]"
    assert not any(np.signbit(array).any() for array in model.arrays)
    assert not any(bool(tensor.any()) for tensor in (model.columns, model.odd, model.strided))


class Samples(Dataset):
    def __init__(self) -> None:
        self.data, self.asked, self.generator = torch.zeros(3), [], torch.Generator()

    def __getitem__(self, i):
        self.asked.append(i)
        return self.data[i] + torch.rand(1, generator=self.generator)


def test_a_dataset_is_walked_without_its_arrays():
    samples = Samples()
    state = samples.generator.get_state()
    snapshot = Snapshot(samples, arrays=False)
    samples[0]
    samples.data.add_(1.0)
    snapshot.restore()
    assert samples.asked == []
    assert torch.equal(samples.generator.get_state(), state)
    assert samples.data.tolist() == [1.0] * 3  # reading does not write there, and a copy could be large


def test_lazy_modules_do_not_disturb():
    model = nn.Sequential(nn.LazyLinear(3))
    model.count = 0
    snapshot = Snapshot(model)
    model.count = 1
    snapshot.restore()
    assert model.count == 0


def test_the_recursion_limit_is_left_alone():
    limit = sys.getrecursionlimit()
    Snapshot(nested_list(limit + 1)).restore()
    assert sys.getrecursionlimit() == limit
