"""Set up the function that is measured, and restore the model afterwards."""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from lightning_normtheory.measuring.eager import eager
from lightning_normtheory.measuring.processes import SINGLE_PROCESS, Processes
from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.measuring.snapshot import Snapshot
from lightning_normtheory.model.layers import is_batch_norm

__all__ = ["Reset", "preserve_state"]


class Reset(Protocol):
    """What `preserve_state` yields."""

    def __call__(self, *, contents: bool = True) -> list[Tensor]: ...


@contextmanager
def preserve_state(
    model: nn.Module,
    *,
    batch_stats: bool | None = None,
    seed: int = 0,
    trained: Iterable[nn.Parameter] | None = None,
    processes: Processes = SINGLE_PROCESS,
) -> Iterator["Reset"]:
    """Make the model the deterministic function that is trained; restore it afterwards, to the last bit.

    Dropout and all other layers that behave differently in training are switched off, except those that normalize with
    batch statistics. A compiled model runs uncompiled.

    Args:
        model: its parameters, buffers, ``.grad``, train/eval flags and python attributes are restored on exit, and so
            are the random generators of python, numpy and torch, on all devices. Inside, ``.grad`` is empty.
        batch_stats: ``True``: BatchNorm uses the statistics of the batch; ``False``: the running statistics;
            ``None``: each BatchNorm keeps its own train/eval flag.
        seed: of the random generators inside.
        trained: the parameters θ; all others are frozen inside. ``None``: all that require a gradient.
        processes: have copies of this model. Inside, all use the buffers of the first: in training each process updates
            its own statistics, and those of the first are saved. If there are several, a SyncBatchNorm uses its running
            statistics.

    Yields:
        A function that resets everything inside the model to the state at the beginning of the block: parameters,
        buffers, python attributes. Called before each batch, it lets all batches start from the same state. It returns
        the parameters and other tensors that had changed; a graph that needs one of them fails afterwards. Buffers are
        replaced by new copies, so that graphs which need the old ones stay valid. With ``contents=False`` it leaves out
        the contents of all other tensors, which take most of the time to compare.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Dropout(0.5))
        >>> x = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
        >>> with preserve_state(model, batch_stats=True):
        ...     model(x).round().tolist()
        [[-1.0, -1.0], [1.0, 1.0]]
        >>> int(model[0].num_batches_tracked), model[1].training
        (0, True)
    """
    kept = None if trained is None else {id(p) for p in trained}
    with isolated_rng(seed), eager(model):
        snapshot = Snapshot(model)
        try:
            originals = _buffers_of_first_process(_buffers(model), processes)

            def set_up() -> None:
                for parameter in model.parameters():
                    parameter.grad = None
                    if kept is not None and id(parameter) not in kept:
                        parameter.requires_grad_(False)
                _lend_buffers(originals)
                _set_modes(model, batch_stats, synchronized=processes.count > 1)

            def reset_state(*, contents: bool = True) -> list[Tensor]:
                changed = snapshot.reset(contents=contents)
                for tensor in changed:
                    # Writing through `data`, as a step may do and the snapshot does, leaves no trace: without this, a
                    # graph kept from an earlier batch would be differentiated at the values of a later one.
                    if not tensor.is_inference():
                        increment_version(tensor)
                set_up()
                return changed

            set_up()
            yield reset_state
        finally:
            snapshot.restore()
            snapshot.release()


_Buffers = list[tuple[dict[str, Any], str, Tensor]]


def _buffers(model: nn.Module) -> _Buffers:
    """Every place where the model keeps a buffer, with the buffer."""
    places = [
        (module._buffers, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    known = {id(buffer) for _, _, buffer in places}
    for module in model.modules():  # a buffer may have a second name as a plain attribute
        places += [(vars(module), name, value) for name, value in vars(module).items() if id(value) in known]
    return places


def _buffers_of_first_process(own: _Buffers, processes: Processes) -> _Buffers:
    """Replace the buffers of this process by those of the first, unless shapes, dtypes or devices differ somewhere."""
    if processes.count == 1:
        return own
    unique = {id(buffer): buffer for _, _, buffer in own if buffer.layout == torch.strided and not buffer.is_meta}
    form = zlib.crc32(repr([(buffer.shape, buffer.dtype, buffer.device.type) for buffer in unique.values()]).encode())
    first = processes.sum(torch.tensor([form if processes.rank == 0 else 0], device="cpu"))
    if float(processes.sum((first != form).float())) > 0:
        return own
    theirs: dict[int, Tensor] = {}
    for device in dict.fromkeys(buffer.device for buffer in unique.values()):
        some = {key: buffer for key, buffer in unique.items() if buffer.device == device}
        # As bytes: backends cannot sum every dtype.
        pieces = [
            buffer.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for buffer in some.values()
        ]
        flat = torch.cat(pieces)
        # A broadcast: the other processes add zeros.
        flat = processes.sum(flat if processes.rank == 0 else torch.zeros_like(flat))
        for (key, buffer), part in zip(some.items(), flat.split([len(piece) for piece in pieces])):
            theirs[key] = part.clone().view(buffer.dtype).view(buffer.shape)  # cloned: a view must be aligned
    return [(place, name, theirs.get(id(buffer), buffer)) for place, name, buffer in own]


def _lend_buffers(originals: _Buffers) -> None:
    """Put copies in place of the buffers.

    BatchNorm writes into its statistics, but an earlier graph of the user needs the originals, unchanged, for its
    backward pass.
    """
    copies: dict[int, Tensor] = {}
    for place, name, buffer in originals:
        if id(buffer) not in copies:
            copies[id(buffer)] = buffer.detach().clone()
        place[name] = copies[id(buffer)]


def _set_modes(model: nn.Module, batch_stats: bool | None, *, synchronized: bool) -> None:
    for name, module in model.named_modules():
        if synchronized and isinstance(module, nn.SyncBatchNorm):
            module.training = False  # torch has no second derivative of the statistics of all processes
        elif is_batch_norm(module):
            if batch_stats is False and module.running_mean is None:
                raise ValueError(
                    f"batch_stats=False needs running statistics, but {type(module).__name__} {name!r} keeps none"
                    " (track_running_stats=False). Use batch_stats=True or None."
                )
            module.training = module.training if batch_stats is None else batch_stats
        elif isinstance(module, _InstanceNorm):
            pass  # normalizes per sample or with running statistics, as in training
        elif isinstance(module, nn.RNNBase):
            # cuDNN has no backward pass for recurrent layers in eval mode: switch off their dropout instead.
            module.dropout, module.training = 0.0, True
        else:
            module.training = False
