"""Recognize out-of-memory errors of all devices; ask for free memory; count that of a graph."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["free_bytes", "is_out_of_memory", "saved_bytes"]

# Messages of plain RuntimeErrors, in lower case, raised by devices other than CUDA and by libraries below torch.
_WORDS = (
    "out of memory",  # CUDA, HIP, MPS, XPU, NPU
    "can't allocate memory",  # Linux
    "not enough memory",  # Windows
    "alloc_failed",  # cuBLAS, cuDNN
    "invalid buffer size",  # MPS: one tensor is larger than its limit
    "out_of_device_memory",  # Level Zero, below XPU
    "resource_exhausted",  # XLA
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, so that less work at once may succeed.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("a batch of another form"))
        (True, False)
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
        True
    """
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in message for words in _WORDS)


def free_bytes(device: torch.device) -> float:
    """Return the memory that a device has left for tensors; infinity if it does not say.

    What torch has reserved and not given away counts as free.

    Example:
        >>> free_bytes(torch.device("cpu"))
        inf
    """
    try:
        module: Any = torch.get_device_module(device)
        if hasattr(module, "mem_get_info"):
            return module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)
        return module.recommended_max_memory() - module.current_allocated_memory()  # of Apple's GPUs
    except (AttributeError, RuntimeError):
        return math.inf


@contextmanager
def saved_bytes() -> Iterator[dict[int, int]]:
    """Count the memory that graphs keep for their backward passes. After the block, the graphs cannot be used.

    Yields:
        The bytes of each storage that is saved inside, by address. Parameters that are saved count, too.

    Example:
        >>> x = torch.ones(10, requires_grad=True)
        >>> with saved_bytes() as saved:
        ...     y = (x * x).exp()
        >>> sorted(saved.values())
        [40, 40]
    """
    saved: dict[int, int] = {}
    boxes: list[list[Tensor]] = []

    def pack(tensor: Tensor) -> list[Tensor]:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        boxes.append([tensor])
        return boxes[-1]

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box[0]):
            yield saved
    finally:
        for box in boxes:  # an operation that saves its own output would never be freed
            box.clear()
