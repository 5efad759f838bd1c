"""`HessianTopEigenvalue`: the largest eigenvalue of the loss's Hessian, and the edge of stability."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.cost import GRAPH, PRODUCT, Sizes, products_cost
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.measurement.curvature import HessianRequest
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.output.messages import warn
from lightning_normtheory.hessian.bracket import Bracket, bracket_of_set
from lightning_normtheory.hessian.edge_of_stability import edges_of_stability
from lightning_normtheory.hessian.eigenvalues import Eigenpair, Method, check_options
from lightning_normtheory.hessian.following import follow_top_eigenvalue
from lightning_normtheory.hessian.operator import Memory
from lightning_normtheory.hessian.warm_start import WarmStart
from lightning_normtheory.linalg.sampling import Estimate
from lightning_normtheory.measuring.workspace import give_back
from lightning_normtheory.record.wording import first_lines

__all__ = ["HessianTopEigenvalue"]

_LAMBDA = "hessian_lambda_max"
_RAYLEIGH = "hessian_rayleigh_train"
_PREDICTOR = "predictor_hessian_norm"
# The products that λ_max usually takes: more in the first measurement, fewer in later ones. Those of the predictor's
# Hessian, and how much longer they take for a single sample than in a batch.
_PRODUCTS: dict[Method, int] = {"lanczos": 10, "power": 20}
_PREDICTOR_PRODUCTS, _ALONE = 15, 4.0
# Why λ_max of the training set is not bracketed.
_WEIGHTED = "the sampler draws samples with different probabilities, and the bracket is one of equal ones"
_ONE_BATCH = "the training samples outside of the probe are a single batch, of which the spread is unknown"
_NO_OTHERS = "no training samples outside of the probe can be read"
# The bracket for the training set is measured at the first and then at every so many measurements.
_BRACKET = 16


class EdgeOfStabilityDiagnostic(Diagnostic):
    """2/η, which needs the optimizers only."""

    title = "edge of stability"
    key = "hessian_edge"
    metrics = (key,)
    needs_probe = False
    needs_loss = False

    def __init__(self) -> None:
        self._optimizers: list[str] = []

    def measure(self, measurement: Measurement) -> dict[str, float]:
        self._optimizers = [type(optimizer).__name__ for optimizer in measurement.trainer.optimizers]
        return _edges(measurement)

    def notes(self) -> dict[str, Any]:
        # 2/η is the limit of plain gradient steps only.
        return {"optimizers": self._optimizers}


class HessianTopEigenvalueDiagnostic(Diagnostic):
    """λ_max with its residual, warm-started from the previous measurement, and its distance from 2/η."""

    title = "Hessian"
    key = _LAMBDA
    metrics = (
        key,
        f"{_LAMBDA}_residual",
        f"{_LAMBDA}_converged",
        f"{_LAMBDA}_hvps",
        f"{_LAMBDA}_seconds",
        f"{_LAMBDA}_lower",
        f"{_LAMBDA}_upper",
        _RAYLEIGH,
        f"{_RAYLEIGH}_error",
        "hessian_edge_distance",
    )

    def __init__(
        self,
        method: Method = "power",
        tol: float = 1e-2,
        max_hvps: int = 100,
        memory: Memory = "high",
        *,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        check_options(method=method, which="algebraic", tol=tol, max_hvps=max_hvps, memory=memory, names=names)
        self._names = names
        self._options: dict[str, Any] = {"method": method, "tol": tol, "max_hvps": max_hvps}
        self._memory = memory
        # No changed setting drops it: it is a start only.
        self._start = WarmStart()
        self._measured = 0
        self._warned = False

    def cost(self, sizes: Sizes) -> float:
        others = (GRAPH + PRODUCT) / 2 / _BRACKET  # half as many samples
        return products_cost(min(_PRODUCTS[self._options["method"]], self._options["max_hvps"]), self._memory) + others

    def hessian_request(self) -> HessianRequest:
        return HessianRequest(partial(follow_top_eigenvalue, last=self._start, **self._options), self._memory)

    def measure(self, measurement: Measurement) -> dict[str, float]:
        answer = measurement.curvature.answer(self.key)
        pair: Eigenpair
        pair, self._start = answer.value
        due = self._measured % _BRACKET == 0
        self._measured += 1
        self.reasons = {}
        metrics = {
            _LAMBDA: pair.value,
            f"{_LAMBDA}_residual": pair.residual,
            f"{_LAMBDA}_converged": float(pair.converged),
            f"{_LAMBDA}_hvps": float(pair.hvps),
            f"{_LAMBDA}_seconds": answer.seconds,
            **(self._bracket(measurement, pair) if due else {}),
            **{_distance(name): edge - pair.value for name, edge in _edges(measurement).items()},
        }
        # A pair that has fewer products has an asymmetric Hessian, of which the solver warns.
        if not pair.converged and pair.hvps >= self._options["max_hvps"] and not self._warned:
            self._warned = True
            self._warn_not_converged(pair)
        give_back(*pair.vector.values())  # parts of one piece of memory
        return metrics

    def _bracket(self, measurement: Measurement, pair: Eigenpair) -> dict[str, float]:
        """Return the ends of an interval for λ_max of the training set, and vᵀHv of it with its error."""
        function = measurement.function
        if function.left_out == 0:
            found = Bracket(pair.value, pair.value, Estimate(pair.value, 0.0))
        else:
            along = _WEIGHTED if function.weighted else _along(measurement, pair)
            if isinstance(along, str):
                self.reasons = {f"{_LAMBDA}_lower": along, f"{_LAMBDA}_upper": along}
                return {}
            found = along
        return {
            f"{_LAMBDA}_lower": found.lower,
            f"{_LAMBDA}_upper": found.upper,
            _RAYLEIGH: found.rayleigh.value,
            f"{_RAYLEIGH}_error": found.rayleigh.error,
        }

    def _warn_not_converged(self, pair: Eigenpair) -> None:
        method, tol = (self._names.get(name, name) for name in ("method", "tol"))
        other = f", or use {method}='lanczos'" if self._options["method"] != "lanczos" else f" or {tol}"
        warn(
            f"λ_max has not converged within max_hvps={pair.hvps} products: the residual {pair.residual:.2g} is above "
            f"{tol}={self._options['tol']:g} times {pair.value:.3g}. Raise max_hvps{other}."
        )

    def state_dict(self) -> dict[str, Any]:
        return {**self._start.state_dict(), "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = WarmStart.from_state_dict(state)
        self._measured = state.get("measured", 0)


class PredictorHessianDiagnostic(Diagnostic):
    """max_i ‖∇²f(θ; x_i)‖₂ over the first samples of the probe."""

    title = "predictor's Hessian"
    key = _PREDICTOR
    metrics = (key, f"{_PREDICTOR}_residual", f"{_PREDICTOR}_converged")
    needs_outputs = True

    def __init__(self, samples: int, tol: float, max_hvps: int) -> None:
        if type(samples) is not int or samples < 1:
            raise ValueError(f"Expected predictor_samples to be a number of samples, 0 for none, but got {samples!r}.")
        self._samples, self._tol, self._max_hvps = samples, tol, max_hvps
        self._warned = False

    def cost(self, sizes: Sizes) -> float:
        products = self._samples * sizes.outputs * min(_PREDICTOR_PRODUCTS, self._max_hvps)
        return _ALONE * PRODUCT * products / sizes.probe

    def measure(self, measurement: Measurement) -> dict[str, float]:
        norm, residual, _ = measurement.curvature.predictor_hessian(self._samples, self._tol, self._max_hvps)
        converged = residual <= self._tol * norm
        if not converged and not self._warned:
            self._warned = True
            warn(f"{_PREDICTOR} has not converged within max_hvps={self._max_hvps}: it is a lower bound.")
        return {_PREDICTOR: norm, f"{_PREDICTOR}_residual": residual, f"{_PREDICTOR}_converged": float(converged)}


def _along(measurement: Measurement, pair: Eigenpair) -> Bracket | str:
    """Return the bracket from other training samples, or why there is none: λ_max itself does not need them."""
    function = measurement.function
    try:
        weights, curvatures, others = measurement.curvature.along(pair.vector)
    except Exception as error:  # noqa: BLE001
        return first_lines(f"{type(error).__name__}: {error}")
    if len(weights) < 2:
        return _ONE_BATCH if others else _NO_OTHERS
    return bracket_of_set(
        pair.value,
        pair.residual,
        weights,
        curvatures,
        samples=sum(batch.samples for batch in function.all_batches),
        others=others,
        left_out=function.left_out,
    )


def _edges(measurement: Measurement) -> dict[str, float]:
    """Return 2/η and the optimizers' own limits; empty if no optimizer has a learning rate."""
    theta = measurement.function.theta.values() if measurement.function.chosen else None
    edges = edges_of_stability(measurement.trainer.optimizers, theta)
    if not edges:
        return {}
    metrics = {"hessian_edge": min(edge.two_over_lr for edge in edges)}
    if any(edge.limit not in (None, edge.two_over_lr) for edge in edges):
        metrics["hessian_stability_limit"] = min(edge.limit for edge in edges if edge.limit is not None)
    if len(edges) > 1:
        metrics.update({f"hessian_edge__{edge.group}": edge.two_over_lr for edge in edges})
    return metrics


