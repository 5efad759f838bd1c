"""Rules for linear and affine operations, normalization, pooling and reshaping: their weights and norms."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_normtheory.architecture.calls import TorchCall, opaque_result, per_axis
from lightning_normtheory.architecture.operations import (
    Affine,
    EntrywiseScaling,
    FixedMap,
    Input,
    LogSoftmax,
    MaxPooling,
    Operation,
    Origin,
)
from lightning_normtheory.linalg.precision import device_for_float64

__all__ = ["affine_step", "linear_step"]

# Operations that change at most the shape of a value. `_keeps_samples_separate` tests whether they mix samples.
# fmt: off
_RESHAPES = frozenset({
    "flatten", "view", "reshape", "view_as", "reshape_as", "permute", "transpose", "movedim", "moveaxis", "swapaxes",
    "squeeze", "unsqueeze", "unflatten", "contiguous", "clone", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "feature_dropout", "alpha_dropout", "__getitem__", "narrow", "chunk", "split", "to", "float", "double", "half",
    "type", "identity", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle",
})
# fmt: on
_CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_TRANSPOSED = {"conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}


def affine_step(call: TorchCall, result: Tensor, origin: Callable[[Tensor], Origin]) -> Affine | None:
    """Return a Linear, a convolution, transposed or not, or an embedding of tokens; ``origin`` tells of a weight."""
    reach = 1
    if call.name == "linear":
        x, weight, bias = call.arguments(("input", "weight", "bias"))
    elif call.name in ("matmul", "mm", "__matmul__"):
        (x, transposed), bias = call.arguments(("input", "other")), None
        if not isinstance(transposed, Tensor) or transposed.dim() != 2 or call.tracked(transposed):
            return None
        weight = transposed.mT
    elif call.name in _CONVOLUTIONS:
        x, weight, bias = call.arguments(("input", "weight", "bias"))
        reach = _reach(call, result, weight)
    elif call.name in _TRANSPOSED:
        # An output reads every tap of its unit at most once, each from another position; a tap reaches one output.
        x, weight, bias = call.arguments(("input", "weight", "bias"))
        reach = math.prod(min(k, out) for k, out in zip(weight.shape[2:], result.shape[2:]))
    elif call.name == "embedding":
        # A unit vector for each token, times the transposed weight; one with max_norm changes its weight.
        (x, weight), bias = call.arguments(("input", "weight")), None
        if not isinstance(call.nodes[0], Input) or call.option(3, "max_norm", None) is not None:
            return None
    else:
        return None
    if call.tracked(weight) or call.tracked(bias) or not call.tracked(x):
        return None
    matrix = weight.detach()
    if call.name in _TRANSPOSED:  # (in, out/groups, …)
        matrix = matrix.unflatten(0, (call.option(6, "groups", 1), -1)).transpose(1, 2).flatten(0, 1)
    matrix = matrix.t() if call.name == "embedding" else matrix.flatten(1)
    return Affine(
        call.nodes,
        tuple(result.shape[1:]),
        call.replay,
        matrix,
        None if bias is None else bias.detach(),
        origin(transposed if "matmul" in call.name or call.name == "mm" else weight),
        None if bias is None else origin(bias),
        positions=math.prod(result.shape[1:]) // len(matrix),
        reach=reach,
        units_first=call.name in _CONVOLUTIONS or call.name in _TRANSPOSED,
    )


def _reach(call: TorchCall, result: Tensor, weight: Tensor) -> int:
    """Return the largest number of patches that contain one entry of the input."""
    axes = _CONVOLUTIONS[call.name]
    stride, dilation = (per_axis(call.option(i, name, 1), axes) for i, name in ((3, "stride"), (5, "dilation")))
    counts = [
        # With stride and dilation, one entry may be in a patch for every tap of the kernel.
        min(k if d > 1 and s > 1 else math.ceil(k / s), out)
        for k, s, d, out in zip(weight.shape[2:], stride, dilation, result.shape[2:])
    ]
    return math.prod(counts)


def linear_step(call: TorchCall, result: Tensor) -> Operation | None:
    """Return a fixed linear map, a BatchNorm or a pooling; ``None`` for anything else."""
    return _fixed_map(call, result) or _pooling(call, result)


def _fixed_map(call: TorchCall, result: Tensor) -> Operation | None:
    shape = tuple(result.shape[1:])
    if call.name == "batch_norm":
        return _batch_norm(call, result)
    if len(call.nodes) != 1 or not call.tracked(call.args[0] if call.args else None):
        return None
    if call.name == "log_softmax" and isinstance(axis := call.option(1, "dim", None), int) and axis % result.dim():
        return LogSoftmax(call.nodes, shape, call.replay, axis % result.dim() - 1)
    if call.name in _RESHAPES:
        return FixedMap(call.nodes, shape, call.replay) if _keeps_samples_separate(call, result) else None
    if call.name == "pad":
        mode, value = call.option(2, "mode", "constant"), call.option(3, "value", None)
        zero = mode == "constant" and not value
        return FixedMap(call.nodes, shape, call.replay) if zero else None
    if call.name == "mean":
        axes = call.option(1, "dim", None)
        axes = [axes] if isinstance(axes, int) else axes
        if not axes or any(axis % (len(call.nodes[0].shape) + 1) == 0 for axis in axes):
            return None
        averaged = math.prod(call.nodes[0].shape) / max(math.prod(shape), 1)
        return FixedMap(call.nodes, shape, call.replay, averaged**-0.5)
    return None


def _keeps_samples_separate(call: TorchCall, result: Tensor) -> bool:
    """Whether permuted samples give permuted values, and no entry of a sample occurs twice."""
    n, shape = len(result), call.nodes[0].shape
    if (call.option(2, "training", False) is True and "dropout" in call.name) or not result.is_floating_point():
        return False
    # On the device of the values: the call may have tensors there. In float32, too many marks are not distinct.
    dtype = torch.float64 if device_for_float64(result.device) == result.device else torch.float32
    marks = torch.arange(n * math.prod(shape), dtype=dtype, device=result.device).reshape(n, *shape)
    try:
        moved, straight = call.replay(marks.flip(0)).cpu(), call.replay(marks).cpu()
    except Exception:  # noqa: BLE001  # for example, a dtype that it does not accept
        return False
    entries = straight.reshape(len(straight), -1)
    distinct = all(len(row.unique()) == len(row) for row in entries)
    return distinct and torch.equal(moved.flip(0), straight) and entries.shape == (n, result[0].numel())


def _batch_norm(call: TorchCall, result: Tensor) -> Operation | None:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    _, mean, var, weight, bias, training, _, eps = call.arguments(names)
    if training or mean is None:
        return opaque_result(call.sources, result, "a BatchNorm with batch statistics couples the samples")
    scale = (1 if weight is None else weight.detach()) / torch.sqrt(var + (1e-5 if eps is None else eps))
    shift = (0 if bias is None else bias.detach()) - mean * scale
    form = (-1,) + (1,) * (result.dim() - 2)
    trained = any(p is not None and p.requires_grad for p in (weight, bias))
    return EntrywiseScaling(
        call.nodes, tuple(result.shape[1:]), call.replay, scale.reshape(form), shift.reshape(form), trained
    )


def _pooling(call: TorchCall, result: Tensor) -> Operation | None:
    name, _, dimensions = call.name.partition("_pool")
    if len(call.nodes) != 1 or not dimensions.endswith("d"):
        return None
    axes = int(dimensions[0])
    before, after = call.nodes[0].shape[-axes:], result.shape[-axes:]
    if name.startswith("adaptive"):
        if any(b < a for b, a in zip(before, after)):
            return None
        # Windows have ⌊b/a⌋ to ⌈b/a⌉ + 1 entries and overlap unless a divides b.
        sizes = [b // a for b, a in zip(before, after)]
        largest = [b // a if b % a == 0 else b // a + 2 for b, a in zip(before, after)]
        reaches = [1 if b % a == 0 else 2 for b, a in zip(before, after)]
    else:
        kernel = per_axis(call.option(1, "kernel_size", 1), axes)
        stride = per_axis(call.option(2, "stride", None) or kernel, axes)
        dilation = per_axis(call.option(4, "dilation", 1), axes) if name == "max" else [1] * axes
        sizes = largest = kernel
        reaches = [k if d > 1 else math.ceil(k / s) for k, s, d in zip(kernel, stride, dilation)]
    shape, reach = tuple(result.shape[1:]), math.prod(reaches)
    if name in ("max", "adaptive_max"):
        return MaxPooling(call.nodes, shape, call.replay, math.prod(largest), reach)
    if name not in ("avg", "adaptive_avg") or call.option(6, "divisor_override", None) is not None:
        return None
    # Windows cut off at the border may divide by the number of entries that remain.
    smallest = 1 if name == "avg" and _cuts_windows(call) else math.prod(sizes)
    return FixedMap(call.nodes, shape, call.replay, math.sqrt(reach / smallest))


def _cuts_windows(call: TorchCall) -> bool:
    return bool(call.option(4, "ceil_mode", False)) or call.option(5, "count_include_pad", True) is False
