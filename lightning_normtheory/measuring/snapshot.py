"""Remember and restore the mutable state reachable from some objects.

The user's code computes the loss. It may also count batches, collect outputs in a list, update a metric, move BatchNorm
statistics. A diagnostic that runs this code must undo all of that.
"""

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import compress
from operator import is_, not_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from lightning_normtheory.measuring.interrupts import uninterrupted
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.same_bits import same_bits, same_bytes
from lightning_normtheory.measuring.watched import (
    Place,
    Watch,
    containers_in_use,
    is_lent,
    lend,
    original_of,
    several_watch,
)
from lightning_normtheory.measuring.workspace import copy_of, give_back

__all__ = ["Snapshot"]

# Objects of these packages belong to the machinery around the model (trainer, loggers, optimizers), whose state no
# forward pass changes; walking into them would copy half the program. Exceptions: modules, datasets and samplers.
_MACHINERY = frozenset({"torch", "pytorch_lightning", "lightning", "lightning_fabric", "wandb", "numpy", "builtins"})
# What other threads and processes work with meanwhile: a queue of a loader's workers that is set back loses messages.
_MACHINERY |= {"multiprocessing", "threading", "_thread", "concurrent", "asyncio", "socket", "subprocess"}
# Our own objects lead to the trainer's loaders. Recipes are users' code.
_OURS, _RECIPES = "lightning_normtheory.", "lightning_normtheory.recipes."
_ATOMS = (str, bytes, int, float, complex, type(None))
_PLAIN = frozenset({dict, list, deque, set, tuple, frozenset})
_EMPTIED = frozenset({dict, OrderedDict, list, deque, set})


