"""Subclasses of list, deque and dict that report the entries which they hand out, and remember how to undo changes.

What C code reads without these methods is not reported. In CPython that is next to nothing: it does so with lists and
dicts of exactly these types, not with those of a subclass. The exceptions are heapq and torch's operators on lists, so
heaps and lists of tensors are not watched.
"""

import os
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from typing import Any
from weakref import WeakMethod

from torch.utils._pytree import register_pytree_node

__all__ = ["ATOMS", "SUBCLASS", "Watched", "watched"]

ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None)})


class Watched:
    """A container that is watched by one or more snapshots, of which each began inside the one before."""

    def __init__(self, container: Any, original: Any = None) -> None:
        self.container = container
        self.original = original  # of which the container is a copy
        self.readers: list[WeakMethod] = []  # one of each snapshot, called with entries
        self.undo: list[tuple[Any, ...]] = []  # functions with arguments, the last one first
        self.new: dict[int, Any] = {}  # entries that were put in since the last snapshot or restore
        self.complete = False  # whether `undo` has all entries since then, so that no more is needed


watched: dict[int, Watched] = {}
# A process that is forked while a container is watched keeps it for good, but there is nobody to restore it for.
os.register_at_fork(after_in_child=watched.clear)


# -- what the methods have in common ---------------------------------------------------------------------------------


def _read(container: Any, entry: Any) -> Any:
    state = watched.get(id(container))
    if state is not None and type(entry) not in ATOMS and id(entry) not in state.new:
        for reader in state.readers:
            read = reader()
            if read is not None:
                read(entry)
    return entry


def _read_all(container: Any, entries: Iterable[Any]) -> Iterable[Any]:
    return map(_read, (container for _ in iter(int, 1)), entries) if id(container) in watched else entries


def _put(container: Any, entry: Any) -> None:
    state = watched.get(id(container))
    if state is not None:
        state.new[id(entry)] = entry


def _undo_by(container: Any, *undo: Any) -> None:
    state = watched.get(id(container))
    if state is not None and not state.complete:
        state.undo.append(undo)


def _hands_out(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)
    return lambda self, *arguments: _read(self, method(self, *arguments))


def _iterates(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)
    return lambda self: iter(_read_all(self, method(self)))


def _on_a_copy(base: type, name: str) -> Callable[..., Any]:
    """A method that returns a new container."""
    method = getattr(base, name)
    return lambda self, *arguments: method(self.copy(), *arguments)


def _changes_all(base: Any, name: str) -> Callable[..., Any]:
    """A method whose effect is undone by filling the container anew."""
    method = getattr(base, name)

    def change(self: Any, *arguments: Any, **options: Any) -> Any:
        state = watched.get(id(self))
        if state is not None and not state.complete:
            # Not base.copy: for an object of a subclass it reads each entry by our methods.
            values = list(dict.values(self)) if base is dict else None
            state.undo.append((_refill, base, list(base.__iter__(self)), values))
            state.complete = True
        return method(self, *arguments, **options)

    return change


def _refill(container: Any, base: Any, entries: list, values: list | None) -> None:
    base.clear(container)
    if values is None:
        base.extend(container, entries)
    else:
        base.update(container, zip(entries, values))


def _subclass(base: type, methods: dict[str, Any]) -> type:
    return type(base.__name__, (base,), {"__slots__": (), "__hash__": None, **methods})


# -- the subclasses --------------------------------------------------------------------------------------------------


def _list_getitem(self: list, index: Any) -> Any:
    found = list.__getitem__(self, index)
    return list(_read_all(self, found)) if isinstance(index, slice) else _read(self, found)


def _list_setitem(self: list, index: Any, value: Any) -> None:
    if isinstance(index, slice):
        _changed_slice(self, index, value)
    else:
        _undo_by(self, list.__setitem__, index, list.__getitem__(self, index))
        _put(self, value)
        list.__setitem__(self, index, value)


def _list_delitem(self: list, index: Any) -> None:
    if isinstance(index, slice):
        _deleted_slice(self, index)
    else:
        _list_take(self, index)


