"""Compute the norms of normalized weight vectors and their minimum w_min (WN, Definition 3.1)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_normtheory.model.layers import NormalizedWeight, public_name, refuse_uninitialized, weight_norm_layers
from lightning_normtheory.scaling.batchnorm_inputs import feeding_layers

__all__ = ["NormalizedLayers", "min_weight_norm", "normalized_layers", "weight_norms"]


class NormalizedLayers(NamedTuple):
    """The result of `normalized_layers`.

    Attributes:
        weights: every normalized weight of the model, once.
        unknown: the reason, for every BatchNorm with input channels that could not be traced to a layer.
    """

    weights: tuple[NormalizedWeight, ...]
    unknown: dict[str, str]


def normalized_layers(model: nn.Module) -> NormalizedLayers:
    """Find every weight that a WeightNorm or a BatchNorm normalizes.

    A layer under WeightNorm that also feeds a BatchNorm is listed as WeightNorm: its parameter is the direction v.

    Example:
        >>> wn = nn.utils.parametrizations.weight_norm
        >>> net = nn.Sequential(wn(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2), nn.BatchNorm1d(2))
        >>> [(w.name, w.kind, w.batch_norms) for w in normalized_layers(net).weights]
        [('0', 'weight_norm', ()), ('2', 'batch_norm', ('3',))]
    """
    refuse_uninitialized(model)
    fed: dict[str, list[str]] = {}
    unknown: dict[str, str] = {}
    for batch_norm, feeding in feeding_layers(model).items():
        for layer in feeding.layers:
            fed.setdefault(layer, []).append(public_name(batch_norm))
        if feeding.unknown:
            unknown[public_name(batch_norm)] = feeding.unknown
    weights = list(weight_norm_layers(model))
    under_weight_norm = {weight.module for weight in weights if weight.tensor_name == "weight"}
    for layer, batch_norms in fed.items():
        module = model.get_submodule(layer)
        if module not in under_weight_norm:
            weights.append(NormalizedWeight(public_name(layer), "batch_norm", module, batch_norms=tuple(batch_norms)))
    order = {module: position for position, module in enumerate(model.modules())}
    return NormalizedLayers(tuple(sorted(weights, key=lambda weight: order[weight.module])), unknown)


def weight_norms(model: nn.Module) -> dict[str, Tensor]:
    """Compute ‖W_i‖₂ for every unit i of every normalized layer: one tensor (units,) per layer name.

    Under WeightNorm, W_i is the direction v_i (``weight_v``, ``parametrizations.weight.original1``), one vector per
    index of its ``dim``. In a layer that feeds a BatchNorm, W_i is the weight of an output unit: a row of a Linear, or
    the in·kh·kw entries of a convolution's channel.

    Example:
        >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        >>> layer.parametrizations.weight.original1.data = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
        >>> weight_norms(nn.Sequential(layer))
        {'0': tensor([5., 2.])}
    """
    return unit_norms(normalized_layers(model))


def unit_norms(layers: NormalizedLayers) -> dict[str, Tensor]:
    """Compute `weight_norms` for the result of `normalized_layers`."""
    return {weight.name: _norms(weight.vectors.detach()) for weight in layers.weights}


def _norms(vectors: Tensor) -> Tensor:
    half = vectors.dtype in (torch.float16, torch.bfloat16)  # too short for sums of squares
    return torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float32 if half else None)


def min_weight_norm(model: nn.Module) -> float:
    """Compute w_min = min over units i and normalized layers l of ‖W_i^(l)‖₂ (WN, Definition 3.1).

    The printed definition squares only the right-hand side. The paper's bounds and figures use the norm, as here.

    Raises:
        ValueError: if no layer is normalized.

    Example:
        >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        >>> layer.parametrizations.weight.original1.data = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
        >>> min_weight_norm(layer)
        2.0
    """
    return smallest(unit_norms(require_normalized(model)))


def smallest(norms: dict[str, Tensor]) -> float:
    """Return the minimum over all units of all layers; NaN if any norm is NaN."""
    return float(torch.stack([norm.min().cpu().double() for norm in norms.values()]).min())


def require_normalized(model: nn.Module) -> NormalizedLayers:
    """Return `normalized_layers`, or raise a ValueError with the reasons if there are none."""
    layers = normalized_layers(model)
    if not layers.weights:
        reasons = "".join(f" BatchNorm {name!r}: {reason}." for name, reason in list(layers.unknown.items())[:2])
        reasons += f" And {len(layers.unknown) - 2} more." if len(layers.unknown) > 2 else ""
        raise ValueError(
            "Expected layers with WeightNorm, or that feed a BatchNorm, but "
            f"{type(model).__name__} has none.{reasons} Add torch.nn.utils.parametrizations.weight_norm."
        )
    return layers
