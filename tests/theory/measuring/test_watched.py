"""Containers of many entries: a snapshot remembers what is taken out of them, and undoes everything all the same."""

import contextlib
import copy
import functools
import gc
import heapq
import itertools
import operator
import pickle
import random
import signal
import threading
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from lightning_normtheory.measuring import snapshot as snapshots
from lightning_normtheory.measuring import watched, watched_types
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.snapshot import Snapshot
from lightning_normtheory.measuring.watched import MANY, shared_copies

Step = namedtuple("Step", "state reward")


@dataclass
class Transition:
    state: Any
    reward: float


def as_tuple(i: int) -> Any:
    return (torch.tensor([i, -0.0]), float(i))


def as_namedtuple(i: int) -> Any:
    return Step(np.array([i, 0.5]), float(i))


def as_dataclass(i: int) -> Any:
    return Transition(torch.tensor([float(i)]), float(i))


def as_dict(i: int) -> Any:
    return {"state": np.array([i, 0.5]), "reward": float(i), "tags": [i]}


ENTRIES = {"tuple": as_tuple, "namedtuple": as_namedtuple, "dataclass": as_dataclass, "dict": as_dict}
CONTAINERS = {
    "list": list,
    "deque": deque,
    "full deque": lambda entries: deque(entries, maxlen=MANY + 10),
    "dict": lambda entries: dict(enumerate(entries)),
}


def keys(buffer: Any) -> Any:
    return list(buffer) if isinstance(buffer, dict) else range(len(buffer))


def state_of(entry: Any) -> Any:
    return entry["state"] if isinstance(entry, dict) else entry.state if hasattr(entry, "state") else entry[0]


def write(entry: Any) -> None:
    """Change everything that can be changed in an entry."""
    state_of(entry)[0] += 1
    if isinstance(entry, Transition):
        entry.reward, entry.extra = 7.0, [1]
    if isinstance(entry, dict):
        entry["reward"] = 7.0
        entry["tags"].append(1)


def write_sampled(buffer: Any) -> None:
    for key in random.sample(list(keys(buffer)), 8):
        write(buffer[key])


def write_all(buffer: Any) -> None:
    for entry in buffer.values() if isinstance(buffer, dict) else buffer:
        write(entry)


