"""Rules for operations other than layers and BatchNorms: which pass a scaling of channels on, which write in place."""

import operator
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd

from lightning_normtheory.record.wording import join_names
from lightning_normtheory.scaling.flow import Flow, merge, obstruct

__all__ = ["may_alias", "operation_name", "parameter_ids", "pass_operation", "written_node"]

# Commute with scaling a channel and with shifting it by a constant, so a bias before them is allowed.
_AFFINE_MODULES = (nn.Identity, nn.Upsample, _MaxPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd)
_AFFINE_NAMES = frozenset({"contiguous", "clone", "interpolate", "max_pool1d", "max_pool2d", "max_pool3d"}) | {
    f"adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)
}
# Commute with scaling but not with shifting. Average pooling belongs here because of its zero padding.
_HOMOGENEOUS_MODULES = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    _AvgPoolNd,
)
_HOMOGENEOUS_NAMES = frozenset({"relu", "relu_", "leaky_relu", "prelu", "abs", "dropout"}) | {
    f"{kind}{n}d" for kind in ("dropout", "avg_pool") for n in (1, 2, 3)
}
# May return a view of their input: writing into one writes into both.
# fmt: off
_VIEWS = frozenset(
    {
        "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "transpose", "swapaxes",
        "swapdims", "permute", "movedim", "moveaxis", "t", "squeeze", "unsqueeze", "expand", "expand_as",
        "broadcast_to", "chunk", "split", "tensor_split", "getitem", "getattr", "narrow", "select", "unbind",
        "diagonal", "unfold", "as_strided", "contiguous", "detach", "to", "type", "float", "double", "half",
        "bfloat16", "real", "pos", "imag", "dropout", "Identity", "Flatten", "Unflatten", "Dropout", "Dropout1d",
        "Dropout2d", "Dropout3d",
    }
)
# fmt: on


def pass_operation(node: fx.Node, module: nn.Module | None, inputs: Sequence[Flow]) -> Flow:
    """Return the value of a node that is neither a layer nor a BatchNorm."""
    name = operation_name(node, module)
    if name.endswith("_as"):  # reshape_as: of the second value only the shape
        inputs = inputs[:1]
    result = _known_operation(node, name, module, inputs) if inputs else None
    if result is None:
        mixing = len(inputs) > 1
        reason = f"{name} mixes it with another value" if mixing else f"{name} does not commute with scaling"
        result = obstruct(inputs, reason)
        if module is not None and parameter_ids(module):
            result = replace(result, unknown=f"it is fed by {name} {node.target!r}")
    return result if module is None else replace(result, tainted=result.tainted | parameter_ids(module))


def _known_operation(node: fx.Node, name: str, module: nn.Module | None, inputs: Sequence[Flow]) -> Flow | None:
    result = None
    if _is_affine(name, module) and _keeps_channels_separate(name, inputs[0]):
        result = _with_operands(inputs[0], inputs[1:], name)
    elif _is_homogeneous(name, module) and _keeps_channels_separate(name, inputs[0]):
        result = _with_operands(_without_biased(inputs[0], name), inputs[1:], name)
    elif name in ("cat", "concat", "concatenate"):
        result = _concatenate(node, inputs)
    elif name in ("flatten", "Flatten"):
        result = _flatten(node, module, inputs[0])
    elif name in ("permute", "transpose", "swapaxes"):
        result = _transpose(node, name, inputs[0])
    elif name == "getitem":
        result = _slice(node, inputs[0])
    elif name == "mean":
        result = _spatial_mean(node, inputs[0])
    elif name in ("mul", "truediv") and len(inputs) == 1 and _positive_number(node.args[1:]):
        result = inputs[0]
    return result


def operation_name(node: fx.Node, module: nn.Module | None) -> str:
    """Return the class name of a module, or the name of a function or method: ``ReLU``, ``relu``, ``relu_``."""
    if module is not None:
        return type(module).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def parameter_ids(module: nn.Module) -> frozenset[int]:
    """Return the ``id`` of every parameter of a module."""
    return frozenset(id(parameter) for parameter in module.parameters())


def _is_affine(name: str, module: nn.Module | None) -> bool:
    if isinstance(module, _AvgPoolNd):
        paddings = module.padding if isinstance(module.padding, tuple) else (module.padding,)
        return not any(paddings) and not module.ceil_mode
    return isinstance(module, _AFFINE_MODULES) if module is not None else name in _AFFINE_NAMES


def _is_homogeneous(name: str, module: nn.Module | None) -> bool:
    return isinstance(module, _HOMOGENEOUS_MODULES) if module is not None else name in _HOMOGENEOUS_NAMES


def _keeps_channels_separate(name: str, flow: Flow) -> bool:
    """Whether a pooling or resizing leaves the channel axis alone.

    Given one axis less than it expects, PyTorch treats the samples as channels and pools over the channels.
    """
    pooling = re.search(r"[pP]ool(\d)d", name)
    if pooling:
        return flow.axis == 1 and flow.ndim == int(pooling[1]) + 2
    return flow.axis == 1 or not name.startswith(("Upsampl", "interpolate"))


def _with_operands(flow: Flow, operands: Sequence[Flow], name: str) -> Flow:
    """Return the value after an operation with further operands, such as a slope."""
    dependent = frozenset[int]().union(*(operand.depends_on for operand in operands))
    kept = {weight: feeder for weight, feeder in flow.scaled.items() if weight not in dependent}
    unknown = flow.unknown if len(kept) == len(flow.scaled) else f"{name} has another operand that depends on it"
    return replace(flow, scaled=kept, tainted=flow.tainted | dependent, unknown=unknown)


