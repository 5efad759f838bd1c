"""Give BatchNorm statistics that follow from the weights and some batches alone."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_normtheory.model.layers import batch_norm_layers

__all__ = ["hold_batch_statistics"]


@torch.no_grad()
def hold_batch_statistics(
    model: nn.Module, passes: Iterable[tuple[Callable[[], object], int]], reset_state: Callable[[], object]
) -> None:
    """Hold the statistics of every BatchNorm in training mode constant, at those of some batches.

    In a pass over batch b of n_b samples, each layer normalizes with the statistics of the batch, as in training. With
    the mean μ_b and the unbiased variance σ²_b of what enters the layer (averaged over its calls), its running
    statistics become

        μ = Σ_b n_b μ_b / Σ_b n_b,  σ² = Σ_b n_b σ²_b / Σ_b n_b,

    and it is switched to eval mode, in which it uses them. Samples are independent then, and the running statistics of
    before do not matter. Layers in eval mode, without running statistics, or not called keep their statistics. To be
    called inside `preserve_state`, which restores the model.

    Args:
        passes: forward passes over one batch each, with their numbers of samples.
        reset_state: of `preserve_state`, called before each pass.

    Example:
        >>> from lightning_normtheory.measuring.preserve import preserve_state
        >>> layer = nn.BatchNorm1d(1, affine=False)
        >>> x = torch.tensor([[1.0], [3.0], [8.0], [12.0]])
        >>> with preserve_state(layer) as reset_state:
        ...     hold_batch_statistics(layer, [(lambda: layer(x[:2]), 2), (lambda: layer(x[2:]), 2)], reset_state)
        ...     layer.running_mean.tolist(), layer.running_var.tolist(), layer.training
        ([6.0], [5.0], False)
        >>> layer.running_mean.tolist(), layer.training
        ([0.0], True)
    """
    modules = batch_norm_layers(model).values()
    # Any: to the type checker, the statistics may be missing.
    held: list[Any] = [layer for layer in modules if layer.training and layer.running_mean is not None]
    means: list[list[Tensor]] = [[] for _ in held]
    weights: list[list[int]] = [[] for _ in held]
    for forward, samples in passes if held else ():
        reset_state()
        calls: list[list[Tensor]] = [[] for _ in held]
        # What a subclass does with its running statistics, and when, is its own affair: look at what enters it.
        hooks = [
            layer.register_forward_pre_hook(partial(_note, found), with_kwargs=True)
            for layer, found in zip(held, calls)
        ]
        try:
            forward()
        finally:
            for hook in hooks:
                hook.remove()
        for i, found in enumerate(calls):
            if found:
                means[i].append(torch.stack(found).mean(0))
                weights[i].append(samples)
    reset_state()
    for layer, each, sizes in zip(held, means, weights):
        layer.training = False
        if sum(sizes) > 0:
            wide = torch.stack(each).cpu().to(torch.float64)  # not every device has float64
            total = torch.zeros_like(wide[0])
            for samples, one in zip(sizes, wide):
                total += samples * one
            mean, variance = total / sum(sizes)
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)


def _note(found: list[Tensor], layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    x = next(iter((*args, *kwargs.values())))
    channels = x.to(layer.running_mean).transpose(0, 1).flatten(1)
    found.append(torch.stack([channels.mean(1), channels.var(1)]))
