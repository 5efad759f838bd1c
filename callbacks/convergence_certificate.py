"""`ConvergenceCertificate`: sufficient conditions for convergence, and the theorems that apply."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lightning_normtheory.architecture.chain import Chain, Link
from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.cost import FORWARD, SHARED, Sizes
from lightning_normtheory.callbacks.engine.diagnostic import LOSS_SETTINGS, SAMPLE_SETTINGS, Diagnostic
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.measurement.paper_constants import papers_constants
from lightning_normtheory.callbacks.theorem_verdicts import TheoremVerdictsDiagnostic
from lightning_normtheory.linalg.spectrum import spectral_norm
from lightning_normtheory.ntk.result import TangentKernel
from lightning_normtheory.rsc import why_no_ratio
from lightning_normtheory.theorems.descent import (
    Condition,
    Descent,
    LossState,
    alpha_condition,
    dgm_condition,
    guaranteed_step,
    mean_gradient_condition,
    ntk_condition,
)
from lightning_normtheory.theorems.losses import KnownLoss
from lightning_normtheory.theorems.papers.dgm import DGMForm
from lightning_normtheory.theorems.papers.rsc import ntk_lower_bound
from lightning_normtheory.theorems.problem import Problem

__all__ = ["ConvergenceCertificate"]

_NAME = "certificate"
_MEASURED = f"{_NAME}_rate_measured"


class ConvergenceCertificateDiagnostic(Diagnostic):
    """The conditions with their margins and rates, and the radii of the theorems."""

    title = "certificate"
    key = _MEASURED
    metrics = (key,)
    shared = ("rsc", "problem")
    since_start = (key,)

    def __init__(self, samples: int = 128) -> None:
        if type(samples) is not int or samples < 1:
            raise ValueError(f"Expected the number of samples to be a positive integer, but got {samples!r}.")
        self._samples = samples
        self._dgm: DGMForm | None = None
        self._initial: list[Tensor] = []
        self._last: tuple[float, int] | None = None
        self._examined = False

    # -- at fit start: what later measurements compare with ------------------------------------------------------------

    def start_cost(self, sizes: Sizes) -> float:
        known = SHARED["problem"](sizes) + FORWARD * (1 + sizes.share(self._samples))
        return FORWARD + (known if sizes.outputs else 0.0)

    def start(self, measurement: Measurement) -> None:
        if not measurement.function.findings.outputs_problem:
            self._examine(measurement)
        self._last = (measurement.loss, measurement.trainer.global_step)

    def _examine(self, measurement: Measurement) -> None:
        problem, form = measurement.theory.problem, measurement.theory.dgm_form(self._samples)
        self._dgm = form if isinstance(form, DGMForm) else None
        if isinstance(problem.chain, Chain) and not self._initial:
            self._initial = [link.affine.weight.detach().cpu().clone() for link in _followed(problem.chain)]
        self._examined = math.isfinite(measurement.mean_loss)

    # -- each measurement ----------------------------------------------------------------------------------------------

    def measure(self, measurement: Measurement) -> dict[str, float]:
        if measurement.function.findings.outputs_problem:
            return self._measured_rate(measurement)
        if not self._examined:
            self._examine(measurement)  # an iterable dataset, or no finite loss at the start
        problem, loss = measurement.theory.problem, measurement.theory.problem.loss
        metrics, conditions = self._radii(problem), {}
        if not math.isnan(kappa := abs(measurement.gradient_cosine)):
            metrics["rsc_kappa"] = kappa
        if isinstance(loss, KnownLoss):
            local = LossState(measurement.rsc.loss, measurement.rsc.grad_norm_sq, loss, problem.x_norm)
            found = _descent(problem, local)
            if found is not None:
                metrics.update(_constants(found, local, measurement.theory.plain_learning_rate, problem))
                if (condition := alpha_condition(found)) is not None:
                    conditions["rsc"] = condition
                    if _samples_count_equally(measurement, loss):
                        metrics.update(_mean_gradient(measurement, found, kappa))
                        metrics.update(papers_constants(measurement, self._initial, found.radius, metrics))
        if isinstance(loss, KnownLoss) and loss.is_square:
            kernel = _full_kernel(measurement, self._samples)
            if kernel is not None:
                conditions.update(self._kernel_conditions(kernel))
                metrics.update(_compared(kernel, problem.outputs, loss.scale))
        for name, condition in conditions.items():
            metrics[f"{_NAME}_{name}"] = float(condition.holds)
            metrics[f"{_NAME}_{name}_margin"] = condition.margin
        metrics.update(self._measured_rate(measurement))
        return metrics

    def _kernel_conditions(self, kernel: TangentKernel) -> dict[str, Condition]:
        conditions = {"ntk": ntk_condition(kernel.lambda_min, kernel.floor)}
        if self._dgm is not None:
            regime = "dgm_v" if self._dgm.directions_dominate else "dgm_g"
            conditions[regime] = dgm_condition(self._dgm, kernel.lambda_min, kernel.floor)
        return conditions

    def _radii(self, problem: Problem) -> dict[str, float]:
        """Return the distances of the weights from their start: ρ in the spectral norm, ρ₁ at the output."""
        chain = problem.chain
        if isinstance(chain, str) or len(_followed(chain)) != len(self._initial):
            return {}
        *hidden, head = (link.affine.weight.cpu() - start for link, start in zip(_followed(chain), self._initial))
        radii = {"rho_1": float(head.double().norm(dim=1).max())}
        if not _has_weight_norm(chain):
            radii["rho"] = max(map(spectral_norm, hidden), default=0.0)
        return radii

    def _measured_rate(self, measurement: Measurement) -> dict[str, float]:
        """Return L⁺/L per optimizer step, the geometric mean since the last measurement."""
        loss, step = measurement.rsc.loss, measurement.trainer.global_step
        last, self._last, self.reasons = self._last, (loss, step), {}
        if last is None or step <= last[1]:
            return {}
        if len(measurement.trainer.optimizers) > 1:
            self.reasons = {_MEASURED: "the trainer counts the steps of all its optimizers together"}
            return {}
        if not (math.isfinite(last[0]) and math.isfinite(loss)):
            return {_MEASURED: math.nan}
        if last[0] <= 0 or loss < 0:
            self.reasons = {_MEASURED: why_no_ratio(last[0], loss)}
            return {_MEASURED: math.nan}
        return {_MEASURED: (loss / last[0]) ** (1 / (step - last[1]))}

    def state_dict(self) -> dict[str, Any]:
        return {
            "dgm": None if self._dgm is None else tuple(self._dgm),
            "initial": self._initial,
            "last": self._last,
            "looked": self._examined,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._dgm = DGMForm(*state["dgm"]) if state.get("dgm") else None
        self._initial = list(state.get("initial", []))
        self._last = state.get("last")
        self._examined = state.get("looked", False)

    def forget(self, changed: Collection[str]) -> str:
        if (SAMPLE_SETTINGS | {"loss", "predict", "parameters", "ntk_samples"}) & set(changed):
            self._examined, self._dgm = False, None  # the radii continue
        if self._last is None or not LOSS_SETTINGS & set(changed):
            return ""
        self._last = None
        return f"the previous loss, for {_MEASURED},"


def _has_weight_norm(chain: Chain) -> bool:
    return any(link.affine.origin.kind == "weight_norm" for link in chain.links)


def _followed(chain: Chain) -> tuple[Link, ...]:
    """Return the layers whose distance from the start is measured: all for RSC's spectral ball; only the head for WN,
    whose bounds do not depend on the distance of the other layers. Every checkpoint holds their start."""
    links = tuple(chain.links)
    return links[-1:] if _has_weight_norm(chain) else links


def _descent(problem: Problem, local: LossState) -> Descent | None:
    """Return the best guaranteed step; ``None`` without a chain, smooth activations or a positive loss."""
    chain = problem.loss_chain
    if isinstance(chain, str) or any(math.isinf(phi.smoothness) for phi in problem.activations):
        return None
    return guaranteed_step(chain, local) if local.is_usable else None


def _constants(found: Descent, local: LossState, rate: float | None, problem: Problem) -> dict[str, float]:
    metrics = {
        f"{_NAME}_beta": found.constants.beta,
        f"{_NAME}_step": found.step,
        f"{_NAME}_rho_2": found.radius,
        f"{_NAME}_rate": found.rate(local.ratio),
    }
    if isinstance(problem.chain, Chain):  # else they are bounds of the logits, not of the outputs
        metrics[f"{_NAME}_hessian_bound"] = found.network.hessian
        metrics[f"{_NAME}_gradient_bound"] = found.network.gradient
        metrics[f"{_NAME}_lipschitz_bound"] = found.network.lipschitz
    if found.constants.alpha is not None:
        metrics[f"{_NAME}_alpha"] = found.constants.alpha
    if rate is not None and isinstance(problem.loss_chain, Chain):
        own = guaranteed_step(problem.loss_chain, local, rate)
        metrics[f"{_NAME}_omega"] = own.omega
        if own.omega < 2:
            metrics[f"{_NAME}_own_rate"] = own.rate(local.ratio)
    return metrics


def _samples_count_equally(measurement: Measurement, loss: KnownLoss) -> bool:
    """Check that all samples have the same weight in L, as in ḡ: in a mean of sums over batches of one size."""
    return not loss.summed or all(batch.samples == loss.summed for batch in measurement.function.all_batches)


def _mean_gradient(measurement: Measurement, found: Descent, kappa: float) -> dict[str, float]:
    """Return RSC's condition on ‖ḡ‖² for any chain, without outputs that failed."""
    problem, size = measurement.theory.problem, measurement.rsc.mean_predictor_grad_norm_sq
    if math.isnan(kappa) or isinstance(problem.loss, str):
        return {}
    condition = mean_gradient_condition(
        found, problem.loss, mean_predictor_grad_norm_sq=size, kappa=kappa, outputs=problem.outputs
    )
    return {"rsc_alpha": condition.alpha, "rsc_threshold": condition.threshold, "rsc_margin": condition.margin}