def _without_biased(flow: Flow, name: str) -> Flow:
    biased = {weight for weight, feeder in flow.scaled.items() if feeder.biased}
    if not biased:
        return flow
    layers = join_names(repr(flow.scaled[weight].layer) for weight in biased)
    return replace(
        flow,
        scaled={weight: feeder for weight, feeder in flow.scaled.items() if weight not in biased},
        tainted=flow.tainted | biased,
        unknown=f"{name} after the bias of {layers} does not commute with scaling",
    )


def _argument(node: fx.Node, position: int, *names: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def _concatenate(node: fx.Node, inputs: Sequence[Flow]) -> Flow | None:
    axis = _argument(node, 1, "dim", "axis", default=0)
    if not isinstance(axis, int):
        return None
    if axis == 1:  # outputs of Linear layers have two axes unless known otherwise, as before a BatchNorm
        inputs = [
            replace(flow, axis=1, ndim=2) if flow.axis == -1 and flow.ndim in (None, 2) else flow for flow in inputs
        ]
    for flow in inputs:
        same = axis == flow.axis or (flow.ndim is not None and axis % flow.ndim == flow.axis % flow.ndim)
        if flow.scaled and not same:
            return None
    return merge(inputs)


def _flatten(node: fx.Node, module: nn.Module | None, flow: Flow) -> Flow | None:
    start, end = (
        (module.start_dim, module.end_dim)
        if isinstance(module, nn.Flatten)
        else (_argument(node, 1, "start_dim", default=0), _argument(node, 2, "end_dim", default=-1))
    )
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    if (start, end) == (0, 1) and flow.axis == -1:
        return replace(flow, ndim=None if flow.ndim is None else flow.ndim - 1)
    if end != -1 or start < 1:
        return None
    # Every entry of the merged axis still belongs to one unit.
    unchanged = flow.ndim == start + 1
    return replace(
        flow, axis=1 if start == 1 else flow.axis, ndim=start + 1, channels=flow.channels if unchanged else None
    )


def _transpose(node: fx.Node, name: str, flow: Flow) -> Flow | None:
    if name == "permute":
        first = _argument(node, 1, "dims", default=())
        order = list(first if isinstance(first, (tuple, list)) else node.args[1:])
    else:
        swapped = [_argument(node, 1, "dim0", "axis0"), _argument(node, 2, "dim1", "axis1")]
        # If ndim is unknown, swapping axes 1 and 2 implies 3 axes; a BatchNorm that expects another number rejects it.
        ndim = flow.ndim or (3 if set(swapped) <= {1, 2} else 0)
        if not all(isinstance(axis, int) and -ndim <= axis < ndim for axis in swapped):
            return None
        order = list(range(ndim))
        order[swapped[0]], order[swapped[1]] = order[swapped[1]], order[swapped[0]]
    ndim = len(order)
    if not all(isinstance(axis, int) for axis in order) or flow.ndim not in (None, ndim):
        return None
    moved = [axis % ndim for axis in order].index(flow.axis % ndim)
    new_axis = {1: 1, ndim - 1: -1}.get(moved)
    return None if new_axis is None else replace(flow, axis=new_axis, ndim=ndim)


def _slice(node: fx.Node, flow: Flow) -> Flow | None:
    """Return part of a value; every entry still belongs to the same unit."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return replace(flow, channels=None) if all(isinstance(each, slice) or each is ... for each in index) else None


def _spatial_mean(node: fx.Node, flow: Flow) -> Flow | None:
    dims = _argument(node, 1, "dim", "axis")
    dims = list(dims) if isinstance(dims, (tuple, list)) else [dims]
    if flow.axis != 1 or flow.ndim is None or not all(isinstance(dim, int) and dim % flow.ndim > 1 for dim in dims):
        return None
    return replace(flow, ndim=flow.ndim if _argument(node, 2, "keepdim", default=False) else flow.ndim - len(dims))


def _positive_number(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 1 and isinstance(arguments[0], (int, float)) and arguments[0] > 0


def written_node(node: fx.Node, module: nn.Module | None) -> fx.Node | None:
    """Return the node whose value an operation overwrites, if it works in place."""
    inputs = node.all_input_nodes
    name = operation_name(node, module)
    if isinstance(node.kwargs.get("out"), fx.Node):
        return node.kwargs["out"]  # type: ignore[return-value]
    if module is not None:
        in_place = getattr(module, "inplace", False) is True
    elif node.op == "call_function":
        augmented = getattr(node.target, "__module__", "") == "_operator" and hasattr(operator, f"__{name}__")
        in_place = name == "setitem" or name.endswith("_") or (augmented and name[0] == "i" and name != "index")
        flags = () if name == "batch_norm" else node.args  # there, a flag means training
        in_place = in_place or node.kwargs.get("inplace") is True or any(flag is True for flag in flags)
    else:
        in_place = name.endswith("_") and not name.endswith("__")
    return inputs[0] if in_place and inputs else None


def may_alias(node: fx.Node, module: nn.Module | None, *, traced: bool) -> bool:
    """Whether a result may share memory with the first input."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    origin = getattr(node.target, "__module__", None) or "torch"
    foreign = node.op == "call_function" and origin.split(".")[0] not in ("torch", "_operator", "math")
    # Any method may return its input: y.cpu() is y if y is on the CPU.
    view = node.op == "call_method" or operation_name(node, module) in _VIEWS
    return not traced or foreign or view or written_node(node, module) is not None
