"""Find out where float64 exists: not every device has it."""

from functools import cache

import torch
from torch import Tensor

__all__ = ["converted", "device_for_float64", "norm_in_float64", "to_float64"]


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

    Example:
        >>> norm_in_float64(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), dim=1)
        tensor([5., 2.], dtype=torch.float64)
    """
    return torch.linalg.vector_norm(tensor.to(device_for_float64(tensor.device)), dim=dim, dtype=torch.float64)


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a floating-point tensor to another dtype; for float64, put any tensor where that exists.

    Example:
        >>> converted(torch.ones(1), torch.float64), converted(torch.ones(1, dtype=torch.int32), torch.float64)
        (tensor([1.], dtype=torch.float64), tensor([1], dtype=torch.int32))
    """
    tensor = tensor.to(device_for_float64(tensor.device)) if dtype == torch.float64 else tensor
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
