"""The function that is measured, and the promise that measuring it changes nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from lightning_normtheory.eager import eager
from lightning_normtheory.rng import isolated_rng
from lightning_normtheory.snapshot import Snapshot

__all__ = ["untouched"]


@contextmanager
def untouched(model: nn.Module, *, batch_stats: bool | None = None, seed: int = 0) -> Iterator[Callable[[], None]]:
    """Inside: the deterministic function that is trained. Afterwards: the model as it was, to the last bit.

    Dropout and every other layer that behaves differently in training is switched off, except for the layers that
    normalise with statistics of the batch. A compiled model runs as it was written.

    Args:
        model: its parameters, buffers, ``.grad``, train/eval flags and python attributes are restored on exit, and so
            are the random generators of python, numpy and torch. Inside, ``.grad`` is empty.
        batch_stats: ``True``: BatchNorm uses the statistics of the batch; ``False``: the running statistics;
            ``None``: each BatchNorm keeps its own train/eval flag.
        seed: of the private randomness inside.

    Yields:
        A function that gives the model its buffers as they were at the beginning. Called before each batch, it lets all
        of them start from the same state, and keeps a graph of one batch valid when the next one writes.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Dropout(0.5))
        >>> x = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
        >>> with untouched(model, batch_stats=True):
        ...     model(x).round().tolist()
        [[-1.0, -1.0], [1.0, 1.0]]
        >>> int(model[0].num_batches_tracked), model[1].training
        (0, True)
    """
    snapshot = Snapshot(model)
    with isolated_rng(seed), eager(model):
        try:
            for parameter in model.parameters():
                parameter.grad = None
            originals = _buffers(model)
            _lend_buffers(originals)
            _set_modes(model, batch_stats)
            yield partial(_lend_buffers, originals)
        finally:
            snapshot.restore()


_Buffers = list[tuple[dict[str, Any], str, Tensor]]


def _buffers(model: nn.Module) -> _Buffers:
    """Every place where a buffer of the model is kept, with the buffer."""
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


def _lend_buffers(originals: _Buffers) -> None:
    """Copies in place of the buffers. BatchNorm writes into its statistics, and a graph of the user's from before still
    needs the originals for its backward pass, in the version that they have now."""
    copies: dict[int, Tensor] = {}
    for place, name, buffer in originals:
        if id(buffer) not in copies:
            copies[id(buffer)] = buffer.detach().clone()
        place[name] = copies[id(buffer)]


def _set_modes(model: nn.Module, batch_stats: bool | None) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            if batch_stats is False and module.running_mean is None:
                raise ValueError(
                    f"batch_stats=False needs running statistics, but {type(module).__name__} {name!r} keeps none"
                    " (track_running_stats=False). Use batch_stats=True or None."
                )
            module.training = module.training if batch_stats is None else batch_stats
        elif isinstance(module, _InstanceNorm):
            pass  # per sample, or running: as in training
        elif isinstance(module, nn.RNNBase):
            # cuDNN has no backward pass for recurrent layers in eval mode: silence their dropout instead.
            module.dropout, module.training = 0.0, True
        else:
            module.training = False
