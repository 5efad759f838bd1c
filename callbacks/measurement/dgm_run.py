"""What DGM's theorems need of a run: inputs and residuals of the first samples, and the step of gradient descent."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.callbacks.measurement.gradient_steps import gradient_steps
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.linalg.precision import to_float64
from lightning_normtheory.model.checks import some_samples

__all__ = ["DGMSamples", "dgm_samples", "square_loss_factor", "why_not_gradient_descent"]


class DGMSamples(NamedTuple):
    """The first samples of the probe.

    Attributes:
        x: their inputs (n, d).
        residual: ‖f − y‖₂ over them; NaN without targets.
    """

    x: Tensor
    residual: float


def dgm_samples(measurement: Measurement, samples: int) -> DGMSamples | None:
    """Return inputs and residual of a network with one output; ``None`` if the inputs cannot be identified."""
    function = measurement.function
    targets = measurement.theory.targets(samples)
    inputs, outputs = [], []
    with function.measuring(), torch.no_grad():
        for batch, asked in function.first(samples):
            _, parts = function.parts_of(function.on_device(batch), batch, batch.samples)
            if parts is None:
                return None
            inputs.append(parts.x[:asked].flatten(1))
            outputs.append(function.outputs_of(batch)[:asked].flatten())
    x, f = torch.cat(inputs), to_float64(torch.cat(outputs)).cpu()
    if targets is None or targets.numel() != f.numel():
        return DGMSamples(x, math.nan)
    return DGMSamples(x, float((f - to_float64(targets).flatten()).norm()))


def square_loss_factor(measurement: Measurement, samples: int) -> float:
    """Return c of a loss cΣ_i(f(x_i) − y_i)² over the first samples, one batch; NaN if it has not this form.

    The loss is evaluated on all and on half of them: a sum has the same c on both, a mean over samples twice the c on
    the half.
    """
    function = measurement.function
    (batch, asked), *others = function.first(samples)
    targets = measurement.theory.targets(samples)
    if others or targets is None or targets.numel() != asked or asked < 2 or function.findings.loss_problem:
        return math.nan
    factors = []
    with function.measuring(), torch.no_grad():
        outputs = to_float64(function.outputs_of(batch)[:asked].flatten()).cpu()
        squares = (outputs - to_float64(targets).flatten()).square()
        for n in (asked, asked // 2):
            with function.fresh(batch):
                part = some_samples(function.on_device(batch), batch.samples, slice(n))
                value = float(function.loss_on(part, batch.index).detach())
            factors.append(value / float(squares[:n].sum()) if float(squares[:n].sum()) > 0 else math.nan)
    whole, half = factors
    is_sum = math.isclose(half, whole, rel_tol=1e-4)
    is_mean = math.isclose(half * (asked // 2), whole * asked, rel_tol=1e-4)
    return whole if whole > 0 and (is_sum or is_mean) else math.nan


def why_not_gradient_descent(measurement: Measurement, samples: int) -> str:
    """Return why the steps of the run are not gradient descent on exactly these samples; empty if they are."""
    n, steps = measurement.training_samples, gradient_steps(measurement.function)
    if n != samples:
        return f"the theorem is about all {'' if n is None else f'{n} '}training samples, the kernel about {samples}"
    return steps.other or steps.batches
