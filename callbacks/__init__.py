"""Lightning callbacks that log the diagnostics to every logger of the trainer, W&B among them.

What one measurement does:

1. Lightning calls ``on_train_epoch_end`` or ``on_train_batch_end`` of the callback (`engine.fit`). If the epoch or step
   is due (`engine.schedule`), and within the time budget (`engine.planning`), the callback measures.
2. It creates the measurement (`measurement.measurement`): the trained function (`measurement.function`) on fixed
   samples (`samples.probe`), and parts for curvature, kernels and theory. Nothing is computed yet.
3. Each diagnostic (`engine.diagnostic`; one or two in each public module here) asks the measurement for quantities. The
   measurement computes each one once, with functions of the theory rooms, and restores the model, the random generators
   and the trainer afterwards. The diagnostic returns metrics: names and numbers. If it fails, the callback warns once
   and logs NaN; the reason stays in the row of the epoch.
4. The callback logs the metrics through ``pl_module.log`` (`engine.reporting`), which reaches every logger,
   EarlyStopping and ModelCheckpoint, and appends a row to ``normtheory.jsonl`` (`output.run_file`).
5. A checkpoint stores probe indices, the state of each diagnostic and how far the fit is (`engine.lifecycle`).

At fit start the callback checks the setup (`engine.checks`). Before the first step it tries the user's `training_step`
on one batch (`measurement.trial`), to find loss and predictor in it (`step`), and the diagnostics measure what they
compare with later. At fit end `output.fit_end` prints a table.
"""

from lightning_normtheory.callbacks.batchnorm_theory import BatchNormTheory
from lightning_normtheory.callbacks.convergence_certificate import ConvergenceCertificate
from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.hessian_top_eigenvalue import HessianTopEigenvalue
from lightning_normtheory.callbacks.hessian_trace import HessianTrace
from lightning_normtheory.callbacks.linearity import Linearity
from lightning_normtheory.callbacks.min_weight_norm import MinWeightNorm
from lightning_normtheory.callbacks.norm_theory import NormTheory
from lightning_normtheory.callbacks.ntk_least_eigenvalue import NTKLeastEigenvalue
from lightning_normtheory.callbacks.progressive_bound import ProgressiveBound
from lightning_normtheory.callbacks.rademacher_bound import RademacherBound
from lightning_normtheory.callbacks.rsc_ratio import RSCRatio
from lightning_normtheory.callbacks.samples.probe import Probe
from lightning_normtheory.callbacks.weightnorm_theory import WeightNormTheory

__all__ = [
    "BatchNormTheory",
    "ConvergenceCertificate",
    "DiagnosticCallback",
    "HessianTopEigenvalue",
    "HessianTrace",
    "Linearity",
    "MinWeightNorm",
    "NTKLeastEigenvalue",
    "NormTheory",
    "Probe",
    "ProgressiveBound",
    "RSCRatio",
    "RademacherBound",
    "WeightNormTheory",
]