class Snapshot:
    """Remember the current state of ``roots``; `restore` brings it back and keeps the identity of every object.

    Covers attributes of objects, lists, dicts, sets, deques, tensors, numpy arrays and random generators, nested in any
    way; parameters and buffers are attributes. Unchanged objects are not written to.

    Args:
        roots: where to start, usually one `torch.nn.Module`.
        arrays: whether to copy the contents of tensors and numpy arrays. Pass False for a dataset: reading a sample
            does not write to the data, which may be large.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> layer.history = [1.0]
        >>> before = Snapshot(layer)
        >>> _ = layer(torch.randn(8, 2)); layer.history.append(2.0)
        >>> _ = before.restore()
        >>> layer.running_mean.tolist(), int(layer.num_batches_tracked), layer.history
        ([0.0, 0.0], 0, [1.0])
    """

    def __init__(self, *roots: Any, arrays: bool = True) -> None:
        self._arrays = arrays
        self._undo: list[Callable[[], object]] = []
        self._empty: list[Any] = []  # containers; most of a module's are
        # Tensors, their memory and its copy: restored after all references.
        self._contents: list[tuple[Tensor, Tensor, Tensor]] = []
        # No closure refers to the snapshot itself: the copies are freed with it, not by the garbage collector.
        self._changed: list[Tensor] = []
        # Keeps the objects alive, so that each id stays that of one object.
        self._seen: dict[int, Any] = {}
        self._watches: list[Watch] = []
        self._copies: dict[int, Any] = {}  # of large containers, by the id of the original
        self._found: list[Place] = []  # places of large containers, in the walk that is going on
        self._lent: list[Place] = []  # the same in which a copy is now
        try:
            self._walk(*roots)
        except BaseException:
            self.close()
            raise

    def _walk(self, *roots: Any) -> None:
        # An explicit stack: user objects may be nested deeper than python's recursion limit.
        stack: list[Any] = list(roots)
        while stack:
            value = stack.pop()
            if not isinstance(value, _ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                stack.extend(self._remember(value))
        if self._found:
            with uninterrupted():  # or nobody would take a copy back
                self._lend()

    def _lend(self) -> None:
        """Put copies in place of large containers, unless one is also where it cannot be replaced."""
        found, self._found = self._found, []
        for place in found:
            original = place.original
            if id(original) in self._seen and place.before is original:
                continue
            if id(original) not in self._copies:
                self._copies[id(original)] = copy = lend(original)
                if id(copy) not in self._seen:
                    self._watch(copy)
                    self._seen[id(copy)] = copy
            self._lent.append(place)
            place.replace(original, self._copies[id(original)])

    def _watch(self, container: Any) -> None:
        self._watches.append(Watch(container, self._walk))

    def _take_back(self) -> None:
        """Put large containers back in place of their copies."""
        while self._lent:
            place = self._lent.pop()
            copy = self._copies[id(place.original)]
            # A copy that was there before stays, unless the snapshot that has lent it is closed already.
            if place.before is not copy or not several_watch(copy):
                place.replace(copy, place.original)

    def restore(self) -> list[Tensor]:
        """Restore everything as `reset` does, for the last time: large containers are back in their places."""
        restored = False
        try:
            with uninterrupted():
                self._take_back()
                changed = self.reset()
                restored = True
            return changed
        finally:
            self.close(restored=restored)

    def release(self) -> None:
        """Give the memory of the copies back. Nothing can be restored afterwards."""
        # Where memory has run out, a copy itself may have become the contents.
        give_back(*(saved for tensor, _, saved in self._contents if tensor.data_ptr() != saved.data_ptr()))
        self._contents.clear()

    def close(self, *, restored: bool = False) -> None:
        """Put large containers back in their places, and restore nothing else."""
        with uninterrupted():
            self._take_back()
            while self._copies:
                self._seen.pop(id(self._copies.popitem()[1]), None)
            while self._watches:
                self._watches.pop().close(restored=restored)

    __del__ = close

    def reset(self, *, contents: bool = True) -> list[Tensor]:
        """Restore everything that has changed since, and raise the first error at the end, if there was one.

        An interrupt is deferred until all is restored.

        Args:
            contents: whether those of tensors, too; to compare them takes most of the time.

        Returns:
            The tensors whose contents had changed.
        """
        errors = []
        self._changed.clear()
        with uninterrupted():
            for undo in [*(watch.restore for watch in self._watches), *self._undo]:
                try:
                    undo()
                except Exception as error:  # noqa: BLE001  # raised below
                    errors.append(error)
            for container in filter(len, self._empty):
                container.clear()
            kept = self._contents if contents else []
            same = same_bits([(memory, saved) for _, memory, saved in kept])
            for tensor, memory, saved in compress(kept, map(not_, same)):
                try:
                    memory.copy_(saved)
                    self._changed.append(tensor)
                except Exception as error:  # noqa: BLE001  # raised below
                    errors.append(error)
        if errors:
            raise errors[0]
        return list(self._changed)

    def _remember(self, value: Any) -> Iterable[Any]:
        """Record how to restore ``value`` and return its contents."""
        if isinstance(value, Tensor):
            self._remember_tensor(value)
            return ()
        if type(value) in _EMPTIED and not value:
            self._empty.append(value)
            # Most are plain containers, as those of every module, which have no attributes.
            return () if type(value) in _PLAIN else self._remember_attributes(value)
        if self._remember_generator(value) or self._remember_ndarray(value):
            return ()
        if is_lent(value):
            with uninterrupted():  # or nobody would end it
                self._watch(value)
            return ()
        inside: list[Any] = []
        if isinstance(value, dict):
            inside += self._remember_dict(value)
        elif isinstance(value, (list, deque, set)):
            inside += self._remember_collection(value)
        elif isinstance(value, (tuple, frozenset)):
            inside += value
        if type(value) not in _PLAIN and _is_users_object(value, datasets=not self._arrays):
            inside += self._remember_attributes(value)
        if not isinstance(value, (nn.Module, dict, list, deque, set, tuple, frozenset)):
            inside += containers_in_use(value)
        return inside

    def _without_large(self, saved: list[Any], place: Callable[[int], "Place"]) -> list[Any]:
        """Note the places of large containers, in which copies can be, and return what is in the others."""
        inside = []
        for i, value in enumerate(saved):
            original = original_of(value)
            if original is not None and (found := place(i)).now() is value:
                found.original = original
                self._found.append(found)
            else:
                inside.append(value)
        return inside

    def _remember_tensor(self, tensor: Tensor) -> None:
        if is_lazy(tensor) or tensor.is_meta:
            return
        # The same memory with its own version counter: writing through it does not invalidate a graph of the user that
        # waits for its backward pass.
        memory = tensor.data
        saved = copy_of(memory) if self._arrays else None
        flag, gradient = (tensor.requires_grad, tensor.grad) if tensor.is_leaf else (None, None)
        changed, strided = self._changed, tensor.layout == torch.strided

        def undo() -> None:
            if tensor.layout != torch.strided:
                tensor.data = memory if saved is None else _copy(saved)
            elif _layout(tensor) != _layout(memory):
                tensor.data = memory
                changed.append(tensor)
            if flag is not None:
                tensor.requires_grad_(flag)
                tensor.grad = gradient

        self._undo.append(undo)
        if saved is not None and strided:
            self._contents.append((tensor, memory, saved))

    def _remember_dict(self, value: dict) -> Iterable[Any]:
        keys, items = list(value), list(value.values())

        def undo() -> None:
            if len(value) != len(keys) or not all(map(is_, value, keys)) or not all(map(is_, value.values(), items)):
                value.clear()
                for key, item in zip(keys, items):
                    value[key] = item

        self._undo.append(undo)

        def place(i: int) -> Place:
            return Place(items, i, partial(dict.get, value, keys[i]), partial(dict.__setitem__, value, keys[i]))

        return self._without_large(items, place)

    def _remember_collection(self, value: Any) -> Iterable[Any]:
        saved = list(value)

        def undo() -> None:
            if len(value) != len(saved) or not all(map(is_, value, saved)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(saved)

        self._undo.append(undo)
        kind: Any = list if isinstance(value, list) else deque

        def place(i: int) -> Place:
            return Place(saved, i, partial(kind.__getitem__, value, i), partial(kind.__setitem__, value, i))

        return self._without_large(saved, place)

    def _remember_attributes(self, value: Any) -> Iterator[Any]:
        """The objects that an object, a function or a method refers to."""
        if isinstance(value, MethodType):
            yield from (value.__self__, value.__func__)
            return
        if isinstance(value, partial):
            yield from (value.func, value.args, value.keywords)
        if isinstance(value, FunctionType):
            yield from (value.__closure__, value.__defaults__, value.__kwdefaults__)
        if type(getattr(value, "__dict__", None)) is dict:
            yield vars(value)
            if isinstance(value, nn.Module):
                yield from (value._parameters, value._buffers, value._modules)
        names = [name for name in _slots(type(value)) if hasattr(value, name)]
        saved = [getattr(value, name) for name in names]

        def undo(i: int) -> None:
            object.__setattr__(value, names[i], saved[i])

        self._undo += [partial(undo, i) for i in range(len(names))]

        def place(i: int) -> Place:
            return Place(saved, i, partial(getattr, value, names[i]), partial(object.__setattr__, value, names[i]))

        yield from self._without_large(saved, place)

    def _remember_generator(self, value: Any) -> bool:
        numpy_random = sys.modules.get("numpy.random")
        if isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(lambda: value.set_state(state))
        elif isinstance(value, random.Random):
            python_state = value.getstate()
            self._undo.append(lambda: value.setstate(python_state))
        elif numpy_random is not None and isinstance(value, numpy_random.Generator):
            bits = value.bit_generator
            bit_state = bits.state
            self._undo.append(lambda: setattr(bits, "state", bit_state))
        elif numpy_random is not None and isinstance(value, numpy_random.RandomState):
            numpy_state = value.get_state()
            self._undo.append(lambda: value.set_state(numpy_state))
        else:
            return False
        return True

    def _remember_ndarray(self, value: Any) -> bool:
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(value, numpy.ndarray):
            return False
        if self._arrays and value.flags.writeable:
            saved = value.copy()

            def undo() -> None:
                if not same_bytes(value, saved):
                    value[...] = saved

            self._undo.append(undo)
        return True


def _layout(tensor: Tensor) -> tuple:
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _copy(saved: Tensor) -> Tensor:
    """A copy, or the saved tensor itself if there is no memory for one."""
    try:
        return saved.clone()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return saved


# Weak: some classes are made for one model, as by parametrizations, and go with it.
_slots_of: WeakKeyDictionary[type, list[str]] = WeakKeyDictionary()


def _slots(kind: type) -> list[str]:
    if kind not in _slots_of:
        _slots_of[kind] = ["cell_contents"] if kind is CellType else _declared_slots(kind)
    return _slots_of[kind]


def _declared_slots(kind: type) -> list[str]:
    declared = [getattr(base, "__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_users_object(value: Any, datasets: bool) -> bool:
    if isinstance(value, (nn.Module, Sampler, LRScheduler, GradScaler, MethodType, CellType, partial)):
        return True
    if isinstance(value, Dataset):
        return datasets
    # A snapshot that is open has the originals of which copies are lent.
    if isinstance(value, (type, ModuleType, Snapshot)):
        return False
    if isinstance(value, FunctionType):
        return not _is_machinery(value.__module__ or "")
    own = [base for base in type(value).__mro__ if base not in (object, dict, list, set, deque, tuple, frozenset)]
    return not any(_is_machinery(base.__module__) for base in own)


def _is_machinery(module: str) -> bool:
    return module.split(".")[0] in _MACHINERY or (module.startswith(_OURS) and not module.startswith(_RECIPES))
