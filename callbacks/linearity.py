"""`Linearity`: how nearly linear the network is in its parameters (LIN), and what is measured beside each bound."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_normtheory.architecture.chain import Chain
from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.cost import PRODUCT, Sizes
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.measurement.curvature import PredictorCurvature
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.ntk_least_eigenvalue import NTKLeastEigenvalueDiagnostic, ntk_settings
from lightning_normtheory.linalg.precision import to_float64
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.norms.distance import DRAWN, displacement, kept_entries
from lightning_normtheory.ntk.result import TangentKernel
from lightning_normtheory.record.wording import first_lines
from lightning_normtheory.theorems.chain_bounds import network_constants
from lightning_normtheory.theorems.losses import KnownLoss
from lightning_normtheory.theorems.papers.lin import KernelSize, curvature_ratio, kernel_change_bound

__all__ = ["Linearity"]

_HESSIAN = "predictor_hessian_norm"
# At most so many samples, and so many pairs of a sample and an output, each of which takes its own Lanczos iteration.
_SAMPLES, _PAIRS = 4, 16
# Of a pair: the relative residual, the most products, those it usually takes, and how much longer they take than in a
# batch. `NormTheory` measures one output of each sample, with few products: the norm is then a lower bound.
_TOL, _MOST_PRODUCTS, _PRODUCTS, _ALONE, _FEW_PRODUCTS = 1e-2, 100, 15, 4.0, 10
# Parameters up to which `NormTheory` measures ‖∇²f‖, which takes 16 vectors of their size.
_PARAMETERS = 2**22
# Rows of the largest kernel whose λ_max is computed once more.
_ROWS = 512
# θ is stored in float32: the distance of two such vectors is rounded.
_ROUNDED = 1 + 1e-5


class DisplacementDiagnostic(Diagnostic):
    """‖θ − θ₀‖, which needs the parameters only."""

    title = "distance"
    key = "theta_distance"
    metrics = (key, "theta_distance_relative")
    needs_probe = False
    needs_loss = False
    since_start = metrics

    def __init__(self) -> None:
        # The entries of θ₀ by name, all of a small model, and ‖θ₀‖. Every checkpoint holds them.
        self._start: dict[str, Tensor] = {}
        self._start_norm, self._drawn = 0.0, DRAWN
        self.since = 0
        self.exact = math.nan

    def start(self, measurement: Measurement) -> None:
        theta = measurement.function.theta
        self._start, self.since, self._drawn = kept_entries(theta), measurement.trainer.global_step, DRAWN
        self._start_norm = math.sqrt(sum(float(to_float64(p.detach()).square().sum()) for p in theta.values()))

    def measure(self, measurement: Measurement) -> dict[str, float]:
        theta, self.reasons, self.exact = measurement.function.theta, {}, math.nan
        if self._start and theta.keys() != self._start.keys():
            self.reasons = {self.key: "the set of trained parameters has changed; it restarts here"}
            self._start = {}
        elif self._drawn != DRAWN and any(len(start) < theta[name].numel() for name, start in self._start.items()):
            self.reasons = {self.key: "the checkpoint's entries were drawn by another rule; it restarts here"}
            self._start = {}
        if not self._start:  # also the first measurement of a run that was not measured at its start
            self.start(measurement)
            return {}
        found = displacement(theta, self._start)
        self.exact = found.distance if found.error == 0 else math.nan
        metrics = {self.key: found.distance}
        if self._start_norm > 0:
            metrics["theta_distance_relative"] = found.distance / self._start_norm
        if any(len(start) < theta[name].numel() for name, start in self._start.items()):
            metrics["theta_distance_error"] = found.error
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start, "norm": self._start_norm, "since": self.since, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start, self._start_norm = dict(state.get("start", {})), state.get("norm", 0.0)
        self._drawn = state.get("drawn", 1)
        self.since = state.get("since", 0)


class LinearityDiagnostic(Diagnostic):
    """B, κ_f, ‖H‖/‖K‖, the measured sides of the bounds on a few samples, and the bound of the kernel's change.

    Args:
        kernel: measures K and K₀, before this diagnostic.
        distance: measures ‖θ − θ₀‖, before this diagnostic.
        every: measure the derivatives on the few samples in every n-th measurement only, from the first on.
    """

    title = "linearity"
    key = "linearity_b"
    metrics = (key,)
    needs_outputs = True
    shared = ("problem",)

    def __init__(
        self, kernel: NTKLeastEigenvalueDiagnostic, distance: DisplacementDiagnostic, *, every: int = 1
    ) -> None:
        self._kernel, self._distance, self._every = kernel, distance, every
        self._count = 0

    def _explain(self, reason: str, *names: str) -> dict[str, float]:
        """Say why something is not measured, where it was asked for: `NormTheory` measures what it can."""
        self.reasons = {**self.reasons, **(dict.fromkeys(names, reason) if self._every == 1 else {})}
        return {}

    def _few(self, outputs: int) -> int:
        """Return the number of samples whose Hessians are measured."""
        return min(_SAMPLES, _PAIRS // outputs) if self._every == 1 else _SAMPLES * (outputs <= _PAIRS)

    def cost(self, sizes: Sizes) -> float:
        """Return the mean over the measurements, of which most do without the few samples."""
        outputs = max(sizes.outputs, 1)
        measured = self._every == 1 or sizes.parameters <= _PARAMETERS
        samples = self._few(outputs) if measured else 0
        products = samples * (outputs * _PRODUCTS if self._every == 1 else _FEW_PRODUCTS)
        return (_ALONE * PRODUCT * products + (outputs + 1) * _SAMPLES) / sizes.probe / self._every

    def measure(self, measurement: Measurement) -> dict[str, float]:
        self.reasons = {}
        metrics = self._change_bound(measurement)
        due, self._count = self._count % self._every == 0, self._count + 1
        if due:
            metrics.update(self._first_derivatives(measurement))
            metrics.update(self._second_derivatives(measurement))
        return metrics

    def _change_bound(self, measurement: Measurement) -> dict[str, float]:
        """Bound ‖K − K₀‖/‖K₀‖ by Proposition 2.2, with H̄ over the ball around θ that θ₀ is in."""
        pair, problem, distance = self._kernel.pair(measurement), measurement.theory.problem, self._distance.exact
        chosen = measurement.function.chosen  # other parameters may have moved, too
        if pair is None or pair.since != self._distance.since or not math.isfinite(distance) or chosen:
            return {}
        if not isinstance(problem.chain, Chain) or not math.isfinite(problem.x_norm):
            return {}
        radius = _ROUNDED * distance
        network = network_constants(problem.chain, x_norm=problem.x_norm, radius=radius, directions_shrink=True)
        k = pair.now.number_of_outputs
        # The trace bounds λ_max, too, which would take long to compute.
        averaged = (pair.now.outputs == "trace" and k > 1) or len(pair.start) > _ROWS
        rows = len(pair.now.over_samples) * (1 if pair.now.outputs == "trace" else k)
        sizes = [KernelSize.of(kernel.cpu(), averaged=averaged) for kernel in (pair.now.kernel, pair.start)]
        bound = kernel_change_bound(network.hessian, radius, rows, *sizes)
        return {"ntk_change_bound": bound} if math.isfinite(bound) else {}

    def _first_derivatives(self, measurement: Measurement) -> dict[str, float]:
        """Return ‖∂f/∂x‖ and ‖∂f/∂α‖_∞, of a network whose operations are all known."""
        names = ("predictor_input_gradient_norm", "linearity_hidden_gradient")
        outputs = measurement.theory.problem.outputs
        if outputs > 8 * _PAIRS:
            return self._explain(_too_many(outputs, 8 * _PAIRS), *names)
        try:
            found = measurement.theory.output_gradients(_SAMPLES)
        except ValueError as error:
            return self._explain(str(error), *names)
        return {name: float(values.max()) for name, values in zip(names, found) if values.numel()}

    def _second_derivatives(self, measurement: Measurement) -> dict[str, float]:
        outputs = max(measurement.function.findings.outputs, 1)
        if self._every > 1 and sum(p.numel() for p in measurement.function.theta.values()) > _PARAMETERS:
            return {}
        samples = min(self._few(outputs), sum(batch.samples for batch in measurement.function.all_batches))
        if samples == 0:
            return self._explain(_too_many(outputs, _PAIRS), _HESSIAN)
        kernel = measurement.kernels.tangent_kernel(samples, "full", refine=False)
        metrics = {"predictor_gradient_norm": _jacobian_norm(kernel)}
        try:
            few = self._every > 1
            curved = measurement.curvature.predictor_hessian(
                samples, _TOL, _FEW_PRODUCTS if few else _MOST_PRODUCTS, one_output=few
            )
        except (RuntimeError, NotImplementedError) as error:
            if is_out_of_memory(error):
                raise
            why = first_lines(f"{type(error).__name__}: {error}", 1, 200)
            self.reasons = {**self.reasons, _HESSIAN: f"the model could not be differentiated twice ({why})"}
            return metrics
        metrics[_HESSIAN], metrics[f"{_HESSIAN}_residual"] = curved.norm, curved.residual
        metrics[f"{_HESSIAN}_converged"] = float(curved.residual <= _TOL * curved.norm)
        return metrics | self._ratios(measurement, kernel, curved)

    def _ratios(self, measurement: Measurement, kernel: TangentKernel, curved: PredictorCurvature) -> dict[str, float]:
        """Return B, κ_f and ‖H‖/‖K‖."""
        metrics = {}
        pair = self._kernel.pair(measurement)
        squares = kernel.kernel.diagonal().cpu().reshape(-1, kernel.number_of_outputs)
        if squares.shape == curved.by_output.shape and measurement.function.findings.as_samples:
            metrics["linearity_b"] = curvature_ratio(curved.by_output, squares)
            loss = measurement.theory.problem.loss
            residuals = measurement.theory.residuals(len(squares)) if _is_square(loss) else None
            if residuals is not None and residuals.shape == squares.shape:
                metrics["linearity_kappa"] = curvature_ratio(curved.by_output, squares, residuals)
        if pair is not None and pair.now.lambda_max > 0:
            metrics["linearity_hessian_to_kernel"] = curved.norm / pair.now.lambda_max
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = state.get("count", 0)


def _too_many(outputs: int, most: int) -> str:
    return f"the model has {outputs} outputs; by default this is measured for at most {most}"


def _is_square(loss: KnownLoss | str) -> bool:
    return isinstance(loss, KnownLoss) and loss.is_square


def _jacobian_norm(kernel: TangentKernel) -> float:
    """Return max_i ‖∂f(x_i)/∂θ‖₂ from the k×k blocks J_i J_iᵀ of the kernel of all outputs."""
    k = kernel.number_of_outputs
    n = len(kernel.kernel) // k
    blocks = kernel.kernel.cpu().view(n, k, n, k)[range(n), :, range(n)]
    return math.sqrt(max(float(torch.linalg.matrix_norm(blocks, 2).max()), 0.0))


class Linearity(DiagnosticCallback):
    """Logs how nearly linear the network is in its parameters (Liu, Zhu and Belkin, 2020), with the tangent kernel and
    its change, all metrics of `NTKLeastEigenvalue`.

    Logged after every n-th epoch or step:

    * ``normtheory/theta_distance`` = ‖θ − θ₀‖ and ``…_relative`` = ‖θ − θ₀‖/‖θ₀‖ (LIN, eq. (24)), of any model. With
      more than a million parameters it is estimated from the θ₀ of a million random ones, with the standard error
      ``…_error``;
    * ``normtheory/ntk_change_bound``: the bound of ``ntk_change`` that follows from ‖θ − θ₀‖ (LIN, Proposition 2.2),
      for smooth chains of layers of up to a million parameters. It takes H̄ ≥ ‖∇²f‖ over the whole ball, not a
      measured value;
    * on up to four samples: ``normtheory/predictor_gradient_norm`` = max_i ‖∂f(x_i)/∂θ‖₂, the norm of the (k, p)
      Jacobian, ``normtheory/predictor_hessian_norm`` = max ‖∇²f_h(x_i)‖₂ over samples and outputs, with ``…_residual``
      and ``…_converged``, ``normtheory/predictor_input_gradient_norm`` = max_i ‖∂f(x_i)/∂x‖₂: what the bounds of
      `ConvergenceCertificate` bound. Up to 16 outputs (‖∂f/∂x‖: 128);
    * on the same samples: ``normtheory/linearity_b`` = max ‖∇²f_h(x_i)‖/‖∇f_h(x_i)‖² and, for the square loss,
      ``normtheory/linearity_kappa`` = max |f_h(x_i) − y_ih|·‖∇²f_h(x_i)‖/‖∇f_h(x_i)‖² (LIN, eq. (16); there at
      initialization);
    * ``normtheory/linearity_hessian_to_kernel`` = max ‖∇²f‖/λ_max(K), with K of the kernel's samples (LIN, eq. (21));
    * ``normtheory/linearity_hidden_gradient`` = max |∂f_h(x_i)/∂α_j| over the entries of all hidden values α (LIN,
      Theorem 3.1, condition (b)).

    All are measured at the current parameters: none of them is a supremum over a ball, as LIN's theorems have it,
    except the bound. `NormTheory` measures those on a few samples in every 16th measurement, and second derivatives
    only of models with up to four million parameters, of one output of each sample, with ten products: a lower bound
    of the norm unless ``…_converged`` is 1.

    The arguments that are not listed are those of `DiagnosticCallback`.

    Args:
        samples: the number of samples of the probe for the tangent kernel, as in `NTKLeastEigenvalue`.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[Linearity()], logger=False)
    """

    def __init__(self, *args: Any, samples: int = 128, **kwargs: Any) -> None:
        self.samples = samples
        super().__init__(*args, **kwargs)

    def make_diagnostics(self) -> list[Diagnostic]:
        kernel, distance = NTKLeastEigenvalueDiagnostic(self.samples, "trace"), DisplacementDiagnostic()
        return [distance, kernel, LinearityDiagnostic(kernel, distance)]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **ntk_settings({"samples": self.samples, "outputs": "trace"})}
