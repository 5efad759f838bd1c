"""`BatchNormTheory`: the normalization factors of any BatchNorm, and BN's margins, radii and bound where they apply."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.diagnostic import SAMPLE_SETTINGS, Diagnostic, NotApplicable, layer_metric
from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.model.layers import batch_norm_layers, public_name
from lightning_normtheory.theorems.papers.bn_bounds import (
    BatchNormGDTheorem,
    BatchNormTheorem,
    batchnorm_gd_theorem,
    batchnorm_rademacher,
    batchnorm_theorem,
    hidden_displacement,
)
from lightning_normtheory.theorems.papers.bn_factors import batchnorm_factors
from lightning_normtheory.theorems.papers.bn_form import BatchNormForm, BatchNormNetwork, batchnorm_network
from lightning_normtheory.theorems.papers.bn_margin import batchnorm_margin, class_signs

__all__ = ["BatchNormTheory"]


class _Start(NamedTuple):
    """A network of BN's form before its training, on n samples: V_0, U_0 = (a, c) and quantities measured once.

    γ_a, γ_c (with the factor 1/√m) and the error bound of their sum are ``None`` without labels of two classes.
    """

    v: Tensor
    u: Tensor
    n: int
    epsilon_n: float
    input_norm: float
    gammas: tuple[float, float, float] | None
    factors: Tensor | None = None  # N_j; a checkpoint of an older version has none


class BatchNormTheoryDiagnostic(Diagnostic):
    """ε_N of each layer; for a two-layer network, its displacement and the radii of BN, Theorem 2.1."""

    title = "BatchNorm"
    key = "batchnorm_epsilon"
    metrics = (key,)
    needs_loss = False
    optional = True
    needs_outputs = True

    def __init__(self, samples: int = 1024, delta: float = 0.01) -> None:
        if type(samples) is not int or samples < 2:
            raise ValueError(f"Expected the number of samples to be an integer from 2 on, but got {samples!r}.")
        if not 0 < delta < 1:
            raise ValueError(f"Expected delta in (0, 1), but got {delta!r}.")
        self._samples, self._delta = samples, delta
        self._start: _Start | None = None
        self._examined = False

    def check(self, model: nn.Module) -> None:
        layers = batch_norm_layers(model)
        if not layers:
            raise NotApplicable("Expected a BatchNorm, but the model has none. Leave out BatchNormTheory.")
        tracked = any(layer.running_var is not None for layer in layers.values())
        if not tracked and isinstance(batchnorm_network(model), str):
            raise NotApplicable(
                "Expected a BatchNorm with running statistics, but none keeps any. Set track_running_stats=True."
            )

    def start(self, measurement: Measurement) -> None:
        self._examined = True
        form = measurement.theory.batchnorm_form(self._samples)
        self._start = None if isinstance(form, str) else _started(form, measurement.theory.targets(self._samples))

    def measure(self, measurement: Measurement) -> dict[str, float]:
        if not self._examined:
            self.start(measurement)  # the samples of an iterable dataset are known only now
        self.reasons: dict[str, str] = {}
        metrics = _epsilons(measurement.function)
        network = batchnorm_network(measurement.model)
        if self._start is not None and not isinstance(network, str) and network.v.shape == self._start.v.shape:
            metrics.update(self._theorem(self._start, network, measurement))
        return metrics

    def _theorem(self, start: _Start, network: BatchNormNetwork, measurement: Measurement) -> dict[str, float]:
        metrics = {
            "batchnorm_epsilon_start": start.epsilon_n,
            "batchnorm_input_norm": start.input_norm,
            "batchnorm_shift": network.shift,
            "batchnorm_displacement_u": float((_outer(network) - start.u).norm()),
            "batchnorm_displacement_v": float((network.v.detach().cpu() - start.v).norm()),
        }
        form = measurement.theory.batchnorm_form(self._samples)
        if not isinstance(form, str):
            n = measurement.training_samples
            metrics["batchnorm_rademacher"] = batchnorm_rademacher(
                form.a, form.c, form.v, start.v, form.x_centered, form.factors, n=n
            )
        if start.gammas is None:
            return metrics
        labels = class_signs(measurement.theory.targets(self._samples), start.n)
        if not isinstance(form, str) and labels is not None:
            metrics["batchnorm_margin"] = form.normalized_margin(labels)
        else:
            self.reasons["batchnorm_margin"] = form if isinstance(form, str) else "the labels are not two classes"
        gamma_a, gamma_c, gap = start.gammas
        width, d = start.v.shape
        at: dict[str, Any] = {
            "epsilon_n": start.epsilon_n,
            "gamma": gamma_a + gamma_c,
            "n": measurement.training_samples or start.n,
            "d": d,
            "width": width,
            "steps": max(1, measurement.trainer.global_step),
            "delta": self._delta,
        }
        theorem, printed = batchnorm_theorem(**at), batchnorm_gd_theorem(**at)
        if start.factors is not None:
            metrics["batchnorm_delta_v"] = hidden_displacement(network.v, start.v, start.factors)
            metrics["batchnorm_delta_v_allowed"] = (gamma_a + gamma_c) / 32
        within = (
            metrics["batchnorm_displacement_u"] <= theorem.radius_u
            and metrics["batchnorm_displacement_v"] <= theorem.radius_v
        )
        return metrics | {
            "batchnorm_gamma_a": gamma_a,
            "batchnorm_gamma_c": gamma_c,
            "batchnorm_gamma_gap": gap,
            "batchnorm_radius_u": theorem.radius_u,
            "batchnorm_radius_v": theorem.radius_v,
            "batchnorm_gd_radius_u": printed.radius_u,
            "batchnorm_within_radii": float(within),
            "batchnorm_width_needed": theorem.width_lower,
            "batchnorm_width_ok": float(theorem.width_ok),
            **_error_bounds(theorem, printed, start),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"looked": self._examined, "start": None if self._start is None else tuple(self._start)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._examined = state.get("looked", False)
        self._start = _Start(*state["start"]) if state.get("start") else None

    def forget(self, changed: Collection[str]) -> str:
        if self._start is None or not (SAMPLE_SETTINGS | {"predict", "parameters", "batchnorm_samples"}) & set(changed):
            return ""
        self._start, self._examined = None, False
        return "BN's margins and weights at fit start"


def _error_bounds(theorem: BatchNormTheorem, printed: BatchNormGDTheorem, start: _Start) -> dict[str, float]:
    """Return the error bounds if the assumptions about width and inputs hold."""
    if not theorem.width_ok or start.input_norm > 1.001:
        return {}
    return {
        "batchnorm_error_bound": theorem.error_bound,
        "batchnorm_error_vacuous": float(theorem.error_vacuous),
        "batchnorm_gd_error_bound": printed.error_bound,
    }


def _epsilons(function: MeasuredFunction) -> dict[str, float]:
    """Return max_j 1/N_j over all layers and for each, from running statistics. Layers without them are left out, and
    those whose parameters have not been chosen."""
    by_layer: dict[str, float] = {}
    theta = {id(p) for p in function.theta.values()}
    for path, layer in batch_norm_layers(function.model).items():
        own = [id(p) for p in layer.parameters()] if function.chosen else []
        if layer.running_var is not None and (not own or theta & set(own)):
            (factors,) = batchnorm_factors(layer).values()
            by_layer[layer_metric("batchnorm_epsilon", public_name(path), by_layer)] = float(1 / factors.min())
    return {"batchnorm_epsilon": max(by_layer.values()), **by_layer} if by_layer else {}


def _started(form: BatchNormForm, targets: Tensor | None) -> _Start:
    labels = class_signs(targets, len(form.x_centered))
    gammas = None
    if labels is not None:
        margins = [batchnorm_margin(features, labels) for features in (form.features_a, form.features_c)]
        root = len(form.factors) ** 0.5
        gammas = (margins[0].value / root, margins[1].value / root, sum(margin.gap for margin in margins) / root)
    return _Start(
        form.v.detach().cpu().clone(),
        _outer(form.network),
        len(form.x_centered),
        form.epsilon_n,
        float(form.x_centered.norm(dim=1).max()),
        gammas,
        form.factors,
    )


def _outer(network: BatchNormNetwork) -> Tensor:
    """Return a copy of U = (a, c)."""
    return torch.cat([network.a.detach().flatten(), network.c.detach().flatten()]).cpu()


class BatchNormTheory(DiagnosticCallback):
    """Logs the normalization factors of every BatchNorm, N_j = √(var_j + ε), and for the two-layer ReLU networks of BN
    (see `batchnorm_form`) the margins at fit start and the displacement of the weights since.

    Logged after every n-th epoch or step:

    * ``normtheory/batchnorm_epsilon``: ε_N = max 1/N_j over all features of all layers (BN, Assumption 1.1), and
      ``normtheory_layers/batchnorm_epsilon__LAYER``, from the current running statistics; layers without them are left
      out;

    and for a network of BN's form, with the statistics of the first samples of the probe:

    * ``normtheory/batchnorm_epsilon_start``: ε_N at fit start; ``normtheory/batchnorm_input_norm``: max‖x̄_i‖, which the
      theory assumes to be at most 1; ``normtheory/batchnorm_shift``: the largest bias behind the normalization, 0 at
      fit start, and always 0 in the theory;
    * ``normtheory/batchnorm_displacement_u`` = ‖U_t − U_0‖, U = (a, c), and ``…_displacement_v`` = ‖V_t − V_0‖_F;
    * ``normtheory/batchnorm_rademacher``: the complexity of the paper's class around V_0, with the statistics of these
      samples, for as many samples as the training set has (Lemma F.1, corrected); `RademacherBound` is about the
      network that predicts, with running statistics;

    and if the labels have two classes:

    * ``normtheory/batchnorm_margin``: γ(W) = min_i y_i f(x_i)/(‖a‖‖c‖) of the trained network (Section 1.4), while it
      has the form: not once a shift is trained;
    * ``normtheory/batchnorm_gamma_a``, ``…_gamma_c``: the margins of Assumption 1.2 at fit start, with the factor 1/√m,
      exact for V frozen at V_0, which bounds those of the paper from below; ``…_gamma_gap``: the error of their sum;
    * ``normtheory/batchnorm_radius_u``, ``…_radius_v``: the bounds of the displacements by Theorem 2.1, and
      ``…_within_radii``: 1 if both hold, else 0;
    * ``normtheory/batchnorm_delta_v``: Δ_V between V and V_0, and ``…_delta_v_allowed`` = γ/32, how far Assumption 1.2
      lets reference weights be from V_0; up to there, the features of the trained V could raise γ;
    * ``normtheory/batchnorm_gd_radius_u`` = 8 and, where the bound below is logged, ``…_gd_error_bound``: Theorem 2.2,
      as printed, unproved (`batchnorm_gd_theorem`);
    * ``normtheory/batchnorm_width_needed``, ``…_width_ok``: the theorem's condition on the width; if it and the
      condition on the inputs hold, ``…_error_bound``: its eq. (2) after the steps so far, ``…_error_vacuous``: 1 if
      that is 1 or more. Radii, width and bound are as printed; `batchnorm_theorem` says which parts are proved.

    Raises:
        ValueError: at fit start, if the model has no BatchNorm.

    The arguments that are not listed are those of `DiagnosticCallback`.

    Args:
        samples: the number of samples, the first ones of the probe.
        delta: δ of the theorem, which holds with probability 1 − 20δ.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[BatchNormTheory(probe=1024)], logger=False)
    """

    def __init__(self, *args: Any, samples: int = 1024, delta: float = 0.01, **kwargs: Any) -> None:
        self._options: dict[str, Any] = {"samples": samples, "delta": delta}
        super().__init__(*args, **kwargs)

    def make_diagnostics(self) -> list[Diagnostic]:
        return [BatchNormTheoryDiagnostic(**self._options)]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **{f"batchnorm_{name}": value for name, value in self._options.items()}}
