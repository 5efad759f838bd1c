"""Norms of normalized weight vectors. The layers that feed a BatchNorm are found by ``lightning_normtheory.scaling``.

* ``units``: every normalized weight of a model and the norms of its vectors (`weight_norms`, `min_weight_norm`).
* ``displacement``: how far the lengths and directions of WeightNorm are from their start.
* ``distance``: ‖θ − θ₀‖ of all parameters, from few entries of a large model.
"""

from lightning_normtheory.norms.displacement import weight_norm_displacement, weight_norm_start
from lightning_normtheory.norms.units import NormalizedLayers, min_weight_norm, normalized_layers, weight_norms
from lightning_normtheory.scaling.batchnorm_inputs import Feeding, feeding_layers

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