# What a step may do to any container.
ANY = {
    "write into one": lambda b: write(b[keys(b)[7]]),
    "write into a sample": write_sampled,
    "write into all": write_all,
    "write into a copy's": lambda b: [write(e) for e in (b.copy().values() if isinstance(b, dict) else b.copy())],
    "overwrite": lambda b: b.__setitem__(keys(b)[3], as_dict(3)),
    "overwrite and write": lambda b: (b.__setitem__(keys(b)[3], as_dict(3)), write(b[keys(b)[3]])),
    "overwrite all": lambda b: [b.__setitem__(key, None) for key in keys(b)],
    "clear": lambda b: b.clear(),
    "delete": lambda b: b.__delitem__(keys(b)[5]),
}
SEQUENCE = {
    "append": lambda b: b.append(as_dict(0)),
    "append and pop": lambda b: (b.append(as_dict(0)), write(b.pop()), write(b.pop())),
    "extend": lambda b: b.extend(as_dict(i) for i in range(20)),
    "extend by itself": lambda b: b.extend(b),
    "+=": lambda b: b.__iadd__([1, 2]),
    "reverse": lambda b: b.reverse(),
    "remove": lambda b: b.remove(b[0]) if isinstance(b[0], Transition) else b.reverse(),
    "reversed": lambda b: write(next(reversed(b))),
    "slices": lambda b: [write(e) for e in itertools.islice(b, 3, 9)],
    "swap": lambda b: random.shuffle(b),
    "*=": lambda b: b.__imul__(2),
    "sum": lambda b: [write(e) for e in b + type(b)([as_dict(0)])],
    "unpack": lambda b: write([*b][4]),
}
ACTIONS: dict[str, dict[str, Any]] = {
    "list": {
        **SEQUENCE,
        "insert": lambda b: b.insert(4, as_dict(0)),
        "pop first": lambda b: write(b.pop(0)),
        "sort": lambda b: b.sort(key=lambda e: (write(e), -float(state_of(e)[0]))[1]),
        "slice": lambda b: [write(e) for e in b[10:20]],
        "slice assigned": lambda b: b.__setitem__(slice(5, 50), []),
        "slice deleted": lambda b: b.__delitem__(slice(None, None, 2)),
        "right sum": lambda b: [write(e) for e in operator.add([], b)],
        "heap": lambda b: (b.sort(key=id), heapq.heappush(Keyed.wrap(b), Keyed(as_dict(1)))),
    },
    "deque": {
        **SEQUENCE,
        "insert": lambda b: b.insert(4, as_dict(0)) if b.maxlen is None else b.appendleft(3),
        "popleft": lambda b: (write(b.popleft()), b.append(as_dict(1)), b.appendleft(as_dict(2))),
        "appendleft": lambda b: b.appendleft(as_dict(0)),
        "extendleft": lambda b: b.extendleft([as_dict(0), as_dict(1)]),
        "rotate": lambda b: (b.rotate(3), b.append(1), b.rotate(-5)),
        "mixture": lambda b: [
            (b.popleft(), b.append(i), b.rotate(2), b.pop(), b.appendleft(i), b.reverse()) for i in range(5)
        ],
    },
    "dict": {
        "new key": lambda b: (b.__setitem__("new", as_dict(0)), write(b["new"])),
        "pop": lambda b: write(b.pop(7)),
        "pop missing": lambda b: (b.pop("none", None), b.popitem()),
        "popitem": lambda b: (write(b.popitem()[1]), b.__setitem__("x", 1)),
        "get": lambda b: (write(b.get(3)), b.get("none")),
        "setdefault": lambda b: (write(b.setdefault(3, 0)), b.setdefault("new", [])),
        "update": lambda b: b.update({3: 1, "new": 2}, more=3),
        "|=": lambda b: b.__ior__({3: 1}),
        "or": lambda b: [write(e) for e in (b | {}).values()],
        "ror": lambda b: [write(e) for e in ({} | b).values()],
        "items": lambda b: [write(e) for _, e in b.items()],
        "reversed": lambda b: (write(next(reversed(b.values()))), write(list(reversed(b.items()))[1][1])),
        "unpack": lambda b: write({**b}[4]),
        "constructor": lambda b: write(dict(b)[4]),
        "keywords": lambda b: write((lambda **k: k)(**{str(key): b[key] for key in b})["3"]),
        "moved": lambda b: b.__setitem__(0, b.pop(0)),
        "changes after one of all": lambda b: (b.pop(0), b.update({3: 1, "new": 2}), b.popitem(), b.__delitem__(5)),
    },
}
ACTIONS["full deque"] = {
    name: action for name, action in ACTIONS["deque"].items() if name not in ("sum", "extend by itself")
}
NAMES = [(kind, name) for kind in CONTAINERS for name in {**ANY, **ACTIONS[kind]}]
# Each action with one form of the entries, and with the others where time does not matter.
CASES = [
    pytest.param(kind, name, entry, marks=() if (i + j) % 4 == 0 else pytest.mark.slow, id=f"{kind}-{name}-{entry}")
    for i, (kind, name) in enumerate(NAMES)
    for j, entry in enumerate(ENTRIES)
]


class Keyed:
    """An entry of a heap."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def __lt__(self, other: Any) -> bool:
        return id(self) < id(other)

    @staticmethod
    def wrap(buffer: list) -> list:
        buffer[:] = map(Keyed, list(buffer))
        return buffer


def look(buffer: Any) -> tuple:
    """Type, identities and contents, to the last bit."""
    entries = list(buffer.items() if type(buffer) is dict else enumerate(buffer))
    everything = [
        (key, id(value), pickle.dumps(value), sorted(map(id, gc.get_referents(value)))) for key, value in entries
    ]
    return type(buffer), id(buffer), everything


def make(kind: str, entry: str) -> Any:
    return CONTAINERS[kind](ENTRIES[entry](i) for i in range(MANY + 10))


def model_with(buffer: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    model.memory = type("Memory", (), {})()
    model.memory.buffer, model.again = buffer, [{"memory": buffer}]
    return model


@pytest.mark.parametrize(("kind", "name", "entry"), CASES)
def test_everything_is_undone(kind, name, entry):
    """After each of several resets, inside a second snapshot, and at the end."""
    act = {**ANY, **ACTIONS[kind]}[name]
    buffer = make(kind, entry)
    model = model_with(buffer)
    before = look(buffer)
    with preserve_state(model) as reset:
        for _ in range(2):
            assert model.memory.buffer is model.again[0]["memory"] is not buffer
            act(model.memory.buffer)
            reset()
            assert look(plain(model.memory.buffer))[2] == before[2]
            assert identities(buffer) == [entry[:2] for entry in before[2]]
        model.memory.buffer[keys(buffer)[0]] = as_dict(1)
        inside = look(plain(model.memory.buffer))[2]
        with preserve_state(model):
            write_sampled(model.again[0]["memory"])
            act(model.memory.buffer)
        assert look(plain(model.memory.buffer))[2] == inside
        act(model.memory.buffer)
        assert identities(buffer) == [entry[:2] for entry in before[2]]
        model.memory.buffer = []
    assert look(buffer) == before
    assert model.memory.buffer is model.again[0]["memory"] is buffer


def plain(buffer: Any) -> Any:
    """The entries in a container that nobody watches, not read by the container's own methods."""
    kind = next(base for base in (list, deque, dict) if isinstance(buffer, base))
    return dict(zip(dict.keys(buffer), dict.values(buffer))) if kind is dict else list(kind.__iter__(buffer))


