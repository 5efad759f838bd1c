"""The theory of normalised networks as functions of a PyTorch model.

This floor knows torch alone. `lightning_normtheory.callbacks` brings its quantities into a Lightning trainer,
`lightning_normtheory.recipes` trains the papers' experiments.
"""

from importlib.metadata import PackageNotFoundError, version

from lightning_normtheory.batchnorm import batchnorm_factors
from lightning_normtheory.edge_of_stability import edges_of_stability
from lightning_normtheory.feeding import Feeding, feeding_layers
from lightning_normtheory.hessian import hessian_operator, hessian_vector_product
from lightning_normtheory.infinite_width import infinite_width_kernels
from lightning_normtheory.kernel_dynamics import kernel_change, label_alignment
from lightning_normtheory.kernel_measurement import empirical_ntk
from lightning_normtheory.layers import NormalizedWeight
from lightning_normtheory.predictor_hessian import predictor_hessian_norm
from lightning_normtheory.rsc import RSC, rsc_ratio
from lightning_normtheory.tangent_kernel import TangentKernel
from lightning_normtheory.top_eigenvalue import Eigenpair, hessian_eigenpairs, hessian_top_eigenvalue
from lightning_normtheory.untouched import untouched
from lightning_normtheory.weight_norms import NormalizedLayers, min_weight_norm, normalized_layers, weight_norms

__all__ = [
    "RSC",
    "Eigenpair",
    "Feeding",
    "NormalizedLayers",
    "NormalizedWeight",
    "TangentKernel",
    "batchnorm_factors",
    "edges_of_stability",
    "empirical_ntk",
    "feeding_layers",
    "hessian_eigenpairs",
    "hessian_operator",
    "hessian_top_eigenvalue",
    "hessian_vector_product",
    "infinite_width_kernels",
    "kernel_change",
    "label_alignment",
    "min_weight_norm",
    "normalized_layers",
    "predictor_hessian_norm",
    "rsc_ratio",
    "untouched",
    "weight_norms",
]

try:
    __version__ = version("lightning-normtheory")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0"
