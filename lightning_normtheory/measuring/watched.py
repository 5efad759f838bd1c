"""Watch large containers: know which entries are taken out of them, and undo what is done to them.

A replay buffer may hold a million transitions, of which a step reads a few dozen. To remember all of them costs a
hundred times what the step costs. So a large list, deque or dict becomes, as long as it is watched, an object of a
subclass that reports each entry which it hands out; only these are remembered. The object stays the same, only its type
changes.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType
from typing import Any
from weakref import WeakMethod

from torch import Tensor

from lightning_normtheory.measuring.watched_types import (
    SUBCLASS,
    Watched,
    address_of_entries,
    memcmp,
    set_type,
    watched,
)

__all__ = ["MANY", "Watch", "containers_in_use", "shared_copies", "watchable"]

# Smaller containers are walked through.
MANY = 1000
_KINDS = frozenset({*SUBCLASS, *SUBCLASS.values()})


class Watch:
    """Watch ``container`` for a snapshot that begins now.

    Args:
        container: see `watchable`.
        read: a method, called with each entry before the program gets it. It is not kept alive.
    """

    def __init__(self, container: Any, read: Callable[[Any], object]) -> None:
        self._read = WeakMethod(read)
        self._saved = _ListState(container) if isinstance(container, list) else None
        self._state = state = watched.get(id(container)) or Watched(container)
        self._position = len(state.undo)
        state.new.clear()
        state.readers.append(self._read)
        if id(container) not in watched:
            watched[id(container)] = state
            set_type(container, SUBCLASS[type(container)])

    def restore(self) -> None:
        """Put the entries back, in their order."""
        state = self._state
        state.new.clear()
        while len(state.undo) > self._position:
            function, *arguments = state.undo.pop()
            function(state.container, *arguments)
        if self._saved is not None:
            self._saved.restore(state.container)

    def close(self) -> None:
        """Watch no longer."""
        state = self._state
        others = [each for each in state.readers if each is not self._read]
        if len(others) < len(state.readers):
            state.readers = others
            if not others:
                watched.pop(id(state.container), None)
                set_type(state.container, type(state.container).__mro__[1])


def watchable(value: Any) -> bool:
    """Whether ``value`` is a list, a deque or a dict of many entries, and no list of tensors.

    Operators such as ``torch._foreach_add_`` write into all tensors of a list, and read it without its methods.
    """
    if type(value) not in _KINDS or len(value) < MANY:
        return False
    return not isinstance(value, list) or not isinstance(list.__getitem__(value, 0), Tensor)


def containers_in_use(value: Any) -> Iterator[Any]:
    """Yield the containers that an iterator, a view or a bound method such as ``buffer.append`` works on by itself."""
    if isinstance(value, _USERS) or hasattr(type(value), "__next__"):
        for inside in gc.get_referents(value):
            within = inside if isinstance(inside, tuple) else (inside,)  # zip has a tuple of iterators
            yield from (each for each in within if type(each) in _KINDS)
            for each in within:
                yield from containers_in_use(each)


_USERS: tuple[type, ...] = (BuiltinMethodType, type({}.values()), type({}.items()))


# -- lists -----------------------------------------------------------------------------------------------------------
# C code such as heapq changes a list without its methods, so that a copy must be kept: 50 ms for a million entries,
# since each entry's reference count changes.

_copies: dict[int, tuple[list, list]] | None = None  # lists with their copies


@contextmanager
def shared_copies() -> Iterator[None]:
    """Inside, keep the copies of large lists for the snapshots that follow."""
    global _copies
    outer, _copies = _copies, {} if _copies is None else _copies
    try:
        yield
    finally:
        _copies = outer


class _ListState:
    """The entries of a list now: those of a copy, but for some."""

    def __init__(self, value: list) -> None:
        _, self.copy = known = (_copies or {}).get(id(value)) or (value, list.copy(value))
        if _copies is not None:
            _copies[id(value)] = known
        self._length = min(len(value), len(self.copy))
        self._others = {i: list.__getitem__(value, i) for i in _differences(value, self.copy)}
        self._tail = list.__getitem__(value, slice(self._length, None))

    def restore(self, value: list) -> None:
        if len(value) < self._length:
            list.extend(value, self.copy[len(value) : self._length])
        for i in {*_differences(value, self.copy), *self._others}:
            if i < self._length:
                list.__setitem__(value, i, self._others.get(i, self.copy[i]))
        if self._tail or len(value) > self._length:
            list.__setitem__(value, slice(self._length, None), self._tail)


def _differences(a: list, b: list) -> list[int]:
    """The positions, as far as both lists go, at which they hold different objects."""
    return list(_unequal(address_of_entries(a), address_of_entries(b), 0, min(len(a), len(b))))


def _unequal(a: int, b: int, start: int, stop: int) -> Iterator[int]:
    width = ctypes.sizeof(ctypes.c_void_p)
    if start < stop and memcmp(a + width * start, b + width * start, width * (stop - start)) != 0:  # type: ignore[misc]
        middle = (start + stop) // 2
        if middle == start:
            yield start
        else:
            yield from _unequal(a, b, start, middle)
            yield from _unequal(a, b, middle, stop)
