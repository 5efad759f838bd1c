"""The theory of normalised networks as functions of a PyTorch model.

This floor knows torch alone. `lightning_normtheory.callbacks` brings its quantities into a Lightning trainer,
`lightning_normtheory.recipes` trains the papers' experiments.
"""

from importlib.metadata import PackageNotFoundError, version

from lightning_normtheory.architecture.chain import Chain, chain_of
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.hessian.edge_of_stability import edges_of_stability
from lightning_normtheory.hessian.eigenvalues import Eigenpair, hessian_eigenpairs, hessian_top_eigenvalue
from lightning_normtheory.hessian.operator import hessian_operator, hessian_vector_product
from lightning_normtheory.hessian.predictor import predictor_hessian_norm
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.model.layers import NormalizedWeight
from lightning_normtheory.norms.batchnorm_inputs import Feeding, feeding_layers
from lightning_normtheory.norms.units import NormalizedLayers, min_weight_norm, normalized_layers, weight_norms
from lightning_normtheory.ntk.dynamics import kernel_change, label_alignment
from lightning_normtheory.ntk.empirical import empirical_ntk
from lightning_normtheory.ntk.result import TangentKernel
from lightning_normtheory.record.theorem_status import TheoremStatus, theorem_table
from lightning_normtheory.rsc import RSC, rsc_ratio
from lightning_normtheory.theorems.applicability import applicable_theorems
from lightning_normtheory.theorems.chain_bounds import NetworkConstants, loss_constants, network_constants
from lightning_normtheory.theorems.complexity import Complexity, network_complexity
from lightning_normtheory.theorems.descent import LossState, guaranteed_step
from lightning_normtheory.theorems.generalization import GeneralizationBound, generalization_bound
from lightning_normtheory.theorems.papers.bn_bounds import BatchNormTheorem, batchnorm_rademacher, batchnorm_theorem
from lightning_normtheory.theorems.papers.bn_factors import batchnorm_factors
from lightning_normtheory.theorems.papers.bn_form import BatchNormForm, batchnorm_form
from lightning_normtheory.theorems.papers.bn_margin import Margin, batchnorm_margin
from lightning_normtheory.theorems.papers.dgm import infinite_width_kernels
from lightning_normtheory.theorems.papers.dyadic import dyadic_data, dyadic_linear_margin
from lightning_normtheory.theorems.papers.rsc import (
    RSCCondition,
    RSCConstants,
    RSCRadii,
    ntk_lower_bound,
    rsc_condition,
    rsc_constants,
    rsc_radii,
)
from lightning_normtheory.theorems.papers.wn import WeightNormConstants, weightnorm_constants
from lightning_normtheory.theorems.papers.wn_generalization import (
    weightnorm_generalization_bound,
    weightnorm_rademacher,
)
from lightning_normtheory.theorems.problem import Problem, network_problem

__all__ = [
    "RSC",
    "BatchNormForm",
    "BatchNormTheorem",
    "Chain",
    "Complexity",
    "Eigenpair",
    "Feeding",
    "GeneralizationBound",
    "LossState",
    "Margin",
    "NetworkConstants",
    "NormalizedLayers",
    "NormalizedWeight",
    "Problem",
    "RSCCondition",
    "RSCConstants",
    "RSCRadii",
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
    "dyadic_data",
    "dyadic_linear_margin",
    "edges_of_stability",
    "empirical_ntk",
    "feeding_layers",
    "generalization_bound",
    "guaranteed_step",
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
    "network_problem",
    "normalized_layers",
    "ntk_lower_bound",
    "predictor_hessian_norm",
    "preserve_state",
    "record_forward",
    "rsc_condition",
    "rsc_constants",
    "rsc_radii",
    "rsc_ratio",
    "theorem_table",
    "weight_norms",
    "weightnorm_constants",
    "weightnorm_generalization_bound",
    "weightnorm_rademacher",
]

try:
    __version__ = version("lightning-normtheory")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0"