def test_the_step_sees_the_same_entries():
    original = make("list", "dict")
    entry = original[0]
    with preserve_state(model := model_with(original)):
        buffer = model.memory.buffer
        assert isinstance(buffer, list)
        assert buffer == original
        assert buffer[0] is entry
        assert buffer == list(buffer)
        assert (len(buffer), repr(buffer[:1]), buffer.index(entry), entry in buffer) == (
            MANY + 10,
            repr([entry]),
            0,
            True,
        )
        for copied in (copy.copy(buffer), copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer)), buffer.copy()):
            assert type(copied) is list
            assert pickle.dumps(copied) == pickle.dumps(list(buffer))


@pytest.mark.parametrize("kind", ["deque", "full deque", "dict"])
def test_copies_have_the_plain_type(kind):
    original = make(kind, "dict")
    expected = type(original), pickle.dumps(original), getattr(original, "maxlen", None)
    with preserve_state(model := model_with(original)):
        buffer = model.memory.buffer
        for copied in (copy.copy(buffer), copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer)), buffer.copy()):
            assert (type(copied), pickle.dumps(copied), getattr(copied, "maxlen", None)) == expected


@pytest.mark.parametrize("kind", ["list", "deque", "full deque", "dict"])
def test_trees_of_torch(kind):
    buffer = make(kind, "tuple")
    expected = tree_map(lambda x: x + 1, buffer)
    with preserve_state(model := model_with(buffer)):
        found = tree_map(lambda x: x + 1, model.memory.buffer)
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)


def test_a_container_made_of_the_type_can_be_watched():
    buffer = make("dict", "dict")
    with preserve_state(model := model_with(buffer)):
        made = type(model.memory.buffer)(buffer)
    before = pickle.dumps(dict(made))
    with preserve_state(model_with(made)):
        made.update(), write(made[3])
    assert pickle.dumps(dict(made)) == before


@pytest.mark.parametrize("kind", ["deque", "dict"])
def test_removing_several_entries_keeps_one_copy_and_reads_only_them(kind):
    places = [make(kind, "dict")]
    snapshot = Snapshot(places)
    for key in list(keys(places[0]))[9:4:-1]:
        del places[0][key]
    assert len(watched_types.watched[id(places[0])].undo) == 1
    assert len(snapshot._seen) == 2  # the places and the copy
    snapshot.restore()


def test_update_and_extend_return_nothing():
    table, queue = make("dict", "dict"), make("deque", "dict")
    with preserve_state(model := model_with([table, queue])):
        table, queue = model.memory.buffer
        table.clear(), queue.clear()
        assert (table.update({}), queue.extend([])) == (None, None)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_another_thread_keeps_what_it_puts_in(kind):
    buffer = make(kind, "dict")
    model = model_with(buffer)
    entries = plain(buffer)
    new = [as_dict(i) for i in range(50)]

    def collect() -> None:
        for i, entry in enumerate(new):
            buffer.update({f"new {i}": entry}) if kind == "dict" else buffer.append(entry)

    with preserve_state(model) as reset:
        write_sampled(model.memory.buffer)
        thread = threading.Thread(target=collect)
        thread.start()
        write_sampled(model.memory.buffer)
        thread.join()
        reset()
        write_sampled(model.memory.buffer)
    assert model.memory.buffer is buffer
    expected = [*(entries.values() if kind == "dict" else entries), *new][-len(buffer) :]
    assert list(map(id, buffer.values() if kind == "dict" else buffer)) == list(map(id, expected))
    assert len(buffer) == MANY + 10 + (0 if kind == "full deque" else len(new))


