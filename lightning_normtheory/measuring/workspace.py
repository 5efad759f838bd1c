"""Keep the memory of large tensors from one measurement to the next."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lightning_normtheory.measuring.memory import is_out_of_memory

__all__ = ["Workspace", "copy_of", "drop_free_memory", "empty", "give_back"]

# Smaller tensors come from memory that the allocator keeps anyway.
_LEAST_BYTES = 2**20
_MOST_BYTES = 2**30
# A free piece serves for something smaller if it is at most so many times as large.
_LARGEST = 1.25
# All memory relative to the most that was in use at once: pieces of other sizes stay for the next time they are needed.
_SPARE = 1.5


class Workspace:
    """Memory for tensors as large as the parameters, on the CPU.

    The system maps and clears new memory page by page. That takes much longer than to fill it, most of all on a busy
    machine. So what is given back is kept for the next call of `empty`. Other devices have allocators that do the same.

    Args:
        most: the most bytes to keep while nobody uses them.

    Example:
        >>> workspace = Workspace()
        >>> with workspace.use():
        ...     first = empty(2**20)
        ...     address = first.data_ptr()
        ...     give_back(first)
        ...     empty(2**20).data_ptr() == address
        True
    """

    def __init__(self, most: int = _MOST_BYTES) -> None:
        self._most = most
        self._free: list[Tensor] = []  # the last ones are those that were given back last
        self._lent: dict[int, int] = {}  # bytes by address: what nobody uses any more is freed
        self._most_lent = 0

    @contextmanager
    def use(self) -> Iterator[None]:
        """Let `empty` and `give_back` use this workspace inside the block. What is not given back is not kept."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)
            self._lent.clear()

    @property
    def free_bytes(self) -> int:
        """The number of bytes that are kept and not in use."""
        return sum(map(len, self._free))

    def clear(self) -> None:
        """Free all memory that is not in use."""
        self._free.clear()

    def take(self, size: int) -> Tensor:
        """Return at least ``size`` bytes, of the smallest piece that has them and few more, or new ones.

        New ones replace pieces that have been free for long, so that all memory together is at most half as much again
        as was in use at once; what is not given back counts as in use until the block ends.
        """
        lent = sum(self._lent.values())
        self._most_lent = max(self._most_lent, lent + size)
        fitting = [piece for piece in self._free if size <= len(piece) <= _LARGEST * size]
        if fitting:
            piece = min(fitting, key=len)
            self._free = [each for each in self._free if each is not piece]
        else:
            while self._free and lent + self.free_bytes + size > _SPARE * self._most_lent:
                self._free.pop(0)
            piece = self._new(size)
        self._lent[piece.data_ptr()] = len(piece)
        return piece

    def _new(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self.clear()
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def put(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor, if it is of this workspace."""
        if tensor.data_ptr() in self._lent:
            del self._lent[tensor.data_ptr()]
            piece = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
            if self.free_bytes + len(piece) <= self._most:
                self._free.append(piece)


_active: ContextVar[Workspace | None] = ContextVar("workspace", default=None)


def empty(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor with arbitrary contents, in memory of the workspace in use, if there is one.

    It is the caller's until `give_back`. Without that, it is freed like any other tensor.
    """
    size = dtype.itemsize
    for length in shape:
        size *= length
    workspace = _active.get()
    if workspace is None or size < _LEAST_BYTES or torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return workspace.take(size)[:size].view(dtype).view(shape)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, as `empty` does if it is contiguous."""
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
    if _active.get() is None or not plain or not tensor.is_contiguous():
        return tensor.clone()
    return empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def give_back(*tensors: Tensor) -> None:
    """Keep the memory of tensors that `empty` returned. Nobody may use them afterwards. Others are ignored."""
    workspace = _active.get()
    if workspace is not None:
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                workspace.put(tensor)


def drop_free_memory() -> None:
    """Free what the workspace in use keeps: memory has run out."""
    workspace = _active.get()
    if workspace is not None:
        workspace.clear()
