"""Remember and restore the mutable state reachable from some objects.

The user's code computes the loss. It may also count batches, collect outputs in a list, update a metric, move BatchNorm
statistics. A diagnostic that runs this code must undo all of that.
"""

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from lightning_normtheory.measuring.interrupts import uninterrupted
from lightning_normtheory.measuring.watched import Watch, containers_in_use, watchable
from lightning_normtheory.measuring.watched_types import memcmp as _memcmp

__all__ = ["Snapshot"]

# Objects of these packages belong to the machinery around the model (trainer, loggers, optimizers), whose state no
# forward pass changes; walking into them would copy half the program. Exceptions: modules, datasets and samplers.
_MACHINERY = frozenset({"torch", "pytorch_lightning", "lightning", "lightning_fabric", "wandb", "numpy", "builtins"})
_ATOMS = (str, bytes, int, float, complex, type(None))


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
        self._changed: list[Tensor] = []
        # Keeps the objects alive, so that each id stays that of one object.
        self._seen: dict[int, Any] = {}
        self._watches: dict[int, Watch] = {}
        self._in_full: set[int] = set()
        try:
            for root in roots:
                self._walk(root)
        except BaseException:
            self.close()
            raise

    def _walk(self, root: Any) -> None:
        # An explicit stack: user objects may be nested deeper than python's recursion limit.
        stack: list[Any] = [root]
        while stack:
            value = stack.pop()
            if not isinstance(value, _ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                stack.extend(self._remember(value))

    def restore(self) -> list[Tensor]:
        """Restore everything as `reset` does, for the last time: no longer watch large containers."""
        try:
            return self.reset()
        finally:
            self.close()

    def close(self) -> None:
        """No longer watch large containers."""
        with uninterrupted():
            while self._watches:
                self._watches.popitem()[1].close()

    __del__ = close

    def reset(self) -> list[Tensor]:
        """Restore everything that has changed since, and raise the first error at the end, if there was one.

        An interrupt is deferred until all is restored.

        Returns:
            The tensors whose contents had changed.
        """
        errors = []
        self._changed = []
        with uninterrupted():
            for undo in [watch.restore for watch in self._watches.values()] + self._undo:
                try:
                    undo()
                except Exception as error:  # noqa: BLE001  # raised below
                    errors.append(error)
        if errors:
            raise errors[0]
        return self._changed

    def _remember(self, value: Any) -> Iterable[Any]:
        """Record how to restore ``value`` and return its contents."""
        if isinstance(value, Tensor):
            self._remember_tensor(value)
            return ()
        if self._remember_generator(value) or self._remember_ndarray(value):
            return ()
        if watchable(value) and id(value) not in self._in_full:
            with uninterrupted():  # or nobody would end it
                self._watches[id(value)] = Watch(value, self._walk)
            return ()
        inside: list[Any] = []
        if isinstance(value, dict):
            inside += self._remember_dict(value)
        elif isinstance(value, (list, deque, set)):
            inside += self._remember_collection(value)
        elif isinstance(value, (tuple, frozenset)):
            inside += value
        if _is_users_object(value, datasets=not self._arrays):
            inside += self._remember_attributes(value)
        if not isinstance(value, (nn.Module, dict, list, deque, set, tuple, frozenset)):
            for container in containers_in_use(value):
                inside += self._all_of(container)
        return inside

    def _all_of(self, container: Any) -> list[Any]:
        """Return the container, to be walked through whatever its size."""
        self._in_full.add(id(container))
        if id(container) in self._watches:
            self._watches.pop(id(container)).close()
            del self._seen[id(container)]
        return [container]

    def _remember_tensor(self, tensor: Tensor) -> None:
        if is_lazy(tensor) or tensor.is_meta:
            return
        # The same memory with its own version counter: writing through it does not invalidate a graph of the user that
        # waits for its backward pass.
        memory = tensor.data
        saved = memory.clone() if self._arrays else None
        flag, gradient = (tensor.requires_grad, tensor.grad) if tensor.is_leaf else (None, None)

        def undo() -> None:
            if tensor.layout != torch.strided:
                tensor.data = memory if saved is None else saved.clone()
            elif _layout(tensor) != _layout(memory):
                tensor.data = memory
                self._changed.append(tensor)
            if saved is not None and tensor.layout == torch.strided and not _same_bits(memory, saved):
                memory.copy_(saved)
                self._changed.append(tensor)
            if flag is not None:
                tensor.requires_grad_(flag)
                tensor.grad = gradient

        self._undo.append(undo)

    def _remember_dict(self, value: dict) -> Iterable[Any]:
        keys, items = list(value), list(value.values())

        def undo() -> None:
            if len(value) != len(keys) or not all(map(is_, value, keys)) or not all(map(is_, value.values(), items)):
                value.clear()
                for key, item in zip(keys, items):
                    value[key] = item

        self._undo.append(undo)
        return items

    def _remember_collection(self, value: Any) -> Iterable[Any]:
        saved = list(value)

        def undo() -> None:
            if len(value) != len(saved) or not all(map(is_, value, saved)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(saved)

        self._undo.append(undo)
        return saved

    def _remember_attributes(self, value: Any) -> Iterator[Any]:
        """The objects that an object, a function or a method refers to."""
        if isinstance(value, MethodType):
            yield from (value.__self__, value.__func__)
            return
        if isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        if isinstance(value, FunctionType):
            yield from (value.__closure__, value.__defaults__, value.__kwdefaults__)
        if type(getattr(value, "__dict__", None)) is dict:
            yield from self._all_of(vars(value))
            if isinstance(value, nn.Module):
                for names in (value._parameters, value._buffers, value._modules):
                    yield from self._all_of(names)
        for name in _slots(value):
            if hasattr(value, name):
                saved = getattr(value, name)
                self._undo.append(functools.partial(object.__setattr__, value, name, saved))
                yield saved

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
                if not _same_bytes(value, saved):
                    value[...] = saved

            self._undo.append(undo)
        return True


def _layout(tensor: Tensor) -> tuple:
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality under which a NaN equals itself and 0.0 is not -0.0."""
    if _memcmp is not None and a.device.type == "cpu" and a.is_contiguous() and b.is_contiguous():
        return _memcmp(a.data_ptr(), b.data_ptr(), a.numel() * a.element_size()) == 0
    # Eight bytes at a time if the memory allows it.
    unit = torch.int64 if a.numel() * a.element_size() % 8 == 0 and a.data_ptr() % 8 == 0 else torch.uint8
    return torch.equal(*(x.contiguous().reshape(-1).view(unit) for x in (a, b)))


def _same_bytes(a: Any, b: Any) -> bool:
    """The same for numpy arrays, of which b is contiguous."""
    if _memcmp is not None and a.flags.c_contiguous and a.nbytes == b.nbytes > 4096:  # else the overhead is larger
        return _memcmp(a.ctypes.data, b.ctypes.data, a.nbytes) == 0
    return bool(a.tobytes() == b.tobytes())


def _slots(value: Any) -> list[str]:
    if isinstance(value, CellType):
        return ["cell_contents"]
    declared = [getattr(base, "__slots__", ()) for base in type(value).__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_users_object(value: Any, datasets: bool) -> bool:
    if isinstance(value, (nn.Module, Sampler, LRScheduler, GradScaler, MethodType, CellType, functools.partial)):
        return True
    if isinstance(value, Dataset):
        return datasets
    if isinstance(value, (type, ModuleType)):
        return False
    if isinstance(value, FunctionType):
        return (value.__module__ or "").split(".")[0] not in _MACHINERY
    own = [base for base in type(value).__mro__ if base not in (object, dict, list, set, deque, tuple, frozenset)]
    return not any(base.__module__.split(".")[0] in _MACHINERY for base in own)
