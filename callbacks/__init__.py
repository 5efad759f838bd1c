"""Lightning callbacks that stream the diagnostics to any logger, W&B among them."""

from lightning_normtheory.callbacks.batchnorm_theory import BatchNormTheory
from lightning_normtheory.callbacks.convergence_certificate import ConvergenceCertificate
from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.hessian_top_eigenvalue import HessianTopEigenvalue
from lightning_normtheory.callbacks.measurement.probe import Probe
from lightning_normtheory.callbacks.min_weight_norm import MinWeightNorm
from lightning_normtheory.callbacks.norm_theory import NormTheory
from lightning_normtheory.callbacks.ntk_least_eigenvalue import NTKLeastEigenvalue
from lightning_normtheory.callbacks.rademacher_bound import RademacherBound
from lightning_normtheory.callbacks.rsc_ratio import RSCRatio

__all__ = [
    "BatchNormTheory",
    "ConvergenceCertificate",
    "DiagnosticCallback",
    "HessianTopEigenvalue",
    "MinWeightNorm",
    "NTKLeastEigenvalue",
    "NormTheory",
    "Probe",
    "RSCRatio",
    "RademacherBound",
]
