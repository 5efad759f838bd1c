"""`RademacherBound`: generalization bounds from the network's norms, and the measured gap."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.measurement.generalization_gap import Gap
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.measuring.processes import FailedElsewhereError
from lightning_normtheory.model.layers import batch_norm_layers
from lightning_normtheory.theorems.complexity import Complexity
from lightning_normtheory.theorems.generalization import generalization_bound
from lightning_normtheory.theorems.losses import KnownLoss
from lightning_normtheory.theorems.papers.bn_bounds import batchnorm_complexity
from lightning_normtheory.theorems.papers.bn_factors import batchnorm_factors
from lightning_normtheory.theorems.papers.bn_form import BatchNormForm
from lightning_normtheory.theorems.problem import Problem

__all__ = ["RademacherBound"]

_BOUND = "rademacher_bound"
_GAP = "generalization"
# Samples of the probe, as one batch, for BN's form.
_SAMPLES = 1024


class RademacherBoundDiagnostic(Diagnostic):
    """The complexity of the network's class, the resulting bound, and the measured gap."""

    title = "generalization"
    key = _BOUND
    metrics = (key,)
    needs_outputs = True
    needs_validation = True
    shared = ("problem", "gap")

    def __init__(self, delta: float = 0.05, x_norm: float | None = None) -> None:
        if not 0 < delta < 1:
            raise ValueError(f"Expected delta to be a probability between 0 and 1, but got {delta!r}.")
        if x_norm is not None and not 0 <= x_norm < math.inf:
            raise ValueError(f"Expected x_norm to be a norm that no input exceeds, but got {x_norm!r}.")
        self._delta, self._x_norm = delta, x_norm
        self._initial: _Rows | None = None  # at fit start, in BN's form

    def start(self, measurement: Measurement) -> None:
        form = measurement.theory.batchnorm_form(_SAMPLES)
        self._initial = None if isinstance(form, str) else _rows(form)

    def measure(self, measurement: Measurement) -> dict[str, float]:
        self.reasons: dict[str, str] = {}
        metrics = self._bounds(measurement)
        gap = self._gap(measurement)
        if gap is not None:
            metrics[f"{_GAP}_gap"] = gap.gap
            metrics[f"{_GAP}_train_loss"] = gap.train_loss
            metrics[f"{_GAP}_validation_loss"] = gap.validation_loss
        bound = metrics.get(f"{_GAP}_bound")
        train = _prediction_loss(measurement) if gap is None else gap.train_loss
        if bound is not None:
            if train is not None:
                metrics["population_loss_bound"] = train + bound
            metrics[f"{_GAP}_bound_vacuous"] = float(not (train or 0.0) + bound < _loss_of_zero(measurement))
        return metrics

    def _bounds(self, measurement: Measurement) -> dict[str, float]:
        problem, n = measurement.theory.problem, measurement.training_samples
        reason = _why_not(problem, n)
        if reason:
            self.reasons[_BOUND] = reason
            return {_BOUND: math.nan}
        assert not isinstance(problem.complexity, str)
        assert n is not None
        x_norm = problem.x_norm if self._x_norm is None else self._x_norm
        classes = self._classes(problem.complexity, measurement)
        complexity = min(classes, key=lambda each: each.rademacher(n, x_norm))
        metrics = {_BOUND: complexity.rademacher(n, x_norm), "rademacher_x_norm": x_norm}
        loss = measurement.theory.loss
        if not isinstance(loss, KnownLoss):
            self.reasons[f"{_GAP}_bound"] = loss
            return metrics
        # Which class is smaller depends on the data: the bounds of both must hold.
        found = generalization_bound(complexity, loss, n=n, x_norm=x_norm, delta=self._delta / len(classes))
        return {**metrics, f"{_GAP}_bound": found.value, f"{_GAP}_bound_fixed_radii": found.fixed}

    def _gap(self, measurement: Measurement) -> Gap | None:
        try:
            return measurement.generalization_gap
        # The loss cannot read a validation batch, here or in another process; the bounds do not need it.
        except (ValueError, FailedElsewhereError) as error:
            self.reasons[f"{_GAP}_gap"] = str(error).rstrip(".")
            return None

    def _classes(self, generic: Complexity, measurement: Measurement) -> list[Complexity]:
        """Return the classes that contain the network with its running statistics: the generic one, and for BN's form
        that around the weights at the start."""
        form = measurement.theory.batchnorm_form(_SAMPLES) if self._initial is not None else ""
        if isinstance(form, str) or self._initial is None:
            return [generic]
        rows = _rows(form)
        if rows is None or rows.weights.shape != self._initial.weights.shape:
            return [generic]
        (factors,) = batchnorm_factors(form.network.norm).values()
        return [generic, batchnorm_complexity(form.a, form.c, rows.joined, self._initial.joined, factors)]

    def state_dict(self) -> dict[str, Any]:
        return {"initial": None if self._initial is None else tuple(self._initial)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._initial = None if state.get("initial") is None else _Rows(*state["initial"])


class _Rows(NamedTuple):
    """(v_j, b_j − mean_j) of BN's form with the running means. The weights are apart: a checkpoint has them once."""

    weights: Tensor
    shifts: Tensor

    @property
    def joined(self) -> Tensor:
        return torch.cat([self.weights.to(torch.float64), self.shifts[:, None]], dim=1)


def _rows(form: BatchNormForm) -> _Rows | None:
    """Return a copy of the rows; ``None`` without running means."""
    layer, mean = form.network.hidden, cast(Tensor | None, form.network.norm.running_mean)
    if mean is None:
        return None
    mean = mean.detach().cpu().to(torch.float64)
    bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.detach().cpu().to(torch.float64)
    return _Rows(layer.weight.detach().cpu().clone(), bias - mean)


def _prediction_loss(measurement: Measurement) -> float | None:
    """Return the loss of the function that predicts, if it is the function that is trained."""
    return None if batch_norm_layers(measurement.model) else measurement.mean_loss


def _loss_of_zero(measurement: Measurement) -> float:
    loss = measurement.theory.problem.loss
    assert isinstance(loss, KnownLoss)
    return loss.of_zero(measurement.theory.target_matrix)


def _why_not(problem: Problem, n: int | None) -> str:
    if isinstance(problem.complexity, str):
        return problem.complexity
    if n is None:
        return "the size of the training set is unknown"
    return "" if math.isfinite(problem.x_norm) else "the norms of the inputs are unknown"


class RademacherBound(DiagnosticCallback):
    """Logs a bound of the Rademacher complexity of the network's class, the generalization bound that follows from it,
    and the measured gap between training and validation loss.

    The class contains all networks of the same structure whose layer norms are at most the current ones: row norms for
    tanh-like activations (WN, Theorem 6.1, with trained lengths), Frobenius norms for ReLU (Golowich et al. 2018). A
    BatchNorm is folded into its layer with its running statistics; for residual connections the bounds of the branches
    add up. For the two-layer ReLU networks of BN (`batchnorm_form`) there is a second class, around the weights at fit
    start (`batchnorm_complexity`, after BN's Lemma F.1): the one of lower complexity gives all bounds, with δ/2 for
    each. Both are about the network that predicts, with running statistics. The docs derive every step (theorems.md).
    For a network with any other operation (attention, LayerNorm) the bound is NaN, and a warning gives the reason once.

    Logged after every n-th epoch or step:

    * ``normtheory/rademacher_bound``: Σ_h R_n(f_h) over the outputs h, n being the size of the training set, at the
      current norms ("at fixed radii");
    * ``normtheory/rademacher_x_norm``: the bound of ‖x‖ that it uses: ``x_norm``, or the largest on the probe;
    * for the square, cross-entropy or logistic loss, ``normtheory/generalization_bound``: with probability 1 − δ the
      expected loss exceeds the training loss by at most this; a union over a grid of radii makes it hold for norms
      measured after training; ``normtheory/generalization_bound_fixed_radii``: without that union, for norms fixed
      before training. These losses lie in [0, b] for bounded outputs; a loss of another form, such as one that can be
      negative, has no bound;
    * ``normtheory/population_loss_bound``: the bound + the loss of the probe, as an estimate of the training loss
      (with BatchNorm, only if the run has validation data), and ``normtheory/generalization_bound_vacuous``: 1 if
      that is not below the loss of a network whose outputs are all zero, else 0;
    * if the run has validation data, ``normtheory/generalization_gap`` = validation loss − train loss, both with
      the loss of the training step on equally many samples, and ``…_train_loss`` and ``…_validation_loss``;
    * ``normtheory/seconds``: the time of the measurement.

    The arguments that are not listed are those of `DiagnosticCallback`.

    Args:
        delta: δ, the probability that the bound fails.
        x_norm: a norm that no input exceeds; ``None``: the largest on the probe.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[RademacherBound(x_norm=1.0)], logger=False)
    """

    def __init__(self, *args: Any, delta: float = 0.05, x_norm: float | None = None, **kwargs: Any) -> None:
        self._options: dict[str, Any] = {"delta": delta, "x_norm": x_norm}
        super().__init__(*args, **kwargs)

    def make_diagnostics(self) -> list[Diagnostic]:
        return [RademacherBoundDiagnostic(**self._options)]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **self._options}
