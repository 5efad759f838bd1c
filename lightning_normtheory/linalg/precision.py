"""Find out where float64 exists: not every device has it."""

from functools import cache

import torch
from torch import Tensor

__all__ = ["converted", "device_for_float64", "norm_in_float64", "to_float64"]

# Entries that are converted at once.
_CACHED = 2**18


@cache
def _has_float64(device_type: str) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device_type) + 1  # some of Intel's GPUs can store it, and no more
    except torch.cuda.OutOfMemoryError:  # of any device; it says nothing about float64
        raise
    except (TypeError, RuntimeError):  # Apple's GPUs raise the first
        return False
    return True


def device_for_float64(device: torch.device | str) -> torch.device:
    """Return the device itself, or the CPU if it has no float64.

    Example:
        >>> device_for_float64("cpu")
        device(type='cpu')
    """
    device = torch.device(device)
    return device if _has_float64(device.type) else torch.device("cpu")


def to_float64(tensor: Tensor) -> Tensor:
    """Convert a tensor to float64, on its own device or, if that has no float64, on the CPU.

    Example:
        >>> to_float64(torch.ones(2))
        tensor([1., 1.], dtype=torch.float64)
    """
    return tensor.to(device_for_float64(tensor.device)).to(torch.float64)


def norm_in_float64(tensor: Tensor, dim: int | list[int] | None = None) -> Tensor:
    """Compute ‖x‖₂ of all entries, or along some axes, with a sum in float64, where `to_float64` puts it.

    In pieces that fit into the processor's cache: a copy in float64 would take much memory, and time.

    Example:
        >>> norm_in_float64(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), dim=1)
        tensor([5., 2.], dtype=torch.float64)
    """
    axes = [] if dim is None else [axis % tensor.dim() for axis in ([dim] if isinstance(dim, int) else dim)]
    if dim is None:
        pieces = [torch.linalg.vector_norm(to_float64(piece)) for piece in tensor.detach().reshape(-1).split(_CACHED)]
        return torch.linalg.vector_norm(torch.stack(pieces))
    if 0 in axes:
        return torch.linalg.vector_norm(to_float64(tensor), dim=axes)
    rows = max(1, _CACHED * len(tensor) // max(tensor.numel(), 1))
    return torch.cat([torch.linalg.vector_norm(to_float64(piece), dim=axes) for piece in tensor.split(rows)])


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a floating-point tensor to another dtype; for float64, put any tensor where that exists.

    Example:
        >>> converted(torch.ones(1), torch.float64), converted(torch.ones(1, dtype=torch.int32), torch.float64)
        (tensor([1.], dtype=torch.float64), tensor([1], dtype=torch.int32))
    """
    tensor = tensor.to(device_for_float64(tensor.device)) if dtype == torch.float64 else tensor
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
