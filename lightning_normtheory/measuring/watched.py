"""Watch large containers: know which entries are taken out of them, and undo what is done to them.

A replay buffer may hold a million transitions, of which a step reads a few dozen. To remember all of them costs a
hundred times what the step costs. So a large list, deque or dict becomes, as long as it is watched, an object of a
subclass that reports each entry which it hands out; only these are remembered. The object stays the same, only its type
changes.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType
from typing import Any
from weakref import WeakMethod

from torch import Tensor

from lightning_normtheory.measuring.watched_types import (
    ATOMS,
    SUBCLASS,
    EntriesOf,
    Watched,
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
        state.complete = False
        state.readers.append(self._read)
        if id(container) not in watched:
            watched[id(container)] = state
            # One that the program made of a watched one's type has it already.
            set_type(container, SUBCLASS.get(type(container), type(container)))

    def restore(self) -> None:
        """Put the entries back, in their order."""
        state = self._state
        state.new.clear()
        state.complete = False
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
    """Whether ``value`` is a list, a deque or a dict of many entries, and no list of tensors and no heap.

    Operators such as ``torch._foreach_add_`` write into all tensors of a list, and read it without its methods; heapq
    takes entries out of it.
    """
    if type(value) not in _KINDS or len(value) < MANY:
        return False
    return not isinstance(value, list) or not (isinstance(list.__getitem__(value, 0), Tensor) or _may_be_heap(value))


def _may_be_heap(value: list) -> bool:
    """Whether the first entries are ordered as in a heap, and can be written to."""
    first = list.__getitem__(value, slice(MANY))
    if type(first[0]) in ATOMS:
        return False
    try:
        return not any(first[i] < first[(i - 1) // 2] for i in range(1, len(first)))
    except Exception:  # noqa: BLE001  # entries that cannot be compared
        return False


def containers_in_use(value: Any) -> Iterator[Any]:
    """Yield the containers that an iterator, a view or a bound method such as ``buffer.append`` works on by itself."""
    stack, seen = [value], {id(value)}  # a generator of an object may refer to the object, and that to it
    while stack:
        user = stack.pop()
        if isinstance(user, _USERS) or hasattr(type(user), "__next__"):
            for inside in gc.get_referents(user):
                within = inside if isinstance(inside, tuple) else (inside,)  # zip has a tuple of iterators
                yield from (each for each in within if type(each) in _KINDS)
                stack += [each for each in within if id(each) not in seen]
                seen.update(map(id, within))


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


def _differences(value: list, copy: list) -> list[int]:
    """The positions, as far as both lists go, at which they hold different objects."""
    return list(_unequal(EntriesOf(value), EntriesOf(copy), 0, min(len(value), len(copy))))


def _unequal(value: EntriesOf, copy: EntriesOf, start: int, stop: int) -> Iterator[int]:
    if start < stop and not value.equal(copy, start, stop):
        middle = (start + stop) // 2
        if middle == start:
            yield start
        else:
            yield from _unequal(value, copy, start, middle)
            yield from _unequal(value, copy, middle, stop)
