"""Containers of many entries: a snapshot remembers what is taken out of them, and undoes everything all the same."""

import copy
import heapq
import itertools
import operator
import pickle
import random
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from lightning_normtheory.measuring import watched_types
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.snapshot import Snapshot
from lightning_normtheory.measuring.watched import MANY

from support.measuring.large_containers import (
    CONTAINERS,
    ENTRIES,
    Transition,
    as_dict,
    identities,
    keys,
    look,
    make,
    model_with,
    plain,
    state_of,
    write,
    write_all,
    write_sampled,
)

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
