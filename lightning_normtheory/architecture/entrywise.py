"""Rules for entrywise operations: activations, arithmetic, and activations composed of arithmetic."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_normtheory.architecture.activations import (
    ELEMENTWISE,
    ActivationConstants,
    known_activation,
    measure_activation,
)
from lightning_normtheory.architecture.calls import TorchCall
from lightning_normtheory.architecture.operations import Activation, EntrywiseScaling, Operation, Sum

__all__ = ["entrywise_step"]


def entrywise_step(call: TorchCall, result: Tensor) -> Operation | None:
    """Return an activation, a product or sum with constants, or a sum of two values; ``None`` for anything else."""
    return _elementwise(call, result) or _arithmetic(call, result)


def _elementwise(call: TorchCall, result: Tensor) -> Operation | None:
    name = call.name.rstrip("_")
    constants_only = not any(
        isinstance(item, Tensor) and not call.tracked(item) for item in (*call.args, *call.kwargs.values())
    )
    if name == "prelu":
        return _prelu(call, result)
    if len(call.nodes) != 1 or name not in ELEMENTWISE or not constants_only or not call.tracked(call.args[0]):
        return None
    named = known_activation(name, _options(call, name))
    inner = call.nodes[0]
    shape = tuple(result.shape[1:])
    if isinstance(inner, Activation) and not inner.trained:
        return _composed(
            inner.source, lambda z: call.replay(inner.function(z)), shape, f"{inner.constants.name}·{name}"
        )
    if named is not None:
        return Activation(call.nodes, shape, call.replay, named, call.replay)
    return _composed(inner, call.replay, shape, name)


def _options(call: TorchCall, name: str) -> dict[str, Any]:
    positions = {
        "leaky_relu": ["negative_slope"],
        "elu": ["alpha"],
        "softplus": ["beta", "threshold"],
        "hardtanh": ["min_val", "max_val"],
    }
    return {**call.kwargs, **dict(zip(positions.get(name, []), call.args[1:]))}


def _prelu(call: TorchCall, result: Tensor) -> Operation | None:
    x, slope = call.arguments(("input", "weight"))
    if not call.tracked(x) or call.tracked(slope):
        return None
    constants = ActivationConstants("PReLU", max(1.0, float(slope.detach().abs().max())), math.inf, 0.0, True)
    return Activation(
        call.nodes, tuple(result.shape[1:]), call.replay, constants, call.replay, trained=slope.requires_grad
    )


def _composed(
    root: Operation, function: Callable[[Tensor], Tensor], shape: tuple[int, ...], name: str
) -> Operation | None:
    """Return an activation without a known formula, as a function of the value of ``root``."""
    try:
        with torch.enable_grad():
            constants = measure_activation(function, name)
    except Exception:  # noqa: BLE001  # not an elementwise function
        return None
    return Activation((root,), shape, function, constants, function)


def _pointwise(node: Operation) -> tuple[Operation, Callable[[Tensor], Tensor]]:
    """Return the earliest value of which this one is an elementwise function, and that function."""
    fixed_number = isinstance(node, EntrywiseScaling) and node.is_number and not node.trained
    if fixed_number or (isinstance(node, Activation) and not node.trained):
        root, inner = _pointwise(node.source)
        outer: Callable[[Tensor], Tensor] = node.function if isinstance(node, Activation) else node.replay
        return root, lambda z: outer(inner(z))
    return node, lambda z: z


def _arithmetic(call: TorchCall, result: Tensor) -> Operation | None:
    name = call.name.strip("_")
    name = name.removeprefix("i") if call.name.startswith("__i") else name
    name = {"radd": "add", "rmul": "mul", "truediv": "div", "true_divide": "div", "multiply": "mul",
            "subtract": "sub", "divide": "div", "rtruediv": "rdiv"}.get(name, name)  # fmt: skip
    if name in ("cat", "concat", "concatenate"):
        return _concatenation(call, result)
    if name not in ("add", "sub", "rsub", "mul", "div") or set(call.kwargs) - {"other", "input"}:
        return None
    first, second = (*call.args, call.kwargs.get("other"))[:2]
    if call.tracked(first) and call.tracked(second):
        return _combination(call, name, first, second, result)
    if name == "div" and not call.tracked(first):
        return None
    constant = second if call.tracked(first) else first
    return _scaling(call, name, constant, result, from_right=call.tracked(first))


def _scaling(call: TorchCall, name: str, constant: Any, result: Tensor, *, from_right: bool) -> Operation | None:
    if tuple(result.shape[1:]) != call.nodes[0].shape:
        return None  # broadcasting repeats the value
    tensor = torch.as_tensor(constant, dtype=result.dtype, device=result.device).detach()
    if tensor.dim() >= result.dim() and tensor.numel() != 1:
        if len(tensor) != 1:
            return None  # a different constant for every sample
        tensor = tensor[0]
    one = torch.ones(1, dtype=result.dtype, device=result.device)
    tensor = tensor.reshape(1) if tensor.numel() == 1 else tensor
    if name in ("mul", "div"):
        scale, shift = (tensor if name == "mul" else 1 / tensor), None
    elif name == "add":
        scale, shift = one, tensor
    else:
        negated = (name == "sub") != from_right  # c − x
        scale, shift = (-one, tensor) if negated else (one, -tensor)
    trained = isinstance(constant, Tensor) and constant.requires_grad
    return EntrywiseScaling(call.nodes, tuple(result.shape[1:]), call.replay, scale, shift, trained)


def _combination(call: TorchCall, name: str, first: Tensor, second: Tensor, result: Tensor) -> Operation | None:
    shape = tuple(result.shape[1:])
    by_id = {id(tensor): node for tensor, node in call.sources}
    left, right = by_id[id(first)], by_id[id(second)]
    (root, f), (other, g) = _pointwise(left), _pointwise(right)
    if (
        root is other
        and left.shape == right.shape == shape
        and (left is not root or right is not root or name == "mul")
    ):
        operate: Callable[[Tensor, Tensor], Tensor] = getattr(torch, name)
        labels = [node.constants.name for node in (left, right) if isinstance(node, Activation)]
        return _composed(root, lambda z: operate(f(z), g(z)), shape, f"{name} of {' and '.join(labels) or 'z'}")
    if name in ("add", "sub") and left.shape == right.shape == shape:
        return Sum((left, right), shape, lambda a, b: a + b if name == "add" else a - b)
    return None


def _concatenation(call: TorchCall, result: Tensor) -> Operation | None:
    parts = call.args[0] if call.args else call.kwargs.get("tensors", ())
    axis = call.option(1, "dim", call.kwargs.get("axis", 0))
    if not all(call.tracked(part) for part in parts) or axis % result.dim() == 0 or len(parts) != len(call.nodes):
        return None
    return Sum(call.nodes, tuple(result.shape[1:]), lambda *values: torch.cat(values, axis))
