"""Find the normalized layers of a model and their weight vectors, whose scale WeightNorm or BatchNorm removes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

__all__ = [
    "FEEDING_LAYERS",
    "NormalizedWeight",
    "batch_norm_layers",
    "frozen_batch_norm_layers",
    "is_batch_norm",
    "layer_of_parameter",
    "public_name",
    "refuse_uninitialized",
    "unit_vectors",
    "weight_norm_layers",
    "weight_norm_parameters",
    "with_batch_statistics",
]

FEEDING_LAYERS = (nn.Linear, _ConvNd, nn.Bilinear, nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class NormalizedWeight:
    """One weight tensor that is normalized unit by unit.

    Attributes:
        name: of the layer, with the name of the tensor if that is not ``weight`` (``lstm.weight_hh_l0``).
        kind: ``"weight_norm"``, or ``"batch_norm"`` for a layer that feeds a BatchNorm.
        batch_norms: the names of the BatchNorm layers fed by this one.
    """

    name: str
    kind: Literal["weight_norm", "batch_norm"]
    module: nn.Module = field(repr=False)
    tensor_name: str = field(default="weight", repr=False)
    batch_norms: tuple[str, ...] = ()

    @property
    def vectors(self) -> Tensor:
        """The vectors W_i of WN, Definition 3.1, as (units, entries), in their current state.

        These are the directions v_i of a WeightNorm, or the raw weights of a layer that feeds a BatchNorm.
        """
        for tensor_name, g, v in weight_norm_parameters(self.module):
            if tensor_name == self.tensor_name:
                return _directions(g, v)
        return unit_vectors(self.module)


def weight_norm_layers(model: nn.Module) -> Iterator[NormalizedWeight]:
    """Iterate over the weights under WeightNorm, as hook or parametrization, with any ``dim``.

    Example:
        >>> lstm = nn.LSTM(3, 2)
        >>> for name in ("weight_ih_l0", "weight_hh_l0"):
        ...     lstm = nn.utils.parametrizations.weight_norm(lstm, name)
        >>> [(w.name, tuple(w.vectors.shape)) for w in weight_norm_layers(nn.ModuleDict({"lstm": lstm}))]
        [('lstm.weight_ih_l0', (8, 3)), ('lstm.weight_hh_l0', (8, 2))]
    """
    for path, module in model.named_modules():
        for tensor_name, _, _ in weight_norm_parameters(module):
            yield NormalizedWeight(public_name(path, tensor_name), "weight_norm", module, tensor_name)


def weight_norm_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The triples (name, g, v) of the weights that this module itself normalizes as w = g v/‖v‖."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield hook.name, getattr(module, hook.name + "_g"), getattr(module, hook.name + "_v")
    parametrizations = getattr(module, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict):
        for name, chain in parametrizations.items():
            # Of several parametrizations only the first can take two tensors, as WeightNorm does.
            if isinstance(chain, ParametrizationList) and isinstance(chain[0], _WeightNorm):
                yield name, cast(Tensor, chain.original0), cast(Tensor, chain.original1)


def _directions(g: Tensor, v: Tensor) -> Tensor:
    # The shape of g tells `dim`: it is 1 on every axis that the norm runs over, () if these are all axes. An axis of v
    # of length 1 may count as either: the vectors are the same.
    unit_axes = [axis for axis in range(g.dim()) if g.shape[axis] != 1]
    return v.movedim(unit_axes[0], 0).flatten(1) if unit_axes else v.reshape(1, -1)


def unit_vectors(module: nn.Module) -> Tensor:
    """The weights of each output unit of a layer, as (units, entries).

    A transposed convolution stores (in, out/groups, …): its unit is an index of the second axis within a group. The
    output units of an embedding are its columns.

    Example:
        >>> unit_vectors(nn.ConvTranspose1d(4, 6, 3, groups=2)).shape
        torch.Size([6, 6])
    """
    weight = cast(Tensor, module.weight)
    if isinstance(module, _ConvTransposeNd):
        grouped = weight.unflatten(0, (module.groups, -1))  # (groups, in/groups, out/groups, …)
        return grouped.transpose(1, 2).flatten(0, 1).flatten(1)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return weight.t()
    return weight.flatten(1)


def public_name(path: str, tensor_name: str = "weight") -> str:
    """The name under which a layer is logged; the same for compiled and uncompiled models.

    Example:
        >>> public_name("_orig_mod.net.0"), public_name("lstm", "weight_hh_l0"), public_name("")
        ('net.0', 'lstm.weight_hh_l0', 'weight')
    """
    layer = ".".join(part for part in path.split(".") if part and part != "_orig_mod")
    if tensor_name == "weight" and layer:
        return layer
    return f"{layer}.{tensor_name}" if layer else tensor_name


def layer_of_parameter(name: str) -> str:
    """Return the `public_name` of the layer that a parameter belongs to, parametrized or not.

    Example:
        >>> layer_of_parameter("net.0.bias"), layer_of_parameter("net.0.parametrizations.weight.original0")
        ('net.0', 'net.0')
    """
    return public_name(name.rpartition(".")[0].partition("parametrizations")[0].rstrip("."))


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm: of torch, derived from it, or another class that keeps running statistics.

    One whose weight is a buffer, too, is frozen: it applies constants, whatever the batch.

    Example:
        >>> is_batch_norm(nn.BatchNorm2d(3)), is_batch_norm(nn.InstanceNorm2d(3, track_running_stats=True))
        (True, False)
    """
    if isinstance(module, _BatchNorm):
        return True
    return _keeps_statistics(module) and "weight" not in module._buffers and hasattr(module, "eps")


def _keeps_statistics(module: nn.Module) -> bool:
    # A ScriptModule's keys are a list.
    return {"running_mean", "running_var"} <= set(module._buffers.keys()) and not isinstance(module, _InstanceNorm)


def batch_norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every BatchNorm (`is_batch_norm`) by the name of its module."""
    return {path: cast(_BatchNorm, module) for path, module in model.named_modules() if is_batch_norm(module)}


def frozen_batch_norm_layers(model: nn.Module) -> list[str]:
    """The names of the modules that apply running statistics as constants, such as torchvision's FrozenBatchNorm2d."""
    return [path for path, module in model.named_modules() if _keeps_statistics(module) and not is_batch_norm(module)]


def with_batch_statistics(model: nn.Module) -> bool:
    """Whether a BatchNorm of the model, in its current mode, uses batch statistics."""
    return any(layer.training or layer.running_mean is None for layer in batch_norm_layers(model).values())


def refuse_uninitialized(model: nn.Module) -> None:
    """Refuse lazy modules, which have no weights before their first forward pass."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"Expected initialized parameters, but {lazy[0]!r} is still lazy. Run one batch through the model first."
        )