def _list_take(self: list, index: Any = -1) -> Any:
    position = range(len(self))[index] if self else 0
    value = list.pop(self, index)
    _undo_by(self, list.insert, position, value)
    return value


def _list_pop(self: list, index: Any = -1) -> Any:
    return _read(self, _list_take(self, index))


def _list_append(self: list, value: Any) -> None:
    _undo_by(self, list.pop)
    _put(self, value)
    list.append(self, value)


def _list_extend(self: list, values: Iterable[Any]) -> None:
    _undo_by(self, list.__delitem__, slice(len(self), None))
    list.extend(self, values)


def _list_iadd(self: list, values: Iterable[Any]) -> list:
    _list_extend(self, values)
    return self


def _list_insert(self: list, index: Any, value: Any) -> None:
    _undo_by(self, list.pop, slice(index, None).indices(len(self))[0])
    _put(self, value)
    list.insert(self, index, value)


def _list_sort(self: list, *, key: Any = None, reverse: bool = False) -> None:
    if key is not None:
        deque(self, maxlen=0)  # the key function gets all entries
    _sorted(self, key=key, reverse=reverse)


_changed_slice, _deleted_slice, _sorted = (_changes_all(list, name) for name in ("__setitem__", "__delitem__", "sort"))


_List = _subclass(
    list,
    {
        "__getitem__": _list_getitem,
        "__setitem__": _list_setitem,
        "__delitem__": _list_delitem,
        "append": _list_append,
        "extend": _list_extend,
        "__iadd__": _list_iadd,
        "insert": _list_insert,
        "sort": _list_sort,
        "pop": _list_pop,
        "copy": lambda self: list(iter(self)),
        "__radd__": lambda self, other: other + list(iter(self)),
        "__reduce_ex__": lambda self, protocol: (list, (), None, iter(self)),
        **{name: _iterates(list, name) for name in ("__iter__", "__reversed__")},
        **{name: _on_a_copy(list, name) for name in ("__add__", "__mul__", "__rmul__")},
        **{name: _changes_all(list, name) for name in ("__imul__", "clear", "remove", "reverse")},
    },
)


def _deque_append(self: deque, value: Any) -> None:
    if len(self) == self.maxlen:
        _undo_by(self, deque.appendleft, deque.__getitem__(self, 0))
    else:
        _undo_by(self, deque.pop)
    _put(self, value)
    deque.append(self, value)


def _deque_appendleft(self: deque, value: Any) -> None:
    if len(self) == self.maxlen:
        _undo_by(self, deque.append, deque.__getitem__(self, -1))
    else:
        _undo_by(self, deque.popleft)
    _put(self, value)
    deque.appendleft(self, value)


def _deque_extend(self: deque, values: Iterable[Any]) -> None:
    for value in list(values):
        _deque_append(self, value)


def _deque_iadd(self: deque, values: Iterable[Any]) -> deque:
    _deque_extend(self, values)
    return self


def _deque_extendleft(self: deque, values: Iterable[Any]) -> None:
    for value in list(values):
        _deque_appendleft(self, value)


def _deque_setitem(self: deque, index: Any, value: Any) -> None:
    _undo_by(self, deque.__setitem__, index, deque.__getitem__(self, index))
    _put(self, value)
    deque.__setitem__(self, index, value)


def _deque_pop(self: deque) -> Any:
    value = _read(self, deque.pop(self))
    _undo_by(self, deque.append, value)
    return value


def _deque_popleft(self: deque) -> Any:
    value = _read(self, deque.popleft(self))
    _undo_by(self, deque.appendleft, value)
    return value


def _deque_rotate(self: deque, n: int = 1) -> None:
    deque.rotate(self, n)
    _undo_by(self, deque.rotate, -n)


