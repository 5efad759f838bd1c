"""`WeightNormTheory`: how far WeightNorm's parameters have moved, and the numbers of DGM's theorems beside it."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import nn

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.cost import FORWARD, Sizes
from lightning_normtheory.callbacks.engine.diagnostic import SAMPLE_SETTINGS, Diagnostic, NotApplicable
from lightning_normtheory.callbacks.measurement.dgm_run import (
    dgm_samples,
    square_loss_factor,
    why_not_gradient_descent,
)
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.linalg.spectrum import largest_eigenvalue
from lightning_normtheory.model.layers import weight_norm_layers
from lightning_normtheory.norms.displacement import WeightNormStart, weight_norm_displacement, weight_norm_start
from lightning_normtheory.theorems.papers.dgm import DGMForm, infinite_width_kernels
from lightning_normtheory.theorems.papers.dgm_rates import BestScale, best_scale, dgm_rate, dgm_widths
from lightning_normtheory.theorems.papers.dgm_training import (
    dgm_radii,
    dgm_reach,
    near_sign_change,
    sign_changes,
)

__all__ = ["WeightNormTheory"]

_V, _G = "weightnorm_displacement_v", "weightnorm_displacement_g"
# Directions with more entries in all are not kept: checkpoints would grow by more than 16 MB in float32.
_MOST_ENTRIES = 2**22


class _DGMStart(NamedTuple):
    """A network of DGM's form before its training, on n samples of d features.

    Attributes:
        residual: ‖f(0) − y‖; NaN without targets.
        factor: c of the loss cΣ(f − y)² over these samples; NaN for other losses.
        rate: the learning rate; NaN unless it is that of plain gradient descent.
        v_norm: ‖V∞‖₂.
        step: the number of optimizer steps before.
    """

    n: int
    d: int
    residual: float
    factor: float
    rate: float
    v_norm: float
    step: int
    best: tuple[float, ...]


class WeightNormTheoryDiagnostic(Diagnostic):
    """Distances of v and g from the start; for a network of DGM's form its radii, steps, widths and rates."""

    title = "WeightNorm"
    key = _G
    metrics = (key,)
    needs_loss = False
    optional = True
    since_start = (_V, _G)

    def __init__(self, samples: int = 128, delta: float = 0.05) -> None:
        if type(samples) is not int or samples < 1:
            raise ValueError(f"Expected the number of samples to be a positive integer, but got {samples!r}.")
        if not 0 < delta < 1:
            raise ValueError(f"Expected delta in (0, 1), but got {delta!r}.")
        self._samples, self._delta = samples, delta
        self._start: WeightNormStart | None = None
        self._form: DGMForm | None = None
        self._dgm: _DGMStart | None = None

    def check(self, model: nn.Module) -> None:
        if next(weight_norm_layers(model), None) is None:
            raise NotApplicable("Expected a WeightNorm, but the model has none. Leave out WeightNormTheory.")

    def start_cost(self, sizes: Sizes) -> float:
        return 4 * FORWARD * sizes.share(self._samples) if sizes.outputs == 1 else 0.0

    def cost(self, sizes: Sizes) -> float:
        return FORWARD * sizes.share(self._samples) if self._dgm is not None else 0.0

    def start(self, measurement: Measurement) -> None:
        self._start = weight_norm_start(measurement.model, most=_MOST_ENTRIES)
        self._form = self._dgm = None
        if len(self._start.lengths) != 1 or measurement.function.findings.outputs_problem:
            return  # spare other networks the forward passes
        form = measurement.theory.dgm_form(self._samples)
        found = dgm_samples(measurement, self._samples) if isinstance(form, DGMForm) else None
        if isinstance(form, DGMForm) and found is not None:
            n, d = found.x.shape
            self._form = form
            self._dgm = _DGMStart(
                n,
                d,
                found.residual,
                square_loss_factor(measurement, n),
                measurement.theory.plain_learning_rate or math.nan,
                largest_eigenvalue(infinite_width_kernels(found.x).V),
                measurement.trainer.global_step,
                tuple(best_scale(found.x)),
            )

    def measure(self, measurement: Measurement) -> dict[str, float]:
        self.reasons = {}
        if self._start is None:
            self.start(measurement)  # the samples of an iterable dataset are known only now
        assert self._start is not None
        metrics = self._displacement(measurement.model, self._start)
        if self._form is not None and self._dgm is not None:
            metrics.update(self._theorem(measurement, self._start, self._form, self._dgm, metrics))
        return metrics

    def _displacement(self, model: nn.Module, start: WeightNormStart) -> dict[str, float]:
        try:
            found = weight_norm_displacement(model, start)
        except ValueError:
            self.reasons = {_G: "the weights under WeightNorm are not those of the fit start"}
            return {}
        if found.directions is None:
            limit = f"the directions have more than {_MOST_ENTRIES} entries, and are not kept in checkpoints"
            self.reasons = {_V: limit}
            return {_G: found.lengths}
        return {_V: found.directions, _G: found.lengths}

    def _theorem(
        self,
        measurement: Measurement,
        start: WeightNormStart,
        form: DGMForm,
        dgm: _DGMStart,
        distances: Mapping[str, float],
    ) -> dict[str, float]:
        found = dgm_samples(measurement, dgm.n)
        if found is None or _V not in distances or found.x.shape != (dgm.n, dgm.d):
            return {}
        (v0,), (layer,) = start.directions.values(), weight_norm_layers(measurement.model)
        metrics = {
            "dgm_sign_changes": sign_changes(layer.vectors, v0, found.x),
            "dgm_sign_changes_bound": near_sign_change(v0, found.x, distances[_V]),
            **_proposition(BestScale(*dgm.best)),
            **self._steps(measurement, form, dgm),
        }
        problem = why_not_gradient_descent(measurement, dgm.n)
        if math.isnan(dgm.factor):
            problem = problem or "the loss is not a multiple of Σ(f − y)²"
        if problem:
            self.reasons = {**self.reasons, "dgm_rate": problem}
            return metrics
        return metrics | self._guarantees(form, dgm, start) | self._contraction(measurement, form, dgm, found.residual)

    def _steps(self, measurement: Measurement, form: DGMForm, dgm: _DGMStart) -> dict[str, float]:
        """Return η‖Λ‖ of Theorem C.1 and η‖V∞‖/α² of Theorem 4.1, η being that of the loss ½Σ(f − y)²."""
        rate = measurement.theory.plain_learning_rate
        if rate is None or math.isnan(dgm.factor):
            return {}
        eta = 2 * dgm.factor * rate
        kernel = measurement.kernels.tangent_kernel(self._samples, "trace")
        metrics = {"dgm_step": eta * kernel.lambda_max}
        return metrics | ({"dgm_step_v": eta * dgm.v_norm / form.alpha**2} if form.directions_dominate else {})

    def _guarantees(self, form: DGMForm, dgm: _DGMStart, start: WeightNormStart) -> dict[str, float]:
        """Return radii and widths, and how far a training at the theorem's rate can go."""
        (lengths,) = start.lengths.values()
        width = len(lengths)
        radii = dgm_radii(form, n=dgm.n, d=dgm.d, width=width, delta=self._delta)
        widths = dgm_widths(form, n=dgm.n, delta=self._delta)
        metrics = {
            "dgm_radius_v": radii.directions,
            "dgm_radius_g": radii.lengths,
            "dgm_width_asked": widths.own,
            "dgm_width_asked_best": widths.any_scale,
        }
        reach = dgm_reach(form, n=dgm.n, width=width, residual=dgm.residual, smallest_length=float(lengths.min()))
        return metrics | {"dgm_reach_v": reach.directions, "dgm_reach_g": reach.lengths}

    def _contraction(
        self, measurement: Measurement, form: DGMForm, dgm: _DGMStart, residual: float
    ) -> dict[str, float]:
        """Return the guaranteed factor of ‖f − y‖² per step, and its geometric mean since the start."""
        rate, steps = measurement.theory.plain_learning_rate, measurement.trainer.global_step - dgm.step
        if rate != dgm.rate:
            self.reasons = {**self.reasons, "dgm_rate": "the learning rate has changed since the fit start"}
            return {}
        if steps < 1 or not dgm.residual > 0:
            return {}
        return {
            "dgm_rate": dgm_rate(form, 2 * dgm.factor * dgm.rate),
            "dgm_rate_measured": (residual / dgm.residual) ** (2 / steps),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": None if self._start is None else tuple(self._start),
            "form": None if self._form is None else tuple(self._form),
            "dgm": None if self._dgm is None else tuple(self._dgm),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = WeightNormStart(*state["start"]) if state.get("start") else None
        self._form = DGMForm(*state["form"]) if state.get("form") else None
        self._dgm = _DGMStart(*state["dgm"]) if state.get("dgm") else None

    def forget(self, changed: Collection[str]) -> str:
        settings = SAMPLE_SETTINGS | {"loss", "predict", "parameters", "ntk_samples"}
        if self._dgm is None or not settings & set(changed):
            return ""
        self._form = self._dgm = None  # the distances do not depend on the samples, and continue
        return "DGM's constants at fit start"


def _proposition(best: BestScale) -> dict[str, float]:
    metrics = {"dgm_rate_best": best.rate, "dgm_rate_unnormalized": best.unnormalized_rate}
    return metrics if math.isnan(best.alpha) else {"dgm_alpha_best": best.alpha, **metrics}


class WeightNormTheory(DiagnosticCallback):
    """Logs how far the lengths g and directions v of WeightNorm have moved since fit start, and for the two-layer ReLU
    networks of DGM, trained with a square loss, the numbers of its theorems.

    Logged after every n-th epoch or step, for any model with WeightNorm:

    * ``normtheory/weightnorm_displacement_v`` = max_k ‖v_k − v_k(0)‖ and ``normtheory/weightnorm_displacement_g`` =
      max_k |g_k − g_k(0)|, over the units of all layers. The checkpoint holds v(0) and g(0); v(0) only up to 2²²
      entries (16 MB in float32), above which the first is left out. For an iterable dataset, the start is where the
      probe is complete;

    for a network of DGM's form (see `dgm_form`), on the first samples of the probe:

    * ``normtheory/dgm_sign_changes``: the share of pairs of a sample and a unit whose indicator 1[v_k·x_i ≥ 0] has
      changed, and ``…_sign_changes_bound``, the share of those that some v within max_k ‖v_k − v_k(0)‖ of v_k(0) can
      change, Σ_i |S_i(R)|/(nm) (Appendix C);
    * ``normtheory/dgm_alpha_best``: α*, the scale of the directions with the best rate, 0 or infinite if that is a
      limit; ``…_rate_best``, the factor of ‖f − y‖² per step with α* and the largest step of Theorem C.1, and
      ``…_rate_unnormalized``, the same without WeightNorm (Proposition 2), all three at infinite width;
    * with plain gradient descent, ``normtheory/dgm_step`` = η‖Λ‖, which Theorem C.1 wants to be at most 1/3, and for
      α ≤ 1 ``normtheory/dgm_step_v`` = η‖V∞‖/α², which Theorem 4.1 wants below a constant that it does not name. η is
      the step for the loss ½Σ(f − y)²; for cΣ(f − y)² it is 2c times the learning rate. With more training samples
      than the kernel has, a sum gives a lower bound;

    and if each step is gradient descent on exactly these samples:

    * ``normtheory/dgm_rate`` = 1 − ηω/2, the factor of ‖f − y‖² per step that Theorems 4.1 and 4.2 guarantee (ω/2 is
      ``ntk_threshold``), and ``…_rate_measured``, the geometric mean since fit start;
    * ``normtheory/dgm_radius_v``, ``…_radius_g``: the radii that keep the kernel positive in the proof, as printed, and
      ``…_reach_v``, ``…_reach_g``: how far a training at the rate above can move (Lemmas C.2 and C.3). The proof is
      complete for a network whose reach is within its radius;
    * ``normtheory/dgm_width_asked``: the width in Theorem 4.1 or 4.2, ``…_width_asked_best``: in Proposition 2, both
      without the constant factor, which the paper does not name.

    A model without WeightNorm is trained without the callback, with a warning at fit start. The arguments that are not
    listed are those of `DiagnosticCallback`.

    Args:
        samples: the number of samples, the first ones of the probe, as in `NTKLeastEigenvalue`.
        delta: the probability that the theorems fail.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[WeightNormTheory()], logger=False)
    """

    def __init__(self, *args: Any, samples: int = 128, delta: float = 0.05, **kwargs: Any) -> None:
        self.samples, self.delta = samples, delta
        super().__init__(*args, **kwargs)

    def make_diagnostics(self) -> list[Diagnostic]:
        return [WeightNormTheoryDiagnostic(self.samples, self.delta)]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "ntk_samples": self.samples, "delta": self.delta}