def _full_kernel(measurement: Measurement, samples: int) -> TangentKernel | None:
    """Return the kernel of all outputs, which the theory's condition is about; with k outputs, of samples/k samples."""
    outputs = measurement.theory.problem.outputs
    if outputs == 1:
        return measurement.kernels.tangent_kernel(samples, "trace")
    return measurement.kernels.tangent_kernel(max(samples // outputs, 1), "full") if outputs <= samples else None


def _compared(kernel: TangentKernel, outputs: int, scale: float) -> dict[str, float]:
    """Compare NTK and RSC on the same samples: R ≥ (4s/n)λ_min, ‖ḡ‖² = 1ᵀK1/(nk)² ≥ λ_min/(nk)."""
    n = len(kernel.over_samples)
    return {
        f"{_NAME}_ntk_ratio_bound": 4 * scale / n * max(kernel.lambda_min - kernel.floor, 0.0),
        "ntk_mean_grad_norm_sq": float(kernel.kernel.double().sum()) / (n * outputs) ** 2,
        "ntk_mean_grad_norm_sq_bound": ntk_lower_bound(kernel.lambda_min, n, outputs),
    }


class ConvergenceCertificate(DiagnosticCallback):
    """Logs which sufficient condition for convergence holds, its margin, the guaranteed rate and the measured rate.
    Prints at fit start which theorems of the five papers the network fits, and why it does not fit the others; judges
    at every measurement whether the run fits them, too.

    Every guarantee is about one step of gradient descent on the samples of the probe, from the current parameters:
    L⁺ ≤ rate · L. It holds for the training set if the probe is the whole set. Steps on other batches, momentum
    and weight decay have no guarantee in these papers, and a condition that holds now need not hold after such steps.
    For the square loss, the cross entropy and the logistic loss, recognized by their values at every measurement. α and
    the conditions need the square loss: the others are not strongly convex in the outputs (RSC, Assumption 3).

    The header of ``normtheory.jsonl`` also has the table of the theorems.

    Logged after every n-th epoch or step, as far as they apply to the network and can be tested:

    * chains of Linear layers or convolutions with smooth activations: ``normtheory/certificate_beta`` (WN, Lemma 5.2;
      RSC, Theorem B.2), ``…_step`` = 1/β, ``…_rho_2``: how far that step goes, ``…_rate`` = 1 − R/(2β), the guaranteed
      L⁺/L of that step; ``…_hessian_bound`` ≥ ‖∇²f‖, ``…_gradient_bound`` ≥ ‖∂f/∂θ‖, ``…_lipschitz_bound`` ≥ ‖∂f/∂x‖;
    * the same with the square loss: ``normtheory/certificate_alpha`` of the cone around ∇L (WN, Lemma 5.1,
      generalized), ``…_rsc``: 1 if α > 0, ``…_rsc_margin`` = α; of the cone around ḡ (RSC, Theorem 5.1, generalized)
      ``normtheory/rsc_alpha``, ``…_threshold`` and ``…_margin`` = ‖ḡ‖² − threshold, which has to be positive;
    * ``normtheory/rsc_kappa`` = |cos(∇L, ḡ)|, for any model and loss;
    * for plain SGD of all trained parameters, without clipping: ``normtheory/certificate_omega`` = ηβ for the run's η;
      below 2 also ``…_own_rate``, the rate guaranteed for that η. From 2 on there is no guarantee;
    * ``normtheory/certificate_ntk``: 1 if λ_min of the kernel of all outputs is above its floor, ``…_ntk_margin``,
      ``…_ntk_ratio_bound`` = (4s/n)(λ_min − floor) ≤ R on the n samples of the kernel, s being 1 for the papers' loss
      and 1/k for `MSELoss`; these are, for k outputs, ``samples``/k samples of the probe;
    * ``normtheory/ntk_mean_grad_norm_sq``: ‖ḡ‖² of the same samples, which RSC requires to be large, and its
      lower bound ``…_bound`` = λ_min/(nk) from the kernel (RSC, Remark 5.5);
    * for a network of DGM's form, ``normtheory/certificate_dgm_v`` with ``…_dgm_v_margin`` (Theorem 4.1) for α ≤ 1, or
      ``…_dgm_g`` with ``…_dgm_g_margin`` (Theorem 4.2) for α > 1;
    * for each theorem that the network fits, ``normtheory/theorem__THEOREM`` (``wn_5_1``, ``dgm_4_1``, …): 1 if the run
      fits it, too, as far as can be checked: gradient descent on the whole training set, the step, α > 0;
    * ``normtheory/certificate_rate_measured``: L⁺/L per step of the optimizer, the mean since the last measurement; NaN
      where a loss is below zero;
    * ``normtheory/rho_1`` = max_h ‖v_h − v_h(0)‖ of the output weights, and without WeightNorm ``normtheory/rho`` =
      max_l ‖W_l − W_l(0)‖₂ over the hidden layers;
    * for a network of WN's own form, ``normtheory/wn_alpha``, ``…_beta``, ``…_hessian_bound``, ``…_gradient_bound``,
      ``…_loss_bound`` as the paper has them; of RSC's, ``normtheory/rsc_gamma``, ``…_beta``, ``…_hessian_bound`` =
      c_H/√m, ``…_gradient_bound`` = ϱ, ``…_loss_bound``, and α and threshold as the paper has them. Both hold at both
      ends of the guaranteed step.

    The arguments that are not listed are those of `DiagnosticCallback`.

    Args:
        samples: the number of samples of the probe for the tangent kernel, as in `NTKLeastEigenvalue`.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[ConvergenceCertificate()], logger=False)
    """

    def __init__(self, *args: Any, samples: int = 128, **kwargs: Any) -> None:
        self.samples = samples
        super().__init__(*args, **kwargs)

    def make_diagnostics(self) -> list[Diagnostic]:
        return [ConvergenceCertificateDiagnostic(self.samples), TheoremVerdictsDiagnostic(self.samples)]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "ntk_samples": self.samples}
