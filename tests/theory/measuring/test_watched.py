"""Containers of many entries: a snapshot remembers what is taken out of them, and undoes everything all the same."""

import copy
import gc
import heapq
import itertools
import operator
import pickle
import random
import signal
import subprocess
import sys
import textwrap
from collections import deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

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
    model.memory.buffer, model.again = buffer, (buffer,)
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
            act(model.memory.buffer)
            reset()
            assert look(plain(buffer))[2] == before[2]
        model.memory.buffer[keys(buffer)[0]] = as_dict(1)
        inside = look(plain(buffer))[2]
        with preserve_state(model):
            write_sampled(model.again[0])
            act(model.memory.buffer)
        assert look(plain(buffer))[2] == inside
        act(buffer)
        model.memory.buffer = []
    assert look(buffer) == before
    assert model.memory.buffer is buffer


def plain(buffer: Any) -> Any:
    """The entries in a container that nobody watches, not read by the container's own methods."""
    kind = next(base for base in (list, deque, dict) if isinstance(buffer, base))
    return dict(zip(dict.keys(buffer), dict.values(buffer))) if kind is dict else list(kind.__iter__(buffer))


def test_the_step_sees_the_same_container():
    buffer = make("list", "dict")
    entry = buffer[0]
    with preserve_state(model_with(buffer)):
        assert isinstance(buffer, list)
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
    buffer = make(kind, "dict")
    expected = type(buffer), pickle.dumps(buffer), getattr(buffer, "maxlen", None)
    with preserve_state(model_with(buffer)):
        for copied in (copy.copy(buffer), copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer)), buffer.copy()):
            assert (type(copied), pickle.dumps(copied), getattr(copied, "maxlen", None)) == expected
    assert type(buffer) is expected[0]


@pytest.mark.parametrize("kind", ["list", "deque", "full deque", "dict"])
def test_trees_of_torch(kind):
    buffer = make(kind, "tuple")
    expected = tree_map(lambda x: x + 1, buffer)
    with preserve_state(model_with(buffer)):
        found = tree_map(lambda x: x + 1, buffer)
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)


def test_a_container_made_of_the_type_can_be_watched():
    buffer = make("dict", "dict")
    with preserve_state(model_with(buffer)):
        made = type(buffer)(buffer)
    before = pickle.dumps(dict(made))
    with preserve_state(model_with(made)):
        made.update(), write(made[3])
    assert pickle.dumps(dict(made)) == before


@pytest.mark.parametrize("kind", ["deque", "dict"])
def test_removing_several_entries_keeps_one_copy_and_reads_only_them(kind):
    buffer = make(kind, "dict")
    snapshot = Snapshot(buffer)
    for key in list(keys(buffer))[9:4:-1]:
        del buffer[key]
    assert len(snapshot._watches[id(buffer)]._state.undo) == 1
    assert len(snapshot._seen) == 1
    snapshot.restore()


def test_update_and_extend_return_nothing():
    table, queue = make("dict", "dict"), make("deque", "dict")
    with preserve_state(model_with((table, queue))):
        table.clear(), queue.clear()
        assert (table.update({}), queue.extend([])) == (None, None)


def test_another_thread_may_change_a_list():
    """Its memory moves while it is compared with the copy; nothing is said about what the snapshot restores."""
    code = """
        import sys, threading, time
        from lightning_normtheory.measuring.snapshot import Snapshot

        buffer, end = [(i,) for i in range(200_000)], time.monotonic() + 3

        def collect():
            while time.monotonic() < end:
                buffer.extend([()] * 100)
                if len(buffer) > 1_000_000:
                    del buffer[200_000:]

        threading.Thread(target=collect, daemon=True).start()
        while time.monotonic() < end:
            try:
                Snapshot(buffer).restore()
            except IndexError:
                pass
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_an_interrupt_leaves_the_type(monkeypatch):
    def interrupted(*arguments: Any) -> None:
        watched_types.set_type(*arguments)
        signal.raise_signal(signal.SIGINT)

    buffer = make("list", "dict")
    monkeypatch.setattr(watched, "set_type", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Snapshot(buffer)
    assert type(buffer) is list
    assert not watched_types.watched


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
        buffer = CONTAINERS[kind](as_dict(i) for i in range(entries))
        snapshot = Snapshot(model_with(buffer))
        for key in list(keys(buffer))[:8]:
            write(buffer[key])
        snapshot.restore()
        return len(snapshot._seen), len(snapshot._undo)

    assert visited(MANY) == visited(50 * MANY)


def test_what_a_step_puts_in_is_not_kept():
    # It may hold a graph.
    for buffer in (make("list", "dict"), make("deque", "dict"), make("dict", "dict")):
        snapshot = Snapshot(buffer)
        for key in list(keys(buffer))[:3]:
            buffer[key] = as_dict(0)
            buffer[key]["state"]
            seen = len(snapshot._seen)
            snapshot.reset()
        assert seen == 1
        snapshot.restore()


CHANGES = {
    "nothing": lambda b: None,
    "one": lambda b: b.__setitem__(slice(4, 5), [None]),
    "longer": lambda b: b.extend([1, 2]),
    "shorter": lambda b: b.__delitem__(slice(90, None)),
    "others": lambda b: b.reverse(),
    "empty": lambda b: b.clear(),
}


@pytest.mark.parametrize("third", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("second", CHANGES.values(), ids=CHANGES)
def test_copies_are_shared(second, third):
    """By snapshots of different states of a list."""
    buffer = make("list", "dict")
    original = list(buffer)
    with shared_copies():
        Snapshot([buffer]).restore()
        first = Snapshot([buffer])
        second(buffer)
        expected = plain(buffer)
        inner = Snapshot([buffer])
        if len(buffer) >= MANY:
            assert inner._watches[id(buffer)]._saved.copy is first._watches[id(buffer)]._saved.copy
        for _ in range(2):
            third(buffer)
            inner.reset()
            assert list(map(id, plain(buffer))) == list(map(id, expected))
        inner.restore()
        first.restore()
    assert list(map(id, buffer)) == list(map(id, original))
    assert type(buffer) is list


def test_a_snapshot_that_is_dropped_watches_no_longer():
    buffer = make("deque", "dict")
    snapshot = Snapshot(buffer)
    assert type(buffer) is not deque
    del snapshot
    gc.collect()
    assert type(buffer) is deque
