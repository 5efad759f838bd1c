"""The function that is measured, and the promise that measuring it changes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from lightning_normtheory.eager import eager
from lightning_normtheory.rng import isolated_rng
from lightning_normtheory.snapshot import Snapshot

__all__ = ["untouched"]


@contextmanager
def untouched(model: nn.Module, *, batch_stats: bool | None = None, seed: int = 0) -> Iterator[None]:
    """Inside: the deterministic function that is trained. Afterwards: the model as it was, to the last bit.

    Dropout and every other layer that behaves differently in training is switched off, except for the layers that
    normalise with statistics of the batch. A compiled model runs as it was written.

    Args:
        model: its parameters, buffers, ``.grad``, train/eval flags and python attributes are restored on exit, and so
            are the random generators of python, numpy and torch. Inside, ``.grad`` is empty.
        batch_stats: ``True``: BatchNorm uses the statistics of the batch; ``False``: the running statistics;
            ``None``: each BatchNorm keeps its own train/eval flag.
        seed: of the private randomness inside.

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
            _lend_buffers(model)
            _set_modes(model, batch_stats)
            yield
        finally:
            snapshot.restore()


def _lend_buffers(model: nn.Module) -> None:
    """Copies in place of the buffers. BatchNorm writes into its statistics, and a graph of the user's from before still
    needs the originals for its backward pass, in the version that they have now."""
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
    for module in model.modules():  # a buffer may have a second name as a plain attribute
        attributes = vars(module)
        attributes.update({name: copies[id(value)] for name, value in attributes.items() if id(value) in copies})


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