def test_another_thread_may_change_a_list_while_it_is_copied_and_compared():
    buffer, done = [(float(i),) for i in range(2 * MANY)], threading.Event()

    def collect() -> None:
        while not done.is_set():
            buffer.extend([()] * 100)
            if len(buffer) > 50 * MANY:
                del buffer[2 * MANY :]

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        for _ in range(20):
            places = [buffer]
            snapshot = Snapshot(places)
            places[0].reverse()
            snapshot.reset()
            snapshot.restore()
            assert places[0] is buffer
    finally:
        done.set()
        thread.join()
    assert [entry[0] for entry in buffer[: 2 * MANY]] == list(range(2 * MANY))


class Slots:
    __slots__ = ("buffer",)


def holders(buffer: Any) -> dict[str, tuple[Any, Any]]:
    """Objects that refer to a buffer, each with a function that returns what it refers to."""
    slots = Slots()
    slots.buffer = buffer
    named = functools.partial(print, end=buffer)
    return {
        "attribute": (model := model_with(buffer), lambda: model.memory.buffer),
        "dict in a list": (model, lambda: model.again[0]["memory"]),
        "list": (inner := [1, buffer], lambda: inner[1]),
        "deque": (queue := deque([1, buffer]), lambda: queue[1]),
        "ordered dict": (table := OrderedDict(a=1, b=buffer, c=2), lambda: table["b"]),
        "slot": (slots, lambda: slots.buffer),
        "cell": (closure := (lambda: buffer), closure),
        "partial": (named, lambda: named.keywords["end"]),
    }


@pytest.mark.parametrize("kind", ["list", "deque", "dict"])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_all_places_have_one_copy_and_then_the_original(kind, error):
    buffer = make(kind, "dict")
    before = look(buffer)
    found = holders(buffer)
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        snapshot = Snapshot([holder for holder, _ in found.values()])
        try:
            for _ in range(2):
                assert {id(place()) for _, place in found.values()} == {id(found["slot"][1]())}
                assert found["slot"][1]() is not buffer
                write_sampled(found["cell"][1]())
                found["list"][1]().clear()
                found["list"][0].clear()
                found["deque"][0].reverse()
                found["ordered dict"][0].pop("a")
                del found["slot"][0].buffer
                snapshot.reset()
            if error is not None:
                found["list"][0].clear()
                raise error
        finally:
            snapshot.restore()
    assert all(place() is buffer for _, place in found.values())
    assert list(found["ordered dict"][0]) == ["a", "b", "c"]
    assert look(buffer) == before
    assert not watched_types.watched


def test_a_container_in_a_tuple_is_walked_through():
    buffer = make("list", "dict")
    model = model_with(buffer)
    model.pair = (1, buffer)
    before = look(buffer)
    with preserve_state(model):
        assert model.memory.buffer is model.pair[1] is buffer
        write_all(buffer)
        buffer.clear()
    assert look(buffer) == before


def test_a_tuple_that_is_found_later():
    """In an entry that a step takes out, when the copy is lent already."""
    buffer = make("deque", "dict")
    buffer[3]["all"] = (buffer,)
    model = model_with(buffer)
    before = list(map(id, buffer))
    with preserve_state(model):
        model.memory.buffer[3]["all"][0].clear()
    assert list(map(id, buffer)) == before


def test_containers_in_entries():
    """A large one in an entry's dict is lent when the entry is taken out; one that is an entry is walked through."""
    inner, direct = make("list", "dict"), make("deque", "dict")
    buffer = make("list", "dict")
    buffer[3]["steps"], buffer[4] = inner, direct
    model = model_with(buffer)
    before = [look(each) for each in (inner, direct)]
    with preserve_state(model) as reset:
        for _ in range(2):
            assert model.memory.buffer[3]["steps"] is not inner
            write_all(model.memory.buffer[3]["steps"])
            model.memory.buffer[3]["steps"].clear()
            write_all(model.memory.buffer[4])
            model.memory.buffer[4].rotate(1)
            reset()
    assert buffer[3]["steps"] is inner
    assert buffer[4] is direct
    assert [look(each) for each in (inner, direct)] == before


