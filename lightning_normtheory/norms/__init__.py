"""Norms of normalized weight vectors, and the layers that feed a BatchNorm.

* ``units``: every normalized weight of a model and the norms of its vectors (`weight_norms`, `min_weight_norm`).
* ``displacement``: how far the lengths and directions of WeightNorm are from their start.
* ``batchnorm_inputs``: trace a model and find the layers whose output each BatchNorm normalizes (`feeding_layers`).
* ``scale_flow``: rules for layers and BatchNorms, where a scaling of a unit starts and ends. The rule for another
  normalization, such as LayerNorm, belongs here; ``model.layers`` lists the layer classes.
* ``scale_rules``: rules for all remaining operations (activations, pooling, reshaping): which of them pass a scaling
  on, and which write in place.
"""

from lightning_normtheory.norms.batchnorm_inputs import Feeding, feeding_layers
from lightning_normtheory.norms.displacement import weight_norm_displacement, weight_norm_start
from lightning_normtheory.norms.units import NormalizedLayers, min_weight_norm, normalized_layers, weight_norms

__all__ = [
    "Feeding",
    "NormalizedLayers",
    "feeding_layers",
    "min_weight_norm",
    "normalized_layers",
    "weight_norm_displacement",
    "weight_norm_start",
    "weight_norms",
]