def _distance(edge: str) -> str:
    """
    Example:
        >>> _distance("hessian_edge"), _distance("hessian_edge__head")
        ('hessian_edge_distance', 'hessian_edge_distance__head')
    """
    name, separator, group = edge.partition("__")
    return f"{name}_distance{separator}{group}"


def hessian_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under the names that they have in the file, which also has those of other diagnostics."""
    return {f"hessian_{name}": value for name, value in options.items()}


class HessianTopEigenvalue(DiagnosticCallback):
    """Logs the largest eigenvalue λ_max of ∇²L on the probe, by power iteration or Lanczos, and how far 2/η is from it.

    Exact on WeightNorm and BatchNorm, where PyTorch's own second derivatives are wrong. Each epoch starts from the
    eigenvector of the previous one, which the checkpoint also holds; with Lanczos from three vectors and the drift of
    the first, in five bytes per parameter, so that two products do where the Hessian changes little
    (`follow_top_eigenvalue`).

    Logged after every n-th epoch or step:

    * ``normtheory/hessian_lambda_max``: λ_max, the largest algebraic eigenvalue;
    * ``normtheory/hessian_lambda_max_residual``: ‖Hv − λv‖: an eigenvalue lies within this distance of λ_max;
    * ``normtheory/hessian_lambda_max_converged``: 1 if the residual is at most ``tol``·|λ|, else 0;
    * ``normtheory/hessian_lambda_max_hvps``: the number of Hessian-vector products;
    * ``normtheory/hessian_lambda_max_seconds``: the time of these products;
    * at the first and every 16th measurement, an interval for λ_max of the whole training set (`bracket_of_set`):
      ``normtheory/hessian_lambda_max_lower``, ``normtheory/hessian_lambda_max_upper``; and
      ``normtheory/hessian_rayleigh_train``, ``…_error``: vᵀHv of the training set with the probe's eigenvector v, from
      half as many other samples, and its standard error. λ_max of a probe is too large on average, vᵀHv too small. Not
      logged for iterable datasets;
    * ``normtheory/hessian_edge``: 2/η of the next step, the smallest over the parameter groups, and
      ``normtheory/hessian_edge_distance``: 2/η − λ_max, negative beyond the edge of stability; with several groups also
      for each, ``normtheory/hessian_edge__GROUP`` and ``normtheory/hessian_edge_distance__GROUP``;
    * ``normtheory/hessian_stability_limit`` and ``…_distance``: the same for SGD with momentum or weight decay, which
      has a different limit (`edges_of_stability`);
    * on request, ``normtheory/predictor_hessian_norm``: max_i ‖∇²f(θ; x_i)‖₂ (WN, Theorem 4.1; RSC, Theorem 4.1) over
      ``predictor_samples`` samples and all outputs, with ``…_residual`` and ``…_converged``;
    * ``normtheory/seconds``: the time of the whole measurement.

    The arguments that are not listed are those of `DiagnosticCallback`.

    Args:
        method: ``"power"`` iteration, or ``"lanczos"``, which needs about half the products and stores six vectors of
            the size of the model, for a small ``tol`` more; where it follows λ_max, up to sixteen, and about ten with
            ``memory="low"``.
        tol: the relative residual at which to stop. The relative error of the eigenvalue is about its square.
        max_hvps: the largest number of products.
        memory: ``"high"`` keeps the graph of the probe's gradient for all products if it needs about as much memory as
            a training step, or on the CPU up to 512 MB; else, and with ``"low"``, it is built again for each, batch by
            batch.
        predictor_samples: the number of samples for the predictor's Hessian; 0: do not measure it.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[HessianTopEigenvalue(method="lanczos", every_n_epochs=5)], logger=False)
    """

    def __init__(
        self,
        *args: Any,
        method: Method = "power",
        tol: float = 1e-2,
        max_hvps: int = 100,
        memory: Memory = "high",
        predictor_samples: int = 0,
        **kwargs: Any,
    ) -> None:
        self._options: dict[str, Any] = {
            "method": method,
            "tol": tol,
            "max_hvps": max_hvps,
            "memory": memory,
        }
        self.predictor_samples = predictor_samples
        super().__init__(*args, **kwargs)

    def make_diagnostics(self) -> list[Diagnostic]:
        made: list[Diagnostic] = [EdgeOfStabilityDiagnostic(), HessianTopEigenvalueDiagnostic(**self._options)]
        if self.predictor_samples != 0:
            made.append(
                PredictorHessianDiagnostic(self.predictor_samples, self._options["tol"], self._options["max_hvps"])
            )
        return made

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **hessian_settings(self._options), "predictor_samples": self.predictor_samples}
