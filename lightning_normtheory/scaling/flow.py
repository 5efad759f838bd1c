"""Rules for layers and normalizations: where a scaling of a layer's units starts and ends.

Each value in a network's graph carries two sets of weights:

* ``scaled``: doubling a unit of such a weight doubles whole channels of the value and changes nothing else in it;
* ``tainted``: the value depends on such a weight in some other way.

A layer's output is scaled by its own weight. A BatchNorm drops the scaled weights and keeps the tainted ones. An
operation without a rule (``rules``) turns scaled into tainted. This is conservative: a scaling may be missed, but
is never invented.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lightning_normtheory.model.layers import weight_norm_parameters

__all__ = ["Feeder", "Flow", "enter_batch_norm", "enter_layer", "merge", "obstruct"]


class Feeder(NamedTuple):
    """A layer, and whether it adds a bias: relu(2Wx + b) is not 2 relu(Wx + b)."""

    layer: str
    biased: bool


@dataclass(frozen=True)
class Flow:
    """The weights that one value depends on, and how.

    Attributes:
        scaled: the layer, by the ``id`` of its weight.
        tainted: the ``id`` of every tainted weight.
        axis: the axis of the channels, 1 or -1.
        ndim: number of axes, if known.
        channels: length of the channel axis, if known.
        unknown: why some channels are scaled by no weight; empty if all are.
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


def enter_layer(path: str, module: nn.Module, inputs: Sequence[Flow]) -> Flow:
    """Return the output of a layer: scaled by its own weight, tainted by everything that its input depends on."""
    tainted = frozenset().union(*(flow.depends_on for flow in inputs))
    raw = module._parameters.get("weight")
    normalized = [g for name, g, _ in weight_norm_parameters(module) if name == "weight"]
    renormalized = getattr(module, "max_norm", None) is not None  # an embedding that rescales its weight
    if (raw is None and not normalized) or renormalized:
        return Flow(
            {},
            tainted | frozenset(id(p) for p in module.parameters()),
            unknown=f"the weight of {path!r} is not a plain parameter",
        )
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


_NDIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,), _BatchNorm: (2, 3, 4, 5)}


def enter_batch_norm(path: str, module: nn.Module, flow: Flow) -> tuple[Flow, Flow]:
    """Return the input of a BatchNorm, with the scalings that it undoes, and its output."""
    shapes = next((ndims for kind, ndims in _NDIMS.items() if isinstance(module, kind)), ())
    # The output of a Linear has the shape (samples, features) unless known otherwise.
    on_axis_1 = flow.axis == 1 or flow.ndim == 2 or (2 in shapes and flow.ndim is None)
    fits = flow.channels in (None, getattr(module, "num_features", flow.channels))
    if not on_axis_1 or not fits or (shapes and flow.ndim not in (None, *shapes)):
        flow = obstruct([flow], f"{path!r} normalizes another axis than the units of the layer before it")
    return flow, Flow({}, flow.tainted, unknown=f"it follows the BatchNorm {path!r}")


def merge(flows: Sequence[Flow]) -> Flow:
    """Concatenate several values along their channels."""
    tainted = frozenset().union(*(flow.tainted for flow in flows))
    scaled: dict[int, Feeder] = {}
    for weight, feeder in (item for flow in flows for item in flow.scaled.items()):
        if weight not in tainted:
            biased = feeder.biased or (weight in scaled and scaled[weight].biased)  # tied layers, one of them biased
            scaled[weight] = Feeder(feeder.layer, biased)
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
    """Apply an operation without a rule: every dependence becomes a taint."""
    tainted = frozenset().union(*(flow.depends_on for flow in flows))
    earlier = next((flow.unknown for flow in flows if flow.unknown), "")
    return Flow({}, tainted, unknown=reason if any(flow.scaled for flow in flows) or not earlier else earlier)
