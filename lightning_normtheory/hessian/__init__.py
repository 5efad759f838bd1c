"""Hessian products, eigenvalues, and the edge of stability.

* ``gradient_graph``: the gradient of one batch with its graph.
* ``operator``: Hessian-vector products of a loss (`hessian_vector_product`, `hessian_operator`).
* ``eigenvalues``: leading eigenpairs of the loss's Hessian (`hessian_top_eigenvalue`, `hessian_eigenpairs`).
* ``following``: λ_max from one measurement to the next (`follow_top_eigenvalue`).
* ``second_look``: the test vector there, which tells whether another eigenvector has taken the lead.
* ``warm_start``: what one of them leaves to the next, and to the checkpoint.
* ``bracket``: an interval for λ_max of the training set, from a probe and other samples (`bracket_of_set`).
* ``trace``: the trace of the loss's Hessian with its standard error (`hessian_trace`).
* ``predictor``: ‖∇²f‖ of the model's output for each sample (`predictor_hessian_norm`).
* ``edge_of_stability``: 2/η and the stability limit of SGD for each parameter group.
"""

from lightning_normtheory.hessian.bracket import Bracket, bracket_of_set
from lightning_normtheory.hessian.edge_of_stability import edges_of_stability
from lightning_normtheory.hessian.eigenvalues import Eigenpair, hessian_eigenpairs, hessian_top_eigenvalue
from lightning_normtheory.hessian.operator import hessian_operator, hessian_vector_product
from lightning_normtheory.hessian.predictor import predictor_hessian_norm
from lightning_normtheory.hessian.trace import TraceEstimate, hessian_trace

__all__ = [
    "Bracket",
    "Eigenpair",
    "TraceEstimate",
    "bracket_of_set",
    "edges_of_stability",
    "hessian_eigenpairs",
    "hessian_operator",
    "hessian_top_eigenvalue",
    "hessian_trace",
    "hessian_vector_product",
    "predictor_hessian_norm",
]
