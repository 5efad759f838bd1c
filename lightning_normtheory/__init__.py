"""The theory of normalised networks as functions of a PyTorch model.

This floor knows torch alone. `lightning_normtheory.callbacks` brings its quantities into a Lightning trainer,
`lightning_normtheory.recipes` trains the papers' experiments.
"""

from importlib.metadata import PackageNotFoundError, version

from lightning_normtheory.batchnorm import batchnorm_factors
from lightning_normtheory.batchnorm_bounds import BatchNormTheorem, batchnorm_rademacher, batchnorm_theorem
from lightning_normtheory.batchnorm_form import BatchNormForm, batchnorm_form
from lightning_normtheory.batchnorm_margin import Margin, batchnorm_margin
from lightning_normtheory.certificate import Local, descent
from lightning_normtheory.chain import Chain, chain_of
from lightning_normtheory.dyadic import dyadic_data, dyadic_linear_margin
from lightning_normtheory.edge_of_stability import edges_of_stability
from lightning_normtheory.feeding import Feeding, feeding_layers
from lightning_normtheory.generalization import GeneralizationBound, generalization_bound
from lightning_normtheory.hessian import hessian_operator, hessian_vector_product
from lightning_normtheory.infinite_width import infinite_width_kernels
from lightning_normtheory.kernel_dynamics import kernel_change, label_alignment
from lightning_normtheory.kernel_measurement import empirical_ntk
from lightning_normtheory.layers import NormalizedWeight
from lightning_normtheory.network_constants import NetworkConstants, loss_constants, network_constants
from lightning_normtheory.peeling import Complexity, network_complexity
from lightning_normtheory.predictor_hessian import predictor_hessian_norm
from lightning_normtheory.recorded_forward import record_forward
from lightning_normtheory.rsc import RSC, rsc_ratio
from lightning_normtheory.rsc_constants import (
    RSCCondition,
    RSCConstants,
    RSCRadii,
    ntk_lower_bound,
    rsc_condition,
    rsc_constants,
    rsc_radii,
)
from lightning_normtheory.setting import Setting, network_setting
from lightning_normtheory.tangent_kernel import TangentKernel
from lightning_normtheory.theorems import TheoremStatus, applicable_theorems, theorem_table
from lightning_normtheory.top_eigenvalue import Eigenpair, hessian_eigenpairs, hessian_top_eigenvalue
from lightning_normtheory.untouched import untouched
from lightning_normtheory.weight_norms import NormalizedLayers, min_weight_norm, normalized_layers, weight_norms
from lightning_normtheory.weightnorm_constants import WeightNormConstants, weightnorm_constants
from lightning_normtheory.weightnorm_generalization import weightnorm_generalization_bound, weightnorm_rademacher

__all__ = [
    "RSC",
    "BatchNormForm",
    "BatchNormTheorem",
    "Chain",
    "Complexity",
    "Eigenpair",
    "Feeding",
    "GeneralizationBound",
    "Local",
    "Margin",
    "NetworkConstants",
    "NormalizedLayers",
    "NormalizedWeight",
    "RSCCondition",
    "RSCConstants",
    "RSCRadii",
    "Setting",
    "TangentKernel",
    "TheoremStatus",
    "WeightNormConstants",
    "applicable_theorems",
    "batchnorm_factors",
    "batchnorm_form",
    "batchnorm_margin",
    "batchnorm_rademacher",
    "batchnorm_theorem",
    "chain_of",
    "descent",
    "dyadic_data",
    "dyadic_linear_margin",
    "edges_of_stability",
    "empirical_ntk",
    "feeding_layers",
    "generalization_bound",
    "hessian_eigenpairs",
    "hessian_operator",
    "hessian_top_eigenvalue",
    "hessian_vector_product",
    "infinite_width_kernels",
    "kernel_change",
    "label_alignment",
    "loss_constants",
    "min_weight_norm",
    "network_complexity",
    "network_constants",
    "network_setting",
    "normalized_layers",
    "ntk_lower_bound",
    "predictor_hessian_norm",
    "record_forward",
    "rsc_condition",
    "rsc_constants",
    "rsc_radii",
    "rsc_ratio",
    "theorem_table",
    "untouched",
    "weight_norms",
    "weightnorm_constants",
    "weightnorm_generalization_bound",
    "weightnorm_rademacher",
]

try:
    __version__ = version("lightning-normtheory")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0"
