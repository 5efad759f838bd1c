"""Count what a piece of code does: floating-point operations, bytes written, bytes sent, and the peak of memory."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = ["Counter"]

_ATEN = torch.ops.aten
# Products with a vector, which torch does not count; two operations for each entry of the matrix.
_VECTORS = {_ATEN.dot: 0, _ATEN.mv: 0, _ATEN.addmv: 1}


class Counter(TorchDispatchMode):
    """Counts inside the block, backward passes of any order included.

    Attributes:
        flops: those of products of matrices and vectors and of convolutions, two for a multiplication with an addition.
        written: bytes of all new tensors. Work on single entries shows here.
        sent: bytes that are exchanged with other processes.
        live: bytes of the tensors made inside that are still in use.
        peak: the largest value of ``live``; set it to ``live`` to begin again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.written = self.sent = self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        name = func._overloadpacket
        if name in flop_registry:
            self.flops += flop_registry[name](*args, **kwargs, out_val=result)
        elif name in _VECTORS:
            self.flops += 2 * args[_VECTORS[name]].numel()
        if func.namespace == "c10d":
            self.sent += sum(each.nbytes for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        for storage in _storages(result):
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._keep(storage)
        return result

    def _keep(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.written += size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.live -= size


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for each in tree_leaves(values):
        if isinstance(each, Tensor) and each.layout == torch.strided:
            yield each.untyped_storage()
