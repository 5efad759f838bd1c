"""Count backward passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["backward_passes"]


@contextmanager
def backward_passes() -> Iterator[SimpleNamespace]:
    """Inside, count the calls of ``torch.autograd.grad``; those of `torch.func` are not among them."""
    passes, original = SimpleNamespace(count=0), torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.count += 1
        return original(*args, **kwargs)

    torch.autograd.grad = counted
    try:
        yield passes
    finally:
        torch.autograd.grad = original
