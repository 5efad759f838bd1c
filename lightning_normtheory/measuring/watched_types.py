"""Subclasses of list, deque and dict that report the entries which they hand out, and remember how to undo changes.

What C code reads without these methods is not reported. In CPython that is next to nothing: it does so with lists and
dicts of exactly these types, not with those of a subclass. The exceptions are heapq and torch's operators on lists.
"""

import ctypes
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, ValuesView
from typing import Any
from weakref import WeakMethod

__all__ = ["SUBCLASS", "Watched", "address_of_entries", "memcmp", "set_type", "watched"]

_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None)})
_POINTER = ctypes.sizeof(ctypes.c_void_p)

try:  # five times as fast as `torch.equal` while the memory is in the processor's cache
    memcmp: Callable[[int, int, int], int] | None = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)  # type: ignore[union-attr]
except (TypeError, OSError, AttributeError):  # Windows
    memcmp = None


class Watched:
    """A container that is watched by one or more snapshots, of which each began inside the one before."""

    def __init__(self, container: Any) -> None:
        self.container = container
        self.readers: list[WeakMethod] = []  # one of each snapshot, called with entries
        self.undo: list[tuple[Any, ...]] = []  # functions with arguments, the last one first
        self.new: dict[int, Any] = {}  # entries that were put in since the last snapshot or restore


watched: dict[int, Watched] = {}
# A process that is forked while a container is watched keeps it for good, but there is nobody to restore it for.
os.register_at_fork(after_in_child=watched.clear)


# -- what the methods have in common ---------------------------------------------------------------------------------


def _read(container: Any, entry: Any) -> Any:
    state = watched.get(id(container))
    if state is not None and type(entry) not in _ATOMS and id(entry) not in state.new:
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
    if state is not None:
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
        _undo_by(self, _refill, base, base.copy(self) if base is dict else list(base.__iter__(self)))
        return method(self, *arguments, **options)

    return change


def _refill(container: Any, base: Any, entries: Any) -> None:
    base.clear(container)
    (base.update if base is dict else base.extend)(container, entries)


def _subclass(base: type, methods: dict[str, Any]) -> type:
    return type(base.__name__, (base,), {"__slots__": (), "__hash__": None, **methods})


# -- the subclasses --------------------------------------------------------------------------------------------------


def _list_getitem(self: list, index: Any) -> Any:
    found = list.__getitem__(self, index)
    return list(_read_all(self, found)) if isinstance(index, slice) else _read(self, found)


def _list_setitem(self: list, index: Any, value: Any) -> None:
    if not isinstance(index, slice):
        _put(self, value)
    list.__setitem__(self, index, value)


def _list_append(self: list, value: Any) -> None:
    _put(self, value)
    list.append(self, value)


def _list_sort(self: list, *, key: Any = None, reverse: bool = False) -> None:
    if key is not None:
        deque(self, maxlen=0)  # the key function gets all entries
    list.sort(self, key=key, reverse=reverse)


_List = _subclass(
    list,
    {
        "__getitem__": _list_getitem,
        "__setitem__": _list_setitem,
        "append": _list_append,
        "sort": _list_sort,
        "pop": _hands_out(list, "pop"),
        "copy": lambda self: list(iter(self)),
        "__radd__": lambda self, other: other + list(iter(self)),
        "__reduce_ex__": lambda self, protocol: (list, (), None, iter(self)),
        **{name: _iterates(list, name) for name in ("__iter__", "__reversed__")},
        **{name: _on_a_copy(list, name) for name in ("__add__", "__mul__", "__rmul__")},
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


def _deque_extend(self: deque, values: Iterable[Any]) -> Any:
    for value in list(values):
        _deque_append(self, value)
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
        "extend": lambda self, values: _deque_extend(self, values) and None,
        "extendleft": _deque_extendleft,
        "__iadd__": _deque_extend,
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


def _dict_update(self: dict, *others: Any, **more: Any) -> Any:
    for key, value in dict(*others, **more).items():
        _dict_setitem(self, key, value)
    return self


def _dict_popitem(self: dict) -> tuple[Any, Any]:
    key, value = dict.popitem(self)
    _undo_by(self, dict.__setitem__, key, value)
    return key, _read(self, value)


def _dict_pop(self: dict, *arguments: Any) -> Any:
    return _read(self, _changed_pop(self, *arguments))


_changed_pop = _changes_all(dict, "pop")

_Dict = _subclass(
    dict,
    {
        "__setitem__": _dict_setitem,
        "setdefault": _dict_setdefault,
        "update": lambda self, *others, **more: _dict_update(self, *others, **more) and None,
        "__ior__": _dict_update,
        "popitem": _dict_popitem,
        "pop": _dict_pop,
        "__iter__": lambda self: dict.__iter__(self),  # or C code reads the values directly
        "values": lambda self: ValuesView(self),
        "items": lambda self: ItemsView(self),
        "copy": lambda self: dict(ItemsView(self)),
        "__ror__": lambda self, other: other | dict(ItemsView(self)),
        "__reduce_ex__": lambda self, protocol: (dict, (), None, None, iter(ItemsView(self))),
        "__or__": _on_a_copy(dict, "__or__"),
        **{name: _hands_out(dict, name) for name in ("__getitem__", "get")},
        **{name: _changes_all(dict, name) for name in ("__delitem__", "clear")},
    },
)


# -- the layout of objects -------------------------------------------------------------------------------------------


def set_type(value: Any, new: type) -> None:
    """Change the type of an object to one of the same layout, which python allows for classes of its own language only.

    An object of a class that was made at run time holds a reference to it.
    """
    if type(value) is new:
        return
    old, place = type(value), ctypes.c_void_p.from_address(id(value) + object.__basicsize__ - _POINTER)
    if issubclass(new, old):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(new))
    place.value = id(new)
    if not issubclass(new, old):
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(old))


def address_of_entries(value: list) -> int:
    """The address at which a list keeps the addresses of its entries."""
    return ctypes.c_size_t.from_address(id(value) + object.__basicsize__ + _POINTER).value


def _same_layout(base: Any, new: Any) -> bool:
    """Whether objects of both types are laid out as `set_type` and `address_of_entries` expect."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    example, holder = base(), [base]
    address = id(example) + object.__basicsize__ - _POINTER
    same = all(getattr(base, name) == getattr(new, name) for name in ("__basicsize__", "__itemsize__"))
    if not same or memcmp is None or ctypes.c_void_p.from_address(address).value != id(base):
        return False
    return base is not list or ctypes.c_size_t.from_address(address_of_entries(holder)).value == id(base)


SUBCLASS: dict[type, type] = {
    base: new for base, new in ((list, _List), (deque, _Deque), (dict, _Dict)) if _same_layout(base, new)
}
