"""Compute the largest curvature at which an optimizer's step is stable."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

__all__ = ["Edge", "edges_of_stability"]


class Edge(NamedTuple):
    """Stability limits of one parameter group, to compare with the largest eigenvalue of the loss's Hessian.

    Attributes:
        group: the group's name if it has one, else the optimizer's class and the group's number.
        two_over_lr: 2/η, above which plain gradient descent on a quadratic diverges.
        limit: the limit for the optimizer in use where it is known: `torch.optim.SGD` with momentum β, dampening τ and
            weight decay. ``None`` for optimizers that rescale the gradient: their limit is for a rescaled Hessian.
    """

    group: str
    two_over_lr: float
    limit: float | None


def edges_of_stability(
    optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[torch.Tensor] | None = None
) -> list[Edge]:
    """Compute the edge of stability of every parameter group that has a learning rate η.

    Args:
        parameters: leave out groups that hold none of these; ``None``: keep all groups.

    On a quadratic of curvature λ, SGD is stable while

    * λ < 2(1 + β)/((1 − τ)η) − decay, with momentum β and dampening τ (2/η − decay without momentum);
    * λ < 2(1 + β)/((1 + 2β)η) − decay, with Nesterov momentum.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> edges_of_stability([torch.optim.SGD([weight], lr=0.1, momentum=0.5)])
        [Edge(group='SGD', two_over_lr=20.0, limit=30.0)]
    """
    edges: list[Edge] = []
    wanted = None if parameters is None else {id(p) for p in parameters}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            if "lr" in group and (wanted is None or any(id(p) in wanted for p in group["params"])):
                plain = f"{type(optimizer).__name__}{number if len(optimizer.param_groups) > 1 else ''}"
                # Keep only characters that a dashboard allows in metric names.
                readable = re.sub(r"[^\w-]", "_", str(group.get("name", plain)))
                name = _unused(readable, {edge.group for edge in edges})
                lr = float(group["lr"])
                limit = _sgd_limit(group, lr) if type(optimizer) is torch.optim.SGD else None
                edges.append(Edge(name, _over(2.0, lr), limit))
    return edges


def _sgd_limit(group: dict[str, Any], lr: float) -> float:
    momentum, decay = float(group["momentum"]), float(group["weight_decay"])
    if group["nesterov"]:
        factor = 2 * (1 + momentum) / (1 + 2 * momentum)
    elif momentum:
        factor = 2 * (1 + momentum) / (1 - float(group["dampening"]))
    else:
        factor = 2.0
    return _over(factor, lr) - decay


def _over(numerator: float, lr: float) -> float:
    return numerator / lr if lr > 0 else float("inf")  # a warm-up may begin with η = 0


def _unused(name: str, taken: set[str]) -> str:
    number = 1
    candidate = name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
