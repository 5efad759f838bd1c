"""Compute BatchNorm's normalization factors."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.model.layers import batch_norm_layers, public_name

__all__ = ["batchnorm_factors"]


def batchnorm_factors(model: nn.Module, x: Any = None) -> dict[str, Tensor]:
    """Compute N_j = √(var_j + ε) for every feature j, by BatchNorm layer (BN, Assumption 1.1: ε_N = max_j 1/N_j).

    Args:
        model: any model.
        x: one batch of inputs, for N_j of that batch with its biased variance. ``None``: use the running statistics,
            whose variance is unbiased in PyTorch. The two differ.

    Returns:
        One tensor (features,) per BatchNorm. For a layer that is applied several times, the last application counts.

    Raises:
        ValueError: if ``x`` is ``None`` and a layer keeps no running statistics.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(1, eps=1e-20))
        >>> batchnorm_factors(model), batchnorm_factors(model, torch.tensor([[1.0], [5.0]]))
        ({'0': tensor([1.])}, {'0': tensor([2.])})
    """
    layers = {public_name(path): module for path, module in batch_norm_layers(model).items()}
    if x is None:
        return {name: _running(name, module) for name, module in layers.items()}
    factors: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(module: _BatchNorm, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            x = inputs[0] if inputs else named["input"]
            axes = [axis for axis in range(x.dim()) if axis != 1]
            factors[name] = (x.var(axes, correction=0) + module.eps).sqrt()

        return hook

    with preserve_state(model, batch_stats=True), torch.no_grad():  # removes the hooks on exit
        for name, module in layers.items():
            module.register_forward_pre_hook(record(name), with_kwargs=True)
        model(x)
    return factors


def _running(name: str, module: _BatchNorm) -> Tensor:
    if module.running_var is None:
        raise ValueError(f"Expected running statistics, but the BatchNorm {name!r} keeps none. Pass a batch x instead.")
    return torch.sqrt(module.running_var + module.eps)
