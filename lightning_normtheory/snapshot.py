"""Remember the mutable state reachable from some objects, and put it back.

The loss of a user's model is whatever its own code computes. That code may count batches, collect outputs in a list,
update a metric, move BatchNorm statistics. A diagnostic that runs it must leave none of this behind.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

__all__ = ["Snapshot"]

# Objects of these packages belong to the machinery around the model (trainer, loggers, optimizers), whose state no
# forward pass changes; walking into them would copy half the program. Modules and datasets are the exceptions.
_MACHINERY = frozenset({"torch", "pytorch_lightning", "lightning", "lightning_fabric", "wandb", "numpy", "builtins"})
_ATOMS = (str, bytes, int, float, complex, type(None))


class Snapshot:
    """The state of ``roots`` at this moment; `restore` brings it back, keeping the identity of every object.

    Covered are attributes of objects, lists, dicts, sets, deques, tensors, numpy arrays and random generators, however
    they are nested; parameters and buffers are attributes like any other. What was not changed is not written.

    Args:
        roots: where to start, usually one `torch.nn.Module`.
        arrays: whether the contents of tensors and numpy arrays are copied. A dataset is walked without: reading a
            sample does not write into the data, which may be large.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> layer.history = [1.0]
        >>> before = Snapshot(layer)
        >>> _ = layer(torch.randn(8, 2)); layer.history.append(2.0)
        >>> before.restore()
        >>> layer.running_mean.tolist(), int(layer.num_batches_tracked), layer.history
        ([0.0, 0.0], 0, [1.0])
    """

    def __init__(self, *roots: Any, arrays: bool = True) -> None:
        self._arrays = arrays
        self._undo: list[Callable[[], object]] = []
        # The objects are kept alive until the end, so that an id stays the name of one object.
        self._seen: dict[int, Any] = {}
        # A walk with a stack of its own: user objects may be nested deeper than python's recursion limit.
        stack: list[Any] = list(roots)
        while stack:
            value = stack.pop()
            if not isinstance(value, _ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                stack.extend(self._remember(value))

    def restore(self) -> None:
        """Put everything back that has changed since."""
        for undo in self._undo:
            undo()

    def _remember(self, value: Any) -> Iterable[Any]:
        """Note how to restore ``value`` and return what it contains."""
        if isinstance(value, Tensor):
            return self._remember_tensor(value)
        if isinstance(value, dict):
            return self._remember_dict(value)
        if isinstance(value, (list, deque, set)):
            return self._remember_collection(value)
        if isinstance(value, (tuple, frozenset)):
            return value
        if self._remember_generator(value) or self._remember_ndarray(value):
            return ()
        if _is_users_object(value, datasets=not self._arrays):
            return (vars(value),)
        return ()

    def _remember_tensor(self, tensor: Tensor) -> Iterable[Any]:
        if is_lazy(tensor):
            return ()
        if tensor.is_leaf and tensor.requires_grad:
            gradient = tensor.grad
            self._undo.append(lambda: setattr(tensor, "grad", gradient))
        if self._arrays and tensor.is_leaf:  # results of autograd cannot be changed in place without an error
            saved = tensor.detach().clone()

            def undo() -> None:
                current = tensor.detach()
                if not (current.shape == saved.shape and _same_bits(current, saved)):
                    current.copy_(saved)

            self._undo.append(undo)
        return ()

    def _remember_dict(self, value: dict) -> Iterable[Any]:
        saved = list(value.items())

        def undo() -> None:
            current = list(value.items())
            if len(current) != len(saved) or any(a[0] is not b[0] or a[1] is not b[1] for a, b in zip(current, saved)):
                value.clear()
                for key, item in saved:
                    value[key] = item

        self._undo.append(undo)
        return [item for _, item in saved]

    def _remember_collection(self, value: Any) -> Iterable[Any]:
        saved = list(value)

        def undo() -> None:
            current = list(value)
            if len(current) != len(saved) or any(a is not b for a, b in zip(current, saved)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(saved)

        self._undo.append(undo)
        return saved

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
                if value.tobytes() != saved.tobytes():
                    value[...] = saved

            self._undo.append(undo)
        return True


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality under which a NaN equals itself and 0.0 is not -0.0."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _is_users_object(value: Any, datasets: bool) -> bool:
    if isinstance(value, (type, ModuleType)) or type(getattr(value, "__dict__", None)) is not dict:
        return False
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, Dataset):
        return datasets
    return not any(base.__module__.split(".")[0] in _MACHINERY for base in type(value).__mro__ if base is not object)
