"""Diagnostics from the theory of normalized networks, as functions of a PyTorch model.

`lightning_normtheory.callbacks` brings them into a Lightning trainer, `lightning_normtheory.recipes` trains the papers'
experiments. More functions are in the rooms `hessian`, `ntk`, `norms`, `theorems`, `record` and `view`.

Names are loaded on first use, so that reading a run's file or writing its report does not import torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_normtheory.hessian import (
        Eigenpair,
        hessian_eigenpairs,
        hessian_top_eigenvalue,
        hessian_vector_product,
        predictor_hessian_norm,
    )
    from lightning_normtheory.norms import NormalizedLayers, min_weight_norm, normalized_layers, weight_norms
    from lightning_normtheory.ntk import TangentKernel, empirical_ntk
    from lightning_normtheory.record import History, read_histories
    from lightning_normtheory.rsc import RSC, rsc_ratio
    from lightning_normtheory.rsc_train import RSCTrain, rsc_ratio_train
    from lightning_normtheory.theorems import (
        Margin,
        RSCConstants,
        TheoremStatus,
        WeightNormConstants,
        applicable_theorems,
        batchnorm_margin,
        batchnorm_rademacher,
        infinite_width_kernels,
        rsc_constants,
        weightnorm_constants,
        weightnorm_generalization_bound,
    )
    from lightning_normtheory.view import write_report

_HOMES = {
    "hessian": "Eigenpair hessian_eigenpairs hessian_top_eigenvalue hessian_vector_product predictor_hessian_norm",
    "norms": "NormalizedLayers min_weight_norm normalized_layers weight_norms",
    "ntk": "TangentKernel empirical_ntk",
    "record": "History read_histories",
    "rsc": "RSC rsc_ratio",
    "rsc_train": "RSCTrain rsc_ratio_train",
    "theorems": "Margin RSCConstants TheoremStatus WeightNormConstants applicable_theorems batchnorm_margin "
    "batchnorm_rademacher infinite_width_kernels rsc_constants weightnorm_constants weightnorm_generalization_bound",
    "view": "write_report",
}
_HOME = {name: room for room, names in _HOMES.items() for name in names.split()}

__all__ = [
    "RSC",
    "Eigenpair",
    "History",
    "Margin",
    "NormalizedLayers",
    "RSCConstants",
    "RSCTrain",
    "TangentKernel",
    "TheoremStatus",
    "WeightNormConstants",
    "applicable_theorems",
    "batchnorm_margin",
    "batchnorm_rademacher",
    "empirical_ntk",
    "hessian_eigenpairs",
    "hessian_top_eigenvalue",
    "hessian_vector_product",
    "infinite_width_kernels",
    "min_weight_norm",
    "normalized_layers",
    "predictor_hessian_norm",
    "read_histories",
    "rsc_constants",
    "rsc_ratio",
    "rsc_ratio_train",
    "weight_norms",
    "weightnorm_constants",
    "weightnorm_generalization_bound",
    "write_report",
]

try:
    __version__ = version("lightning-normtheory")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
