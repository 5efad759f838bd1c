"""Find out how products of matrices are rounded on a device, and round them less where torch can be told to."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["operand_eps", "product_eps", "without_autocast", "without_tf32"]

_BITS = 24  # of a float32, the leading one included
_SIZE, _CHANNELS = 240, 72  # large enough for the kernels that round their operands, and multiples of 24


def operand_eps(device: torch.device | str, dtype: torch.dtype) -> float:
    """ε of the operands of matrix products or convolutions, if a device rounds them to fewer digits; otherwise 0.

    NVIDIA's GPUs from Ampere on can round float32 operands to the 11 bits of TF32 (ε = 2⁻¹⁰), other devices to the 8
    bits of bfloat16. Found by multiplying 1 + 2⁻ʲ by one, once for each setting of torch's flags.

    Example:
        >>> operand_eps("cpu", torch.float64)
        0.0
    """
    return _operand_eps(torch.device(device), _flags()) if dtype == torch.float32 else 0.0


def product_eps(device: torch.device | str, dtype: torch.dtype) -> float:
    """The larger one of `operand_eps` and ε of the dtype.

    Example:
        >>> product_eps("cpu", torch.float64)
        2.220446049250313e-16
    """
    return max(operand_eps(device, dtype), torch.finfo(dtype).eps)


def _flags() -> tuple[Any, ...]:
    """Everything that torch can be told about the precision of float32 products."""
    backends = torch.backends
    if hasattr(backends, "fp32_precision"):  # from torch 2.9 on; then the older flags may refuse to be read
        kinds = {backends.cuda: ["matmul"], backends.cudnn: ["conv", "rnn"], backends.mkldnn: ["matmul", "conv", "rnn"]}
        return tuple(getattr(each, kind).fp32_precision for each, names in kinds.items() for kind in names)
    return backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()


@cache
@torch.no_grad()
def _operand_eps(device: torch.device, flags: tuple[Any, ...]) -> float:
    del flags  # the arithmetic depends on them
    with torch.inference_mode(False), without_autocast(device):
        kept = [_kept_in_matrices(device), *(_kept_in_convolutions(device, size) for size in (1, 3))]
    return 2.0 ** (1 - min(kept)) if min(kept) < _BITS else 0.0


def _near_one(size: int, device: torch.device) -> Tensor:
    """1 + 2⁻ʲ for j = 0, …, 23, repeatedly."""
    return (1 + 0.5 ** (torch.arange(size, device="cpu") % _BITS).to(torch.float32)).to(device)


def _kept(found: Tensor, exact: Tensor) -> int:
    """The number of bits in which all of (size, …) are equal."""
    same = (found == exact).flatten(1).all(1).cpu().view(-1, _BITS).all(0)
    return int(same.int().cumprod(0).sum())


def _kept_in_matrices(device: torch.device) -> int:
    x = _near_one(_SIZE, device)[:, None].expand(_SIZE, _SIZE).contiguous()
    return _kept(x @ torch.eye(_SIZE, dtype=x.dtype, device=device), x)


def _kept_in_convolutions(device: torch.device, size: int) -> int:
    x = _near_one(_CHANNELS, device).view(1, -1, 1, 1).expand(8, _CHANNELS, 16, 16).contiguous()
    weight = x.new_zeros(_CHANNELS, _CHANNELS, size, size)
    weight[:, :, size // 2, size // 2].fill_diagonal_(1.0)
    return _kept(torch.conv2d(x, weight, padding=size // 2).transpose(0, 1), x.transpose(0, 1))


def without_autocast(device: torch.device | str) -> AbstractContextManager[Any]:
    """Switch mixed precision off inside, on devices that have it: before torch 2.5, Apple's GPUs do not.

    Example:
        >>> with torch.autocast("cpu"), without_autocast("cpu"):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.float32
    """
    kind = torch.device(device).type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


@contextmanager
def without_tf32() -> Iterator[None]:
    """Let CUDA multiply float32 numbers in full inside, unless the flags of torch 2.9 (``fp32_precision``) are in use.

    These cannot be restored: what is inherited and what is set look the same.

    Example:
        >>> with without_tf32():
        ...     torch.backends.cudnn.allow_tf32
        False
    """
    try:
        convolutions, matrices = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        yield
        return
    on_cpu = getattr(torch.backends.mkldnn, "matmul", None)  # from torch 2.9 on
    precision_on_cpu = getattr(on_cpu, "fp32_precision", None)
    try:
        # Set only what differs: "highest" that is set is not the same as "highest" that was never set.
        if convolutions:
            torch.backends.cudnn.allow_tf32 = False
        if matrices != "highest":
            torch.set_float32_matmul_precision("highest")
        yield
    finally:
        if convolutions:
            torch.backends.cudnn.allow_tf32 = True
        if matrices != "highest":
            torch.set_float32_matmul_precision(matrices)
            if on_cpu is not None:  # it sets this one as well, unlike torch.backends.cuda.matmul.allow_tf32
                on_cpu.fp32_precision = precision_on_cpu
