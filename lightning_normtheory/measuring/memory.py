"""Whether a computation has run out of memory, by whatever name the device calls it."""

import torch

__all__ = ["is_out_of_memory"]

# What devices other than CUDA, and libraries below torch, say in a plain RuntimeError.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once may succeed where this failed.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("a batch of another form"))
        (True, False)
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
        True
    """
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