_Deque = _subclass(
    deque,
    {
        "append": _deque_append,
        "appendleft": _deque_appendleft,
        "extend": _deque_extend,
        "extendleft": _deque_extendleft,
        "__iadd__": _deque_iadd,
        "__setitem__": _deque_setitem,
        "pop": _deque_pop,
        "popleft": _deque_popleft,
        "rotate": _deque_rotate,
        "__getitem__": _hands_out(deque, "__getitem__"),
        "copy": lambda self: deque(iter(self), self.maxlen),
        "__copy__": lambda self: deque(iter(self), self.maxlen),
        "__reduce_ex__": lambda self, protocol: (deque, ((), self.maxlen), None, iter(self)),
        **{name: _iterates(deque, name) for name in ("__iter__", "__reversed__")},
        **{name: _on_a_copy(deque, name) for name in ("__add__", "__mul__", "__rmul__")},
        **{
            name: _changes_all(deque, name)
            for name in ("__delitem__", "__imul__", "clear", "insert", "remove", "reverse")
        },
    },
)


def _dict_setitem(self: dict, key: Any, value: Any) -> None:
    if dict.__contains__(self, key):
        _undo_by(self, dict.__setitem__, key, dict.__getitem__(self, key))
    else:
        _undo_by(self, dict.__delitem__, key)
    _put(self, value)
    dict.__setitem__(self, key, value)


def _dict_setdefault(self: dict, key: Any, default: Any = None) -> Any:
    if not dict.__contains__(self, key):
        _dict_setitem(self, key, default)
    return _read(self, dict.__getitem__(self, key))


def _dict_update(self: dict, *others: Any, **more: Any) -> None:
    for key, value in dict(*others, **more).items():
        _dict_setitem(self, key, value)


def _dict_ior(self: dict, other: Any) -> dict:
    _dict_update(self, other)
    return self


def _dict_popitem(self: dict) -> tuple[Any, Any]:
    key, value = dict.popitem(self)
    _undo_by(self, dict.__setitem__, key, value)
    return key, _read(self, value)


def _dict_pop(self: dict, *arguments: Any) -> Any:
    return _read(self, _changed_pop(self, *arguments))


_changed_pop = _changes_all(dict, "pop")


class _Values(ValuesView):
    """With the methods of a dict's own view that the abstract one lacks."""

    def __reversed__(self) -> Iterator[Any]:
        return (self._mapping[key] for key in dict.__reversed__(self._mapping))  # type: ignore[attr-defined]


class _Items(ItemsView):
    """The same for items."""

    def __reversed__(self) -> Iterator[tuple[Any, Any]]:
        return ((key, self._mapping[key]) for key in dict.__reversed__(self._mapping))  # type: ignore[attr-defined]


_Dict = _subclass(
    dict,
    {
        "__setitem__": _dict_setitem,
        "setdefault": _dict_setdefault,
        "update": _dict_update,
        "__ior__": _dict_ior,
        "popitem": _dict_popitem,
        "pop": _dict_pop,
        "__iter__": lambda self: dict.__iter__(self),  # or C code reads the values directly
        "values": lambda self: _Values(self),
        "items": lambda self: _Items(self),
        "copy": lambda self: dict(ItemsView(self)),
        "__ror__": lambda self, other: other | dict(ItemsView(self)),
        "__reduce_ex__": lambda self, protocol: (dict, (), None, None, iter(ItemsView(self))),
        "__or__": _on_a_copy(dict, "__or__"),
        **{name: _hands_out(dict, name) for name in ("__getitem__", "get")},
        **{name: _changes_all(dict, name) for name in ("__delitem__", "clear")},
    },
)


# torch's trees (vmap, functional_call, tree_map) take an object of an unknown class for a leaf.
register_pytree_node(_List, lambda x: (list(x), None), lambda values, _: list(values))
register_pytree_node(_Deque, lambda x: (list(x), x.maxlen), lambda values, maxlen: deque(values, maxlen))
register_pytree_node(_Dict, lambda x: (list(x.values()), list(x)), lambda values, keys: dict(zip(keys, values)))


SUBCLASS: dict[type, type] = {list: _List, deque: _Deque, dict: _Dict}
