"""Split the parameters of a model by its BatchNorms, which are WeightNorms in another norm (DGM, eq. 2.2)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from lightning_normtheory.model.layers import batch_norm_layers, public_name
from lightning_normtheory.scaling.batchnorm_inputs import feeding_layers

__all__ = ["BatchNormSplit", "batch_norm_split"]


class BatchNormSplit(NamedTuple):
    """The result of `batch_norm_split`.

    Attributes:
        directions: the names of the parameters w, the weights of layers that feed a BatchNorm.
        lengths: the names of the parameters γ, the scales of BatchNorms that a layer feeds.
        unknown: the reason, for every BatchNorm with input channels that could not be traced to a layer.
    """

    directions: frozenset[str] = frozenset()
    lengths: frozenset[str] = frozenset()
    unknown: Mapping[str, str] = MappingProxyType({})

    def inside(self, name: str) -> "BatchNormSplit":
        """Return the split of a module that holds the model as its attribute ``name``, which is not in the reasons."""
        directions, lengths = (
            frozenset(f"{name}.{each}" for each in names) for names in (self.directions, self.lengths)
        )
        return BatchNormSplit(directions, lengths, self.unknown)


def batch_norm_split(model: nn.Module) -> BatchNormSplit:
    """Find the parameters that BatchNorm makes directions and lengths.

    A layer w followed by a BatchNorm with the statistics of the batch and ε = 0 computes γ·w·(x − μ)/‖w‖_S plus a
    shift, where ‖w‖_S² = wᵀSw and S is the covariance of the layer's inputs: the WeightNorm g·w·x/‖w‖ in the norm ‖·‖_S
    (DGM, eq. 2.2). So γ is the length, w the direction.

    A layer feeds a BatchNorm if `feeding_layers` says so. A BatchNorm that no layer is known to feed has neither, and
    one that a layer feeds in some channels has all of γ as lengths. A layer under WeightNorm is left out: it has a
    direction v and a length g of its own. Tied parameters have their first name.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> found = batch_norm_split(net)
        >>> [*found.directions], [*found.lengths], found.unknown
        (['0.weight'], ['1.weight'], {'3': "it follows the BatchNorm '1'"})
    """
    batch_norms = batch_norm_layers(model)
    if not batch_norms:
        return BatchNormSplit()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    directions: set[str] = set()
    lengths: set[str] = set()
    unknown: dict[str, str] = {}
    for path, feeding in feeding_layers(model).items():
        if path not in batch_norms:  # a module that calls functional.batch_norm: its scale is not known
            continue
        if feeding.unknown:
            unknown[public_name(path)] = feeding.unknown
        for layer in feeding.layers:
            for found, owner in ((directions, layer), (lengths, path)):
                weight = model.get_submodule(owner)._parameters.get("weight")
                if weight is not None:  # otherwise under WeightNorm, or without γ
                    found.add(names[id(weight)])
    return BatchNormSplit(frozenset(directions), frozenset(lengths), unknown)
