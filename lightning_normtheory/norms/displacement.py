"""How far the lengths and directions of WeightNorm are from where they started."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_normtheory.linalg.precision import to_float64
from lightning_normtheory.model.layers import public_name, weight_norm_layers, weight_norm_parameters

__all__ = ["WeightNormDisplacement", "WeightNormStart", "weight_norm_displacement", "weight_norm_start"]


class WeightNormStart(NamedTuple):
    """Lengths and directions at one time, as copies on the CPU.

    Attributes:
        lengths: g (units,) of each weight under WeightNorm, by its name.
        directions: v (units, entries) of each, or nothing if they were too many.
    """

    lengths: dict[str, Tensor]
    directions: dict[str, Tensor]


class WeightNormDisplacement(NamedTuple):
    """The result of `weight_norm_displacement`.

    Attributes:
        directions: max_k ‖v_k − v_k(0)‖ over the units of all layers; ``None`` if the start has no directions.
        lengths: max_k |g_k − g_k(0)|.
    """

    directions: float | None
    lengths: float


def weight_norm_start(model: nn.Module, *, most: int | None = None) -> WeightNormStart:
    """Copy the lengths g and directions v of all weights under WeightNorm.

    Args:
        most: the largest number of entries of all directions together, above which they are not copied: with them, the
            copy is as large as the layers. Lengths alone, one number for each unit, do not give ‖v_k − v_k(0)‖.

    Example:
        >>> model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        >>> {name: v.shape for name, v in weight_norm_start(model).directions.items()}
        {'weight': torch.Size([2, 3])}
        >>> weight_norm_start(model, most=5).directions
        {}
    """
    lengths, directions = _lengths(model), _directions(model)
    if most is not None and sum(v.numel() for v in directions.values()) > most:
        directions = {}
    return WeightNormStart(_copies(lengths), _copies(directions))


def weight_norm_displacement(model: nn.Module, start: WeightNormStart) -> WeightNormDisplacement:
    """Compute max_k ‖v_k − v_k(0)‖ and max_k |g_k − g_k(0)| over all units k under WeightNorm, in float64.

    DGM's proofs keep both below radii that shrink like 1/√m (Lemmas B.7, B.8, C.2 and C.3; `dgm_reach`). The norms
    ‖v_k‖ do not tell: gradient flow keeps them, and gradient descent increases them (eq. (2.3)).

    Raises:
        ValueError: if the model's weights under WeightNorm are not those of the start.

    Example:
        >>> model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 1))
        >>> start = weight_norm_start(model)
        >>> with torch.no_grad():
        ...     _ = model.parametrizations.weight.original1.add_(torch.tensor([[3.0, 4.0]]))
        >>> found = weight_norm_displacement(model, start)
        >>> round(found.directions, 5), found.lengths
        (5.0, 0.0)
    """
    lengths, directions = _lengths(model), _directions(model)
    known = {name: g.shape for name, g in lengths.items()}
    if not known or known != {name: g.shape for name, g in start.lengths.items()}:
        raise ValueError(
            f"Expected the weights under WeightNorm of the start, {sorted(start.lengths)}, but got {sorted(known)}, or"
            " their numbers of units differ."
        )
    moved = [float(_difference(g, start.lengths[name]).abs().max()) for name, g in lengths.items()]
    turned = [float(_difference(directions[name], v).norm(dim=1).max()) for name, v in start.directions.items()]
    return WeightNormDisplacement(_largest(turned) if turned else None, _largest(moved))


def _lengths(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for tensor_name, g, _ in weight_norm_parameters(module):
            found[public_name(path, tensor_name)] = g.detach().flatten()
    return found


def _directions(model: nn.Module) -> dict[str, Tensor]:
    return {weight.name: weight.vectors.detach() for weight in weight_norm_layers(model)}


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def _difference(now: Tensor, start: Tensor) -> Tensor:
    return to_float64(now.cpu()) - to_float64(start)


def _largest(values: list[float]) -> float:
    # Unlike max(), it does not lose NaN.
    return float(torch.tensor(values, dtype=torch.float64, device="cpu").max())
