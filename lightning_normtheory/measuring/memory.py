"""Recognize out-of-memory errors of all devices."""

import torch

__all__ = ["is_out_of_memory"]

# Messages of plain RuntimeErrors, raised by devices other than CUDA and by libraries below torch.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


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
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
