"""Objects that a user's model may hold, with functions that change and describe them."""

import functools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torchmetrics


class AverageMeter:
    """The running mean found in many training scripts."""

    def __init__(self) -> None:
        self.total, self.count, self.history = 0.0, 0, []

    def update(self, value: float, n: int = 1) -> None:
        self.total += n * value
        self.count += n
        self.history.append(self.total / self.count)


class SlottedMeter:
    """An object without a ``__dict__``."""

    __slots__ = ("count", "history")

    def __init__(self) -> None:
        self.count, self.history = 0, []

    def update(self, value: float) -> None:
        self.count += 1
        self.history.append(value)


@dataclass
class Record:
    best: float = 0.0
    per_class: dict = field(default_factory=dict)


@dataclass(slots=True)
class SlottedRecord:
    best: float = 0.0


class Registry(dict):
    """A dict with an attribute."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls = 0


class Window(list):
    """A list with an attribute."""

    calls = 0


@dataclass(frozen=True)
class State:
    """A mutable object: functions that make it, change it as a forward pass may, and describe it."""

    make: Callable[[], Any]
    change: Callable[[Any], Any]
    look: Callable[[Any], Any] = lambda value: repr(value)


def change_closure(function):
    function(1)


def collector() -> Callable:
    seen: list = []

    def collect(value):
        seen.append(value)
        return seen

    return collect


def linked(depth: int) -> SimpleNamespace:
    head = SimpleNamespace(value=0, next=None)
    for _ in range(depth):
        head = SimpleNamespace(value=0, next=head)
    return head


def nested_list(depth: int) -> list:
    inner: list = [0]
    for _ in range(depth):
        inner = [inner]
    return inner


def innermost(value: list) -> list:
    while isinstance(value[0], list):
        value = value[0]
    return value


def last_link(value: SimpleNamespace) -> SimpleNamespace:
    while value.next is not None:
        value = value.next
    return value


def cyclic_list() -> list:
    value: list = [1]
    value.append(value)
    return value


def cyclic_object() -> SimpleNamespace:
    value = SimpleNamespace(count=0, children=[])
    value.children.append(SimpleNamespace(parent=value))
    return value


def set_attributes(**attributes: Any) -> Callable[[Any], None]:
    def change(value):
        for name, attribute in attributes.items():
            setattr(value, name, attribute)

    return change


def bits(value: Any) -> Any:
    """The content of a tensor or an array to the last bit."""
    array = value.detach().contiguous() if isinstance(value, torch.Tensor) else value
    if isinstance(array, torch.Tensor):
        return array.dtype, array.shape, array.reshape(-1).view(torch.uint8).tolist()
    return array.dtype, array.shape, array.tobytes()


def ordered(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else sorted(value)


PLAIN = {
    "list, appended": State(lambda: [1, 2], lambda v: v.append(3)),
    "list, assigned": State(lambda: [1, 2], lambda v: v.__setitem__(0, 9)),
    "list, sorted": State(lambda: [2, 1], lambda v: v.sort()),
    "list, emptied": State(lambda: [1, 2], lambda v: v.clear()),
    "list in a dict in a list": State(lambda: [{"a": [1]}], lambda v: v[0]["a"].append(2)),
    "list in a tuple": State(lambda: ([1], 2), lambda v: v[0].append(2)),
    "dict, added": State(lambda: {"a": 1}, lambda v: v.update(b=2)),
    "dict, assigned": State(lambda: {"a": 1}, lambda v: v.update(a=2)),
    "dict, deleted": State(lambda: {"a": 1, "b": 2}, lambda v: v.pop("a"), ordered),
    "dict, same keys in another order": State(lambda: {"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a")), ordered),
    "ordered dict": State(lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a"), ordered),
    "default dict": State(lambda: defaultdict(list, a=[1]), lambda v: v["b"].append(1), ordered),
    "default dict, inside": State(lambda: defaultdict(list, a=[1]), lambda v: v["a"].append(1)),
    "counter": State(lambda: Counter("ab"), lambda v: v.update("bc"), ordered),
    "deque": State(lambda: deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "deque, rotated": State(lambda: deque([1, 2, 3]), lambda v: v.rotate(1)),
    "set, added": State(lambda: {1, 2}, lambda v: v.add(3), ordered),
    "set, removed": State(lambda: {1, 2}, lambda v: v.discard(1), ordered),
    "set, replaced": State(lambda: {1, 2}, lambda v: (v.clear(), v.update({3, 4})), ordered),
    "object": State(AverageMeter, lambda v: v.update(3.0), lambda v: (v.total, v.count, list(v.history))),
    "object, new attribute": State(AverageMeter, set_attributes(extra=1), lambda v: sorted(vars(v))),
    "object, lost attribute": State(AverageMeter, lambda v: delattr(v, "total"), lambda v: sorted(vars(v))),
    "object in an object": State(
        lambda: SimpleNamespace(meter=AverageMeter()), lambda v: v.meter.update(1.0), lambda v: v.meter.count
    ),
    "dataclass": State(Record, lambda v: (set_attributes(best=1.0)(v), v.per_class.update(a=1))),
    "object with slots": State(SlottedMeter, lambda v: v.update(3.0), lambda v: (v.count, list(v.history))),
    "dataclass with slots": State(SlottedRecord, set_attributes(best=1.0)),
    "dict with attributes": State(lambda: Registry({"a": 1}), set_attributes(calls=3), lambda v: (dict(v), v.calls)),
    "list with attributes": State(Window, set_attributes(calls=3), lambda v: (list(v), v.calls)),
    "bound method": State(lambda: AverageMeter().update, lambda v: v(1.0), lambda v: v.__self__.count),
    "closure": State(collector, change_closure, lambda v: list(v.__closure__[0].cell_contents)),
    "partial": State(lambda: functools.partial(list.append, []), lambda v: v(1), lambda v: list(v.args[0])),
    "cyclic list": State(cyclic_list, lambda v: v.append(3)),
    "cyclic object": State(cyclic_object, lambda v: set_attributes(count=5)(v.children[0].parent), lambda v: v.count),
    "deep list": State(lambda: nested_list(5000), lambda v: innermost(v).append(1), lambda v: list(innermost(v))),
    "deep object": State(
        lambda: linked(5000), lambda v: set_attributes(value=1)(last_link(v)), lambda v: last_link(v).value
    ),
}

ARRAYS = {
    "tensor": State(lambda: torch.arange(4.0), lambda v: v.add_(1), bits),
    "tensor, entry": State(lambda: torch.zeros(2, 2), lambda v: v[0].fill_(1), bits),
    "number": State(lambda: torch.tensor(3.0), lambda v: v.mul_(2), bits),
    "empty tensor, filled": State(lambda: torch.zeros(0), lambda v: v.resize_(2).fill_(1.0), bits),
    "bool": State(lambda: torch.tensor([True, False]), lambda v: v.logical_not_(), bits),
    "int64": State(lambda: torch.arange(3), lambda v: v.add_(1), bits),
    "bfloat16": State(lambda: torch.ones(3, dtype=torch.bfloat16), lambda v: v.add_(1), bits),
    "complex": State(lambda: torch.ones(3, dtype=torch.complex64), lambda v: v.mul_(1j), bits),
    "not contiguous": State(lambda: torch.arange(6.0).reshape(2, 3).t(), lambda v: v.add_(1), bits),
    "every second entry": State(lambda: torch.arange(6.0)[::2], lambda v: v.add_(1), bits),
    "leaf with gradient": State(lambda: torch.zeros(2, requires_grad=True), lambda v: v.data.add_(1), bits),
    "result of autograd": State(lambda: torch.zeros(2, requires_grad=True) * 2, lambda v: v.detach().add_(1), bits),
    "zero, to minus zero": State(lambda: torch.zeros(2), lambda v: v.neg_(), bits),
    "minus zero": State(lambda: -torch.zeros(2), lambda v: v.abs_(), bits),
    "nan": State(lambda: torch.tensor([float("nan"), 1.0]), lambda v: v.fill_(2.0), bits),
    "to nan": State(lambda: torch.ones(2), lambda v: v.fill_(float("nan")), bits),
    "longer": State(lambda: torch.ones(2), lambda v: set_attributes(data=torch.zeros(3))(v), bits),
    "one long, broadcast": State(lambda: torch.ones(1), lambda v: set_attributes(data=torch.zeros(3))(v), bits),
    "other dtype": State(lambda: torch.ones(2), lambda v: set_attributes(data=torch.zeros(2).double())(v), bits),
    "sparse": State(lambda: torch.eye(2).to_sparse(), lambda v: v.mul_(3.0), lambda v: v.to_dense().tolist()),
    "tensor in a list in a dict": State(lambda: {"a": [torch.ones(2)]}, lambda v: v["a"][0].add_(1)),
    "tensor in an object": State(lambda: SimpleNamespace(t=torch.ones(2)), lambda v: v.t.add_(1)),
    "array": State(lambda: np.arange(4.0), lambda v: v.__iadd__(1), bits),
    "array, strided": State(lambda: np.arange(6.0)[::2], lambda v: v.__iadd__(1), bits),
    "array, Fortran": State(lambda: np.asfortranarray(np.ones((2, 3))), lambda v: v.__iadd__(1), bits),
    "array, minus zero": State(lambda: np.array([-0.0]), lambda v: np.abs(v, out=v), bits),
    "array, nan": State(lambda: np.array([np.nan, 1.0]), lambda v: v.fill(2.0), bits),
    "array of strings": State(lambda: np.array(["a", "b"]), lambda v: v.__setitem__(0, "c"), bits),
}

GENERATORS = {
    "torch": State(
        lambda: torch.Generator().manual_seed(1), lambda v: torch.rand(1, generator=v), lambda v: v.get_state().tolist()
    ),
    "torch in a list": State(
        lambda: [torch.Generator()], lambda v: torch.rand(1, generator=v[0]), lambda v: v[0].get_state().tolist()
    ),
    "numpy": State(lambda: np.random.default_rng(1), lambda v: v.random(), lambda v: repr(v.bit_generator.state)),
    "numpy, old": State(lambda: np.random.RandomState(1), lambda v: v.rand(), lambda v: repr(v.get_state())),
    "python": State(lambda: random.Random(1), lambda v: v.random(), lambda v: v.getstate()),
}

METRICS = {
    "mean": State(torchmetrics.MeanMetric, lambda v: v.update(torch.tensor(3.0))),
    "forward": State(torchmetrics.SumMetric, lambda v: v(torch.tensor(3.0))),
    "list state": State(torchmetrics.CatMetric, lambda v: v.update(torch.tensor([1.0, 2.0]))),
    "accuracy": State(
        lambda: torchmetrics.Accuracy("multiclass", num_classes=3), lambda v: v(torch.eye(3), torch.tensor([0, 1, 0]))
    ),
    "computed": State(torchmetrics.MaxMetric, lambda v: (v.update(5.0), v.compute())),
    "reset": State(torchmetrics.SumMetric, lambda v: v.reset()),
    "collection": State(
        lambda: torchmetrics.MetricCollection({"a": torchmetrics.MeanMetric(), "b": torchmetrics.MaxMetric()}),
        lambda v: v.update(torch.tensor(3.0)),
    ),
}
