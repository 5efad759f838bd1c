"""Where a copy of a large container is lent, and where the container itself is walked through."""

import contextlib
import functools
import heapq
import itertools
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import nn

from lightning_normtheory.measuring import watched_types
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.snapshot import Snapshot
from lightning_normtheory.measuring.watched import MANY

from support.measuring.large_containers import (
    look,
    make,
    model_with,
    write,
    write_all,
    write_sampled,
)


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


class Stream:
    """An endless stream of a buffer's entries with a generator, which refers to it."""

    __slots__ = ("batches", "buffer")

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.batches = buffer, self.make()

    def make(self) -> Any:
        while True:
            yield from self.buffer

    def __next__(self) -> Any:
        return next(self.batches)


def test_an_iterator_that_refers_to_itself():
    buffer = make("list", "dict")
    model = nn.Linear(1, 1)
    model.stream = stream = Stream(buffer)
    next(stream)
    before = look(buffer)
    with preserve_state(model):
        write(next(model.stream))
        assert look(buffer) != before
    assert look(buffer) == before
    assert model.stream is stream
    assert stream.buffer is buffer


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