def test_snapshots_of_two_models_lend_the_same_copy():
    buffer = make("dict", "dict")
    first, second = model_with(buffer), model_with(buffer)
    before = look(buffer)
    with preserve_state(first):
        with preserve_state(second):
            assert first.memory.buffer is second.memory.buffer is not buffer
            write_sampled(second.memory.buffer)
        assert second.memory.buffer is buffer
        write_sampled(first.memory.buffer)
    assert first.memory.buffer is buffer
    assert look(buffer) == before


@pytest.mark.parametrize("ends", ["restore", "close"])
def test_snapshots_that_end_in_any_order(ends):
    places = [buffer := make("list", "dict")]
    before = look(buffer)
    first, second, third = Snapshot(places), Snapshot(places), Snapshot(places)
    copied = places[0]
    write_sampled(copied)
    copied.clear()
    getattr(first, ends)()
    second.reset()
    assert places[0] is copied
    third.restore()
    assert places[0] is copied
    second.restore()
    assert places[0] is buffer
    assert look(buffer) == before
    assert not watched_types.watched


def test_a_snapshot_within_reach_of_another_one():
    """As a function that resets the model is, while the model's methods are replaced."""
    buffer = make("deque", "dict")
    model = model_with(buffer)
    with preserve_state(model) as reset:
        model.reset = reset
        with preserve_state(model):
            model.memory.buffer.clear()
        assert model.memory.buffer is not buffer
        model.memory.buffer.clear()
    assert model.memory.buffer is buffer
    assert len(buffer) == MANY + 10


def test_an_interrupt_while_copies_are_lent(monkeypatch):
    def interrupted(original: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return watched.lend(original)

    buffer = make("list", "dict")
    model = model_with(buffer)
    monkeypatch.setattr(snapshots, "lend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Snapshot(model)
    assert model.memory.buffer is model.again[0]["memory"] is buffer
    assert not watched_types.watched


HEAPS = {
    "numbers": lambda i: float(-i),
    "tuples": lambda i: (float(-i), {"item": i}),
    "tensors": lambda i: (torch.tensor(-float(i)), i),
}


@pytest.mark.parametrize("entry", HEAPS.values(), ids=HEAPS)
def test_what_heapq_does_is_undone(entry):
    buffer = [entry(i) for i in range(MANY + 10)]
    model = model_with(buffer)
    before = list(map(id, buffer))
    with preserve_state(model) as reset:
        for _ in range(2):
            heapq.heapify(model.memory.buffer)
            heapq.heappush(model.memory.buffer, entry(5 * MANY))
            heapq.heappop(model.memory.buffer)
            reset()
            assert list(map(id, list.__iter__(model.memory.buffer))) == before
    assert list(map(id, buffer)) == before


class Stream:
    """An endless stream with a generator, which refers to it."""

    __slots__ = ("batches",)

    def __init__(self) -> None:
        self.batches = self.make()

    def make(self) -> Any:
        yield from itertools.repeat(self)

    def __next__(self) -> Any:
        return next(self.batches)


def test_an_iterator_that_refers_to_itself():
    model = nn.Linear(1, 1)
    model.stream = Stream()
    next(model.stream)
    with preserve_state(model):
        next(model.stream)


# Ways to the entries that do not pass through the container's methods.
AROUND = {
    "bound method": lambda b: b.pop,
    "iterator": iter,
    "itertools": itertools.cycle,
    "zip": lambda b: zip(b, range(3)),
    "generator": lambda b: (entry for entry in b),
}


@pytest.mark.parametrize("kind", ["list", "deque"])
@pytest.mark.parametrize("way", AROUND)
def test_a_container_that_is_in_use_is_walked_through(kind, way):
    buffer = make(kind, "dict")
    model = model_with(buffer)
    model.way = AROUND[way](buffer)
    before = look(buffer)
    with preserve_state(model):
        found = model.way() if callable(model.way) else next(model.way)
        write(found[0] if isinstance(found, tuple) else found)
    assert look(buffer) == before


def test_a_list_of_tensors_is_walked_through():
    model = nn.Module()
    model.traces = [torch.full((2,), float(i)) for i in range(MANY)]
    with preserve_state(model):
        torch._foreach_add_(model.traces, 1.0)
    assert [trace.tolist() for trace in model.traces] == [[float(i)] * 2 for i in range(MANY)]


def test_a_heap_is_walked_through():
    """heapq hands out entries without the methods of the list."""
    model = nn.Module()
    model.heap = [[i % 7, i, 0] for i in range(MANY)]
    heapq.heapify(model.heap)
    before = look(model.heap)
    with preserve_state(model):
        entry = heapq.heappop(model.heap)
        entry[2] += 1
        heapq.heappush(model.heap, entry)
    assert look(model.heap) == before


def test_many_modules_and_attributes():
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(MANY)])
    for i in range(MANY):
        setattr(model, f"attribute_{i}", i)
    with preserve_state(model):
        assert type(model._modules) is type(vars(model)) is dict
        model[7].weight.data.add_(1.0)
        model.attribute_5 = 0
        inside = model[7].weight
    assert model[7].weight is inside
    assert model.attribute_5 == 5


