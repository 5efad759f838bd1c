"""The minimum weight-vector norm (WN, Definition 3.1)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_normtheory.model.layers import (
    NormalizedWeight,
    public_name,
    refuse_uninitialized,
    weight_norm_layers,
)
from lightning_normtheory.norms.batchnorm_inputs import feeding_layers

__all__ = ["NormalizedLayers", "min_weight_norm", "normalized_layers", "weight_norms"]


class NormalizedLayers(NamedTuple):
    """The result of `normalized_layers`.

    Attributes:
        weights: every normalized weight of the model, each once.
        unknown: BatchNorm layers, some or all of whose input comes from no layer that we can name, with the reason.
    """

    weights: tuple[NormalizedWeight, ...]
    unknown: dict[str, str]


def normalized_layers(model: nn.Module) -> NormalizedLayers:
    """Find every weight that a WeightNorm or a BatchNorm normalizes.

    A layer under WeightNorm that also feeds a BatchNorm is listed as WeightNorm: its free vector is the direction v.

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
    already = {weight.module for weight in weights if weight.tensor_name == "weight"}
    for layer, batch_norms in fed.items():
        module = model.get_submodule(layer)
        if module not in already:
            weights.append(NormalizedWeight(public_name(layer), "batch_norm", module, batch_norms=tuple(batch_norms)))
    order = {module: position for position, module in enumerate(model.modules())}
    return NormalizedLayers(tuple(sorted(weights, key=lambda weight: order[weight.module])), unknown)


def weight_norms(model: nn.Module) -> dict[str, Tensor]:
    """‖W_i‖₂ of every unit i of every normalized layer, by layer name: one tensor (units,) per layer.

    W_i is the direction v_i of a WeightNorm (``weight_v``, ``parametrizations.weight.original1``), one vector per index
    of its ``dim``; and the raw weights of an output unit where the layer feeds a BatchNorm: a row of a Linear, the
    in·kh·kw entries of a convolution's channel.

    Example:
        >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        >>> layer.parametrizations.weight.original1.data = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
        >>> weight_norms(nn.Sequential(layer))
        {'0': tensor([5., 2.])}
    """
    return unit_norms(normalized_layers(model))


def unit_norms(layers: NormalizedLayers) -> dict[str, Tensor]:
    """`weight_norms` of layers that were found before."""
    return {weight.name: _norms(weight.vectors.detach()) for weight in layers.weights}


def _norms(vectors: Tensor) -> Tensor:
    half = vectors.dtype in (torch.float16, torch.bfloat16)  # a sum of squares needs more
    return torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float32 if half else None)


def min_weight_norm(model: nn.Module) -> float:
    """w_min = min over units i and normalized layers l of ‖W_i^(l)‖₂ (WN, Definition 3.1).

    The printed definition squares the right-hand side only; the paper's bounds and figures use the plain norm, as here.

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
    """The minimum over all units of all layers; NaN if any norm is."""
    return float(torch.stack([norm.min().cpu().double() for norm in norms.values()]).min())


def require_normalized(model: nn.Module) -> NormalizedLayers:
    """`normalized_layers`, or an error that says why there are none."""
    layers = normalized_layers(model)
    if not layers.weights:
        reasons = "".join(f" BatchNorm {name!r}: {reason}." for name, reason in layers.unknown.items())
        raise ValueError(
            "Expected a model with WeightNorm layers, or with BatchNorm layers fed by a Linear or a convolution, but "
            f"{type(model).__name__} has none.{reasons} Add torch.nn.utils.parametrizations.weight_norm or a BatchNorm,"
            " or leave out the minimum weight norm."
        )
    return layers
