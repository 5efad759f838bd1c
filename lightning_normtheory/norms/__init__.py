"""Norms of normalized weight vectors, and the layers that feed a BatchNorm."""

from lightning_normtheory.norms.batchnorm_inputs import Feeding, feeding_layers
from lightning_normtheory.norms.units import NormalizedLayers, min_weight_norm, normalized_layers, weight_norms

__all__ = ["Feeding", "NormalizedLayers", "feeding_layers", "min_weight_norm", "normalized_layers", "weight_norms"]
