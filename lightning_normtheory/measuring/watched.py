"""Watch large containers: know which entries are taken out of them, and undo what is done to them.

A replay buffer may hold a million transitions, of which a step reads a few dozen. To remember all of them costs a
hundred times what the step costs. So as long as a snapshot is open, a copy of a large list, deque or dict is in its
place, of a subclass that reports each entry which it hands out; only these are remembered. The original is not touched.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from operator import is_
from types import BuiltinMethodType
from typing import Any
from weakref import WeakMethod

from torch import Tensor

from lightning_normtheory.measuring.watched_types import ATOMS, SUBCLASS, Watched, watched

__all__ = [
    "MANY",
    "Place",
    "Watch",
    "containers_in_use",
    "is_lent",
    "lend",
    "original_of",
    "several_watch",
    "shared_copies",
]

# Smaller containers are walked through.
MANY = 1000
_LENT = frozenset(SUBCLASS.values())
_KINDS = _LENT | frozenset(SUBCLASS)

# -- copies ----------------------------------------------------------------------------------------------------------

_copies: dict[int, tuple[Any, Any]] | None = None  # containers with copies that are not lent now


@contextmanager
def shared_copies() -> Iterator[None]:
    """Inside, keep the copies of large containers for the snapshots that follow."""
    global _copies
    outer, _copies = _copies, {} if _copies is None else _copies
    try:
        yield
    finally:
        _copies = outer


def lend(original: Any) -> Any:
    """Return a copy of a large container that can be watched; the same one to all snapshots that are open."""
    for state in watched.copy().values():
        if state.original is original:
            return state.container
    _, copy = (_copies or {}).pop(id(original), (None, None))
    if copy is None or _ends(copy) != _ends(original):
        new = SUBCLASS[type(original)]
        copy = new(original, original.maxlen) if isinstance(original, deque) else new(original)
    watched[id(copy)] = Watched(copy, original)
    return copy


def _ends(container: Any) -> tuple[int, ...]:
    """What shows, without reading all entries, that another thread has changed a container since it was copied."""
    base: Any = next(each for each in SUBCLASS if isinstance(container, each))
    first, last = next(base.__iter__(container), None), next(base.__reversed__(container), None)
    return len(container), id(first), id(last)


# -- watching --------------------------------------------------------------------------------------------------------


class Watch:
    """Watch a container for a snapshot that begins now.

    Args:
        container: see `is_lent`.
        read: a method, called with each entry before the program gets it. It is not kept alive.
    """

    def __init__(self, container: Any, read: Callable[[Any], object]) -> None:
        self._read = WeakMethod(read)
        self._state = state = watched.setdefault(id(container), Watched(container))
        # heapq changes a list without its methods.
        self._entries: list | None = None
        if isinstance(container, list) and container and _ordered(list.__getitem__(container, 0)):
            same = state.original is not None and (not state.readers or _same(container, state.original))
            self._entries = state.original if same else list.copy(container)
        self._position = len(state.undo)
        state.new.clear()
        state.complete = False
        state.readers.append(self._read)

    def restore(self) -> None:
        """Put the entries back, in their order."""
        state = self._state
        state.new.clear()
        state.complete = False
        while len(state.undo) > self._position:
            function, *arguments = state.undo.pop()
            function(state.container, *arguments)
        if self._entries is not None and not _same(state.container, self._entries):
            list.__setitem__(state.container, slice(None), self._entries)

    def close(self, *, restored: bool) -> None:
        """Watch no longer; a copy that is as it was lent can be lent again."""
        state = self._state
        others = [each for each in state.readers if each is not self._read]
        if len(others) < len(state.readers):
            state.readers = others
            if not others:
                watched.pop(id(state.container), None)
                if restored and not state.undo and state.original is not None and _copies is not None:
                    _copies[id(state.original)] = state.original, state.container


def _ordered(entry: Any) -> bool:
    """Whether such an entry may be smaller than another one, as heapq needs it. Arrays of several numbers are not."""
    first = entry
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    if isinstance(first, Tensor) or type(first).__module__ == "numpy":
        return prod(getattr(first, "shape", ())) == 1
    return not isinstance(entry, dict) and type(entry).__lt__ is not vars(object)["__lt__"]


def _same(value: list, entries: list) -> bool:
    return len(value) == len(entries) and all(map(is_, list.__iter__(value), entries))


def is_lent(value: Any) -> bool:
    """Whether ``value`` is a copy that another snapshot has lent, or of its type."""
    return type(value) in _LENT


def several_watch(copy: Any) -> bool:
    """Whether several snapshots watch a copy."""
    return id(copy) in watched and len(watched[id(copy)].readers) > 1


class Place:
    """A place that refers to an object: a value in a dict, an entry of a list or deque, a slot, a closure's cell.

    Args:
        saved: what a snapshot restores in this place and others.
        index: of this place in ``saved``.
        now: returns what is in the place.
        write: puts an object into it.
    """

    def __init__(self, saved: list[Any], index: int, now: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.before = self.original = saved[index]
        self.now = now
        self._saved, self._index, self._write = saved, index, write

    def replace(self, old: Any, new: Any) -> None:
        """Put ``new`` into what is saved, and into the place if ``old`` is there."""
        self._saved[self._index] = new
        with suppress(IndexError, AttributeError, ValueError):  # a step has removed the place
            if self.now() is old:
                self._write(new)


def original_of(value: Any) -> Any:
    """Return the container of which ``value`` is a copy that is lent now, or itself if a copy can be lent, or ``None``.

    Copies are lent of lists, deques and dicts of many entries, but not of lists of tensors and not of heaps: operators
    such as ``torch._foreach_add_`` write into all tensors of a list, and read it without its methods; heapq takes
    entries out of it.
    """
    if type(value) in _LENT:
        return watched[id(value)].original if id(value) in watched else None
    if type(value) not in SUBCLASS or len(value) < MANY:
        return None
    if isinstance(value, list) and (isinstance(value[0], Tensor) or _may_be_heap(value)):
        return None
    return value


def _may_be_heap(value: list) -> bool:
    """Whether the first entries are ordered as in a heap, and can be written to."""
    first = value[:MANY]
    if all(type(each) in ATOMS for each in (first[0] if type(first[0]) is tuple else first[:1])):
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
