"""Check which theorems apply to a network, and compute their bounds.

* ``verdicts``: the verdict on each theorem, assumption by assumption (`applicable_theorems`).
* ``initialization``: whether weights are a Gaussian start.
* ``problem``: the properties of a network, its samples and its loss that the theorems assume (`network_problem`).
* ``losses``: the losses that the theorems cover, and how to recognize them.
* ``chain_bounds``: Hessian, gradient and Lipschitz bounds of any smooth chain of layers, and α, β of its loss.
* ``descent``: the guaranteed step of gradient descent, and sufficient conditions for convergence.
* ``complexity``: the Rademacher complexity of a network's class.
* ``generalization``: the generalization bound of that class.
* ``progressive``: the test error during the first pass over the data, bounded by the losses of that pass.
* ``papers``: the constants and bounds of each paper, for networks of exactly its form.
"""

from lightning_normtheory.record.theorem_status import TheoremStatus, theorem_table
from lightning_normtheory.theorems.chain_bounds import NetworkConstants, loss_constants, network_constants
from lightning_normtheory.theorems.complexity import Complexity, network_complexity
from lightning_normtheory.theorems.descent import LossState, guaranteed_step, mean_gradient_condition
from lightning_normtheory.theorems.generalization import GeneralizationBound, generalization_bound
from lightning_normtheory.theorems.losses import KnownLoss
from lightning_normtheory.theorems.papers.bn_bounds import (
    BatchNormGDTheorem,
    BatchNormTheorem,
    batchnorm_complexity,
    batchnorm_gd_theorem,
    batchnorm_rademacher,
    batchnorm_theorem,
)
from lightning_normtheory.theorems.papers.bn_factors import batchnorm_factors
from lightning_normtheory.theorems.papers.bn_form import BatchNormForm, batchnorm_form
from lightning_normtheory.theorems.papers.bn_margin import Margin, batchnorm_margin
from lightning_normtheory.theorems.papers.dgm import infinite_width_kernels
from lightning_normtheory.theorems.papers.dgm_rates import BestScale, best_scale
from lightning_normtheory.theorems.papers.dyadic import dyadic_data, dyadic_linear_margin
from lightning_normtheory.theorems.papers.lin import KernelSize, curvature_ratio, kernel_change_bound
from lightning_normtheory.theorems.papers.lin_form import lin_form
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
from lightning_normtheory.theorems.progressive import ErrorBound, progressive_bound
from lightning_normtheory.theorems.verdicts import applicable_theorems

__all__ = [
    "BatchNormForm",
    "BatchNormGDTheorem",
    "BatchNormTheorem",
    "BestScale",
    "Complexity",
    "ErrorBound",
    "GeneralizationBound",
    "KernelSize",
    "KnownLoss",
    "LossState",
    "Margin",
    "NetworkConstants",
    "Problem",
    "RSCCondition",
    "RSCConstants",
    "RSCRadii",
    "TheoremStatus",
    "WeightNormConstants",
    "applicable_theorems",
    "batchnorm_complexity",
    "batchnorm_factors",
    "batchnorm_form",
    "batchnorm_gd_theorem",
    "batchnorm_margin",
    "batchnorm_rademacher",
    "batchnorm_theorem",
    "best_scale",
    "curvature_ratio",
    "dyadic_data",
    "dyadic_linear_margin",
    "generalization_bound",
    "guaranteed_step",
    "infinite_width_kernels",
    "kernel_change_bound",
    "lin_form",
    "loss_constants",
    "mean_gradient_condition",
    "network_complexity",
    "network_constants",
    "network_problem",
    "ntk_lower_bound",
    "progressive_bound",
    "rsc_condition",
    "rsc_constants",
    "rsc_radii",
    "theorem_table",
    "weightnorm_constants",
    "weightnorm_generalization_bound",
    "weightnorm_rademacher",
]
