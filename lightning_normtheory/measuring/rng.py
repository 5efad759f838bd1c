"""Seed the global random generators inside a block, and restore them afterwards."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_normtheory.measuring.interrupts import uninterrupted

__all__ = ["isolated_rng"]


@contextmanager
def isolated_rng(seed: int = 0) -> Iterator[None]:
    """Seed python, numpy and torch inside the block, and restore their states afterwards.

    Random operations inside (an augmentation, a dropout that cannot be switched off) repeat exactly from call to call,
    and random numbers outside are the same as without the block.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(1)
        >>> with isolated_rng(7):
        ...     inside = torch.rand(2)
        >>> outside = torch.rand(2)
        >>> _ = torch.manual_seed(1)
        >>> torch.equal(outside, torch.rand(2))
        True
        >>> with isolated_rng(7):
        ...     torch.equal(inside, torch.rand(2))
        True
    """
    # numpy is no dependency: only a program that has loaded it has a state to keep.
    numpy_random = sys.modules.get("numpy.random")
    python_state = random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    torch_state = torch.random.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        random.seed(seed)
        if numpy_random is not None:
            numpy_random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if cuda_states:
            torch.cuda.manual_seed_all(seed)
        yield
    finally:
        with uninterrupted():
            random.setstate(python_state)
            if numpy_random is not None:
                numpy_random.set_state(numpy_state)
            torch.random.set_rng_state(torch_state)
            if cuda_states:
                torch.cuda.set_rng_state_all(cuda_states)
