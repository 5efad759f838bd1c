"""How a scaling of one layer's units travels through the operations of a network.

Each value in a network's graph carries two sets of weights:

* ``scaled``: doubling a unit of such a weight doubles whole channels of the value and changes nothing else in it;
* ``tainted``: the value depends on such a weight in some other way.

A layer's output is scaled by its own weight. The operations below are known to pass a scaling on. Every other one turns
scaled into tainted, which errs on the safe side: a scaling may be missed, never invented.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd

from lightning_normtheory.layers import weight_norm_parameters

__all__ = ["Flow", "enter_batch_norm", "enter_layer", "merge", "obstruct", "pass_operation"]


class Feeder(NamedTuple):
    """A layer and whether it adds a bias: relu(2Wx + b) is not 2 relu(Wx + b)."""

    layer: str
    biased: bool


@dataclass(frozen=True)
class Flow:
    """What is known of one value.

    Attributes:
        scaled: by the identity of the weight.
        tainted: identities of weights.
        axis: the axis of the channels, 1 or -1.
        ndim: number of axes, where known.
        channels: length of that axis, where known.
        unknown: where the channels come from that nothing scales.
    """

    scaled: dict[int, Feeder] = field(default_factory=dict)
    tainted: frozenset[int] = frozenset()
    axis: int = 1
    ndim: int | None = None
    channels: int | None = None
    unknown: str = ""

    @property
    def depends_on(self) -> frozenset[int]:
        return self.tainted | self.scaled.keys()


# Commute with scaling a channel and with shifting it by a constant: a bias before them does no harm.
_AFFINE_MODULES = (nn.Identity, nn.Upsample, _MaxPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd)
_AFFINE_NAMES = frozenset({"contiguous", "clone", "interpolate", "max_pool1d", "max_pool2d", "max_pool3d"}) | {
    f"adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)
}
# Commute with scaling only. Average pooling is here because of its zero padding.
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
# Pooling and resizing run over the axes behind the second: only channels on axis 1 stay apart.
_SPATIAL = ("Pool", "pool", "Upsampl", "interpolate")


def enter_layer(path: str, module: nn.Module, inputs: Sequence[Flow]) -> Flow:
    """The output of a layer: scaled by its own weight, tainted by all that its input depends on."""
    tainted = frozenset().union(*(flow.depends_on for flow in inputs))
    raw = module._parameters.get("weight")
    normalized = [g for name, g, _ in weight_norm_parameters(module) if name == "weight"]
    renormalized = getattr(module, "max_norm", None) is not None  # an embedding that rewrites its own weight
    if (raw is None and not normalized) or renormalized:
        return Flow({}, tainted | _parameter_ids(module), unknown=f"the weight of {path!r} is not a plain parameter")
    weight = id(normalized[0] if normalized else raw)
    shape: dict[str, Any]
    if isinstance(module, _ConvNd):
        shape = {"axis": 1, "ndim": len(module.kernel_size) + 2, "channels": module.out_channels}
    elif isinstance(module, (nn.Linear, nn.Bilinear)):
        shape = {"axis": -1, "ndim": inputs[0].ndim, "channels": module.out_features}
    else:
        shape = {"axis": -1, "channels": module.embedding_dim}
    if weight in tainted:
        return Flow({}, tainted, unknown=f"{path!r} is applied to values that depend on its own weight", **shape)
    return Flow({weight: Feeder(path, getattr(module, "bias", None) is not None)}, tainted, **shape)


def enter_batch_norm(path: str, module: _BatchNorm, flow: Flow) -> tuple[Flow, Flow]:
    """What a BatchNorm normalises, with the scalings that it undoes, and its output."""
    flat = isinstance(module, (nn.BatchNorm1d, nn.SyncBatchNorm))  # may see (samples, features)
    on_axis_1 = flow.axis == 1 or (flat and flow.ndim in (None, 2))
    if not on_axis_1 or flow.channels not in (None, module.num_features):
        flow = obstruct([flow], f"{path!r} normalises another axis than that of the units before it")
    return flow, Flow({}, flow.tainted, unknown=f"it follows the BatchNorm {path!r}")


def merge(flows: Sequence[Flow]) -> Flow:
    """Several values side by side along their channels."""
    tainted = frozenset().union(*(flow.tainted for flow in flows))
    scaled = {weight: feeder for flow in flows for weight, feeder in flow.scaled.items() if weight not in tainted}
    known = [flow.channels for flow in flows if flow.channels is not None]
    leading = next((flow for flow in flows if flow.scaled), flows[0])
    return replace(
        leading,
        scaled=scaled,
        tainted=tainted,
        channels=sum(known) if len(known) == len(flows) else None,
        unknown=next((flow.unknown for flow in flows if flow.unknown), ""),
    )


def obstruct(flows: Sequence[Flow], reason: str) -> Flow:
    """An operation of which nothing is known: every dependence becomes a taint."""
    tainted = frozenset().union(*(flow.depends_on for flow in flows))
    earlier = next((flow.unknown for flow in flows if flow.unknown), "")
    return Flow({}, tainted, unknown=reason if any(flow.scaled for flow in flows) or not earlier else earlier)


def pass_operation(node: fx.Node, module: nn.Module | None, flows: dict[fx.Node, Flow]) -> Flow:
    """The value of any node that is neither a layer nor a BatchNorm."""
    inputs = [flows[argument] for argument in node.all_input_nodes]
    name = type(module).__name__ if module is not None else _function_name(node)
    result = None
    if inputs and _is_affine(name, module):
        result = inputs[0]
    elif inputs and _is_homogeneous(name, module):
        result = _without_biased(inputs[0], name)
    elif name in ("cat", "concat", "concatenate"):
        result = _concatenate(node, inputs)
    elif name in ("flatten", "Flatten"):
        result = _flatten(node, module, inputs[0])
    elif name in ("permute", "transpose", "swapaxes"):
        result = _transpose(node, name, inputs[0])
    elif name == "mean":
        result = _spatial_mean(node, inputs[0])
    elif name in ("mul", "truediv") and len(inputs) == 1 and _positive_number(node.args[1:]):
        result = inputs[0]
    if result is None or (any(word in name for word in _SPATIAL) and result.axis != 1):
        mixing = len(inputs) > 1
        reason = f"{name} mixes it with another value" if mixing else f"{name} does not commute with scaling"
        result = obstruct(inputs, reason)
    return result if module is None else replace(result, tainted=result.tainted | _parameter_ids(module))


def _function_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _parameter_ids(module: nn.Module) -> frozenset[int]:
    return frozenset(id(parameter) for parameter in module.parameters())


def _is_affine(name: str, module: nn.Module | None) -> bool:
    if isinstance(module, _AvgPoolNd):
        paddings = module.padding if isinstance(module.padding, tuple) else (module.padding,)
        return not any(paddings) and not module.ceil_mode
    return isinstance(module, _AFFINE_MODULES) if module is not None else name in _AFFINE_NAMES


def _is_homogeneous(name: str, module: nn.Module | None) -> bool:
    return isinstance(module, _HOMOGENEOUS_MODULES) if module is not None else name in _HOMOGENEOUS_NAMES


def _without_biased(flow: Flow, name: str) -> Flow:
    biased = {weight for weight, feeder in flow.scaled.items() if feeder.biased}
    if not biased:
        return flow
    layers = ", ".join(repr(flow.scaled[weight].layer) for weight in biased)
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


def _concatenate(node: fx.Node, inputs: list[Flow]) -> Flow | None:
    axis = _argument(node, 1, "dim", "axis", default=0)
    for flow in inputs:
        same = axis == flow.axis or (
            flow.ndim is not None and isinstance(axis, int) and axis % flow.ndim == flow.axis % flow.ndim
        )
        if flow.scaled and not same:
            return None
    return merge(inputs)


def _flatten(node: fx.Node, module: nn.Module | None, flow: Flow) -> Flow | None:
    start, end = (
        (module.start_dim, module.end_dim)
        if isinstance(module, nn.Flatten)
        else (_argument(node, 1, "start_dim", default=0), _argument(node, 2, "end_dim", default=-1))
    )
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
    order: Any
    ndim: int | None
    if name == "permute":
        order = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        ndim = len(order)
    else:
        first, second = _argument(node, 1, "dim0", "axis0"), _argument(node, 2, "dim1", "axis1")
        # BatchNorm1d is the only one that can follow a swap of the axes 1 and 2 of unknown ndim, and then ndim is 3.
        ndim = flow.ndim or (3 if {first, second} <= {1, 2} else None)
        if ndim is None:
            return None
        order = list(range(ndim))
        order[first], order[second] = order[second], order[first]
    if flow.ndim not in (None, ndim):
        return None
    moved = [position % ndim for position in order].index(flow.axis % ndim)
    axis = {1: 1, ndim - 1: -1}.get(moved)
    return None if axis is None else replace(flow, axis=axis, ndim=ndim)


def _spatial_mean(node: fx.Node, flow: Flow) -> Flow | None:
    dims = _argument(node, 1, "dim", "axis")
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    if flow.axis != 1 or flow.ndim is None or not dims or any(dim % flow.ndim < 2 for dim in dims):
        return None
    return replace(flow, ndim=flow.ndim if _argument(node, 2, "keepdim", default=False) else flow.ndim - len(dims))


def _positive_number(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 1 and isinstance(arguments[0], (int, float)) and arguments[0] > 0