@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_cost_is_that_of_what_is_touched(kind):
    def visited(entries: int) -> tuple[int, int]:
        model = model_with(CONTAINERS[kind](as_dict(i) for i in range(entries)))
        snapshot = Snapshot(model)
        buffer = model.memory.buffer
        for key in list(keys(buffer))[:8]:
            write(buffer[key])
        snapshot.restore()
        return len(snapshot._seen), len(snapshot._undo)

    assert visited(MANY) == visited(50 * MANY)


def test_what_a_step_puts_in_is_not_kept():
    # It may hold a graph.
    for kind in ("list", "deque", "dict"):
        snapshot = Snapshot(places := [make(kind, "dict")])
        for key in list(keys(places[0]))[:3]:
            places[0][key] = as_dict(0)
            places[0][key]["state"]
            seen = len(snapshot._seen)
            snapshot.reset()
        assert seen == 2  # the places and the copy
        snapshot.restore()


CHANGES = {
    "nothing": lambda b: None,
    "one": lambda b: [b.__setitem__(key, None) for key in list(keys(b))[4:5]],
    "more": lambda b: b.update(new=1) if isinstance(b, dict) else b.extend([1, 2]),
    "fewer": lambda b: [b.__delitem__(key) for key in list(keys(b))[:89:-1]],
    "others": lambda b: [b.__setitem__(key, as_dict(1)) for key in keys(b)],
    "empty": lambda b: b.clear(),
}


@pytest.mark.parametrize("kind", ["list", "deque", "dict"])
@pytest.mark.parametrize("third", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("second", CHANGES.values(), ids=CHANGES)
def test_snapshots_in_each_other(kind, second, third):
    """Of different states of a container."""
    places = [buffer := make(kind, "dict")]
    before = identities(buffer)
    first = Snapshot(places)
    second(places[0])
    expected = identities(places[0])
    inner = Snapshot(places)
    for _ in range(2):
        third(places[0])
        inner.reset()
        assert identities(places[0]) == expected
    inner.restore()
    assert identities(places[0]) == expected
    first.reset()
    assert identities(places[0]) == before
    first.restore()
    assert places[0] is buffer
    assert identities(buffer) == before


def identities(buffer: Any) -> list:
    entries = plain(buffer)
    return [(key, id(value)) for key, value in (entries.items() if isinstance(entries, dict) else enumerate(entries))]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_copy_is_lent_again(kind, change):
    """In the next snapshot of a measurement, unless the original is of another length or has other ends."""
    places = [buffer := make(kind, "dict")]
    with shared_copies():
        copies = []
        for _ in range(3):
            snapshot = Snapshot(places)
            copies.append(places[0])
            assert identities(places[0]) == identities(buffer)
            change(places[0])
            snapshot.restore()
        assert copies[0] is copies[1] is copies[2]
        buffer.popitem() if kind == "dict" else buffer.pop()
        snapshot = Snapshot(places)
        assert places[0] is not copies[0]
        assert identities(places[0]) == identities(buffer)
        snapshot.restore()
    assert watched._copies is None


def test_a_copy_that_was_not_restored_is_not_lent_again():
    places = [buffer := make("deque", "dict")]
    with shared_copies():
        snapshot = Snapshot(places)
        places[0][500] = None
        snapshot.close()
        assert places[0] is buffer
        snapshot = Snapshot(places)
        assert places[0][500] is buffer[500] is not None
        snapshot.restore()


def test_a_snapshot_that_is_dropped_takes_its_copies_back():
    places = [buffer := make("deque", "dict")]
    snapshot = Snapshot(places)
    assert places[0] is not buffer
    del snapshot
    gc.collect()
    assert places[0] is buffer
    assert type(buffer) is deque
