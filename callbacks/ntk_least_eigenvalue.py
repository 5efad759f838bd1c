"""`NTKLeastEigenvalue`: the spectrum of the tangent kernel, its length and direction parts, and its change."""

import math
import time
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.cost import Sizes
from lightning_normtheory.callbacks.engine.diagnostic import SAMPLE_SETTINGS, Diagnostic, layer_metric
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.output.messages import say, warn
from lightning_normtheory.model.layers import layer_of_parameter
from lightning_normtheory.ntk.result import Outputs, TangentKernel, kernel_change, label_alignment
from lightning_normtheory.ntk.strategies import MOST_ROWS, Effort
from lightning_normtheory.record.wording import join_names
from lightning_normtheory.theorems.papers.dgm import DGMForm

__all__ = ["NTKLeastEigenvalue"]

_LAMBDA = "ntk_lambda_min"
_MANY_ROWS = 4096
# Above this cost in gradients of the probe, the kernel at fit start is not repeated in float64, which takes up to four
# times as long on convolutions.
_REFINED_AT_START = 8.0


class KernelPair(NamedTuple):
    """The kernel of a measurement, K₀, and the optimizer step at which K₀ was measured."""

    now: TangentKernel
    start: Tensor
    since: int


class NTKLeastEigenvalueDiagnostic(Diagnostic):
    """λ_min with its floor, λ_max, the parts of the kernel, and its change since the start of the fit."""

    title = "tangent kernel"
    key = _LAMBDA
    metrics = (
        key,
        f"{_LAMBDA}_floor",
        "ntk_lambda_max",
        "ntk_condition_number",
        "ntk_effective_rank",
        "ntk_gradient_norm",
        "ntk_samples",
        "ntk_seconds",
    )
    needs_loss = False
    needs_outputs = True
    since_start = ("ntk_change", "ntk_change_max")

    def __init__(
        self,
        samples: int = 128,
        outputs: Outputs = "trace",
        directions: int | None = None,
        *,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if type(samples) is not int or samples < 1:
            raise ValueError(f"Expected the number of samples to be a positive integer, but got {samples!r}.")
        if directions is not None and (type(directions) is not int or directions < 1 or outputs != "trace"):
            called, other = (names.get(name, name) for name in ("directions", "outputs"))
            raise ValueError(
                f"Expected {called} to be a positive integer, with {other}='trace', or None, but got {directions!r} and"
                f" {other}={outputs!r}."
            )
        if outputs not in get_args(Outputs):
            called = names.get("outputs", "outputs")
            raise ValueError(f"Expected {called} to be 'full', 'trace' or 'sum', but got {outputs!r}.")
        self._samples, self._outputs, self._names = samples, outputs, names
        self._directions = directions
        self._effort: Effort | None = None
        self._repeated = False
        self._reference: Tensor | None = None
        self._fingerprint: int | None = None
        self._trained: int | None = None
        self._since: int | None = None
        self._change_max = 0.0
        self._dgm: DGMForm | None = None
        self._warned = False

    def cost(self, sizes: Sizes) -> float:
        """Return the expected cost by counts: those of `_choose`, or a rough one before that.

        It is the first precision's; a repetition in float64 is expected if there has been one.
        """
        if self._effort is not None and self._directions is None:
            return 1 + self._effort.cost * (1 if self._repeated else 1 / 3)
        passes = 1 if self._outputs == "sum" else max(sizes.outputs, 1)
        if self._outputs == "trace":
            passes = min(passes, self._directions or 32)
        cost = 1 + 0.7 * (1 + passes) * min(self._samples, sizes.probe) / sizes.probe
        chosen = self._directions is None and self._outputs != "full"
        return min(cost, 5.0) if chosen else cost

    def start_cost(self, sizes: Sizes) -> float:
        return self.cost(sizes)

    def start(self, measurement: Measurement) -> None:
        found = self._kernel(measurement, start=True)
        self._remember(measurement, found)
        form = measurement.theory.dgm_form(len(found.over_samples))
        self._dgm = form if isinstance(form, DGMForm) else None

    def _kernel(self, measurement: Measurement, *, start: bool = False) -> TangentKernel:
        if self._effort is None:
            self._effort = self._choose(measurement)
        effort = self._effort
        # The first step waits for the kernel at fit start, of which only the change since is logged.
        refine = not (start and effort.cost > _REFINED_AT_START)
        found = measurement.kernels.tangent_kernel(effort.samples, self._outputs, effort.directions, refine=refine)
        self._repeated |= found.dtype == torch.float64
        return found

    def _choose(self, measurement: Measurement) -> Effort:
        """Choose the directions and samples of all kernels of the fit, and say so if they are not what was asked."""
        if self._directions is not None:
            return Effort(self._directions, self._samples)
        effort = measurement.kernels.effort(self._samples, self._outputs)
        asked = min(self._samples, sum(batch.samples for batch in measurement.function.all_batches))
        found = []
        if effort.directions is not None:
            found.append(f"estimated from {effort.directions} random directions of {effort.outputs} outputs")
        if effort.samples < asked:
            found.append(f"on {effort.samples} instead of {asked} samples")
        if found:
            limit = "about 12 gradients of the probe" if self._outputs != "full" else f"{MOST_ROWS} rows"
            say(measurement.trainer, f"Tangent kernel {', '.join(found)}: at most {limit}.")
        return effort

    def measure(self, measurement: Measurement) -> dict[str, float]:
        begin = time.perf_counter()
        found = self._kernel(measurement)
        self._warn(found)
        metrics = {
            _LAMBDA: found.lambda_min,
            f"{_LAMBDA}_floor": found.floor,
            "ntk_lambda_max": found.lambda_max,
            "ntk_condition_number": found.condition_number,
            "ntk_effective_rank": found.effective_rank,
            "ntk_gradient_norm": found.largest_gradient,
            "ntk_samples": float(len(found.over_samples)),
            **_decay(found),
            **_sampling(found),
            **_parts(found),
            **self._since_start(measurement, found),
            **self._theorem(found),
        }
        if found.untraced and "ntk_rest_share" not in metrics:
            name, reason = next(iter(found.untraced.items()))
            self.reasons = {**self.reasons, "ntk_direction_share": f"no layer feeds BatchNorm {name!r}: {reason}"}
        targets = measurement.theory.targets(len(found.over_samples))
        if targets is not None:
            alignment = label_alignment(found.over_samples, targets)
            metrics.update({} if math.isnan(alignment) else {"ntk_label_alignment": alignment})
        metrics["ntk_seconds"] = time.perf_counter() - begin
        return metrics

    def _remember(self, measurement: Measurement, found: TangentKernel) -> None:
        self._reference, self._fingerprint = _upper(found.kernel), self._fingerprint_of(measurement)
        self._trained, self._change_max = measurement.kernels.trained_fingerprint, 0.0
        self._since = measurement.trainer.global_step

    def pair(self, measurement: Measurement) -> KernelPair | None:
        """Return the kernel of this measurement and that of the start, after `measure`; ``None`` without one."""
        if self._effort is None or self._reference is None:
            return None
        found = measurement.kernels.known(self._effort.samples, self._outputs, self._effort.directions)
        if found is None or self._since is None:
            return None
        return KernelPair(found, _from_upper(self._reference, len(found.kernel)), self._since)

    def _fingerprint_of(self, measurement: Measurement) -> int:
        """Return a number that identifies the samples, the kind of kernel and the directions."""
        assert self._effort is not None
        samples = measurement.kernels.fingerprint(self._effort.samples)
        directions = () if self._effort.directions is None else (self._effort.directions,)
        return hash((samples, get_args(Outputs).index(self._outputs), *directions))

    def _since_start(self, measurement: Measurement, found: TangentKernel) -> dict[str, float]:
        self.reasons = {}
        if self._reference is not None and self._fingerprint != self._fingerprint_of(measurement):
            self.reasons = {"ntk_change": "probe samples differ from the checkpoint; it restarts here"}
        elif self._reference is not None and self._trained not in (None, measurement.kernels.trained_fingerprint):
            self.reasons = {"ntk_change": "the set of trained parameters has changed; it restarts here"}
        if self.reasons:
            self._reference = None
        n = len(found.kernel)
        if self._reference is None or len(self._reference) != n * (n + 1) // 2:
            self._remember(measurement, found)  # also the first kernel of an iterable dataset
            return {}
        change = kernel_change(found.kernel.cpu(), _from_upper(self._reference, n))
        self._change_max = max(self._change_max, change)
        return {"ntk_change": change, "ntk_change_max": self._change_max}

    def _theorem(self, found: TangentKernel) -> dict[str, float]:
        form = self._dgm
        if form is None:
            return {}
        return {
            "ntk_alpha": form.alpha,
            "ntk_lambda_0": form.lambda_0,
            "ntk_mu_0": form.mu_0,
            "ntk_threshold": form.threshold,
            "ntk_threshold_distance": found.lambda_min - form.threshold,
        }

    def _warn(self, found: TangentKernel) -> None:
        if self._warned:
            return
        self._warned = True
        samples, outputs = (self._names.get(name, name) for name in ("samples", "outputs"))
        if found.remark:
            warn(found.remark)
        if found.deficiency:
            remedy = "Remove them from the training set" if found.duplicates else f"Use fewer {samples}"
            warn(f"{_LAMBDA} is zero, up to rounding. {found.deficiency}. {remedy}.")
        if len(found.kernel) > _MANY_ROWS:
            warn(
                f"The tangent kernel has {len(found.kernel)} rows: with its parts and the one in the checkpoint it "
                f"takes {5 * found.kernel.nbytes / 1e9:.1f} GB. Use fewer {samples}"
                f"{f', or {outputs}=' + repr('trace') if self._outputs == 'full' else ''}."
            )
        if found.one_by_one and math.isfinite(found.lambda_max):
            warn(
                "The tangent kernel is computed sample by sample, which is slow, in some parameters: "
                f"{join_names(found.one_by_one, most=3)}."
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "reference": self._reference,
            "fingerprint": self._fingerprint,
            "trained": self._trained,
            "change_max": self._change_max,
            "since": self._since,
            "effort": None if self._effort is None else tuple(self._effort),
            "dgm": None if self._dgm is None else tuple(self._dgm),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reference, self._fingerprint = state.get("reference"), state.get("fingerprint")
        self._trained, self._change_max = state.get("trained"), state.get("change_max", 0.0)
        self._since = state.get("since")
        self._effort = Effort(*state["effort"]) if state.get("effort") else None
        self._dgm = DGMForm(*state["dgm"]) if state.get("dgm") else None

    def forget(self, changed: Collection[str]) -> str:
        samples = SAMPLE_SETTINGS | {"predict", "parameters", "ntk_samples"}
        if self._dgm is not None and samples & set(changed):
            self._dgm = None
        if (samples | {"batch_stats", "ntk_outputs", "ntk_directions"}) & set(changed):
            self._effort = None
        if self._reference is None or not (samples | {"batch_stats", "ntk_outputs", "ntk_directions"}) & set(changed):
            return ""
        self._reference, self._change_max = None, 0.0
        return "the kernel at fit start, for ntk_change,"


def _upper(kernel: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix, for the checkpoint."""
    return kernel.cpu()[tuple(torch.triu_indices(len(kernel), len(kernel), device="cpu"))]


def _from_upper(entries: Tensor, n: int) -> Tensor:
    rows, columns = torch.triu_indices(n, n, device="cpu")
    kernel = entries.new_empty(n, n)
    kernel[rows, columns] = kernel[columns, rows] = entries
    return kernel


def _sampling(found: TangentKernel) -> dict[str, float]:
    """Return the number of random directions of an estimate and, for two or more, the standard errors."""
    if found.directions is None:
        return {}
    metrics = {"ntk_directions": float(found.directions)}
    if found.directions > 1:
        metrics[f"{_LAMBDA}_error"], metrics["ntk_lambda_max_error"] = found.lambda_min_error, found.lambda_max_error
    return metrics


def _decay(found: TangentKernel) -> dict[str, float]:
    """Return λ_min of fewer samples, and how it decays with their number."""
    n = len(found.over_samples)
    if n < 8 or found.coupled:
        return {}
    metrics = {f"{_LAMBDA}_half": found.lambda_min_of(n // 2), f"{_LAMBDA}_quarter": found.lambda_min_of(n // 4)}
    decay = found.lambda_min_decay
    return metrics if math.isnan(decay) else {**metrics, f"{_LAMBDA}_decay": decay}


def _parts(found: TangentKernel) -> dict[str, float]:
    """Return the contributions of directions and lengths, and of each layer."""
    shares = found.shares
    metrics = {}
    if shares["rest"] < 1:
        metrics = {f"ntk_{part}_share": share for part, share in shares.items()}
        metrics["ntk_direction_lambda_min"] = found.direction_lambda_min
        metrics["ntk_length_lambda_min"] = found.length_lambda_min
        if math.isfinite(found.crossover):
            metrics["ntk_crossover"] = found.crossover
    total = float(found.kernel.trace()) or 1.0
    present = {(_layer_of(name), part) for name, part in found.part_of.items()}
    for layer, parts in found.layers.items():
        share = layer_metric("ntk_share", layer or "module", metrics)
        label = share.removeprefix("layers/ntk_share__")
        traces = {part: float(getattr(parts, part).trace()) / total for part in shares}
        metrics[share] = sum(traces.values())
        # Under WeightNorm a layer has both; with BatchNorm it has the direction, and the BatchNorm the length.
        for part in ("direction", "length"):
            if (layer, part) in present:
                metrics[f"layers/ntk_{part}_share__{label}"] = traces[part]
    return metrics


def _layer_of(name: str) -> str:
    """Return the layer of a parameter; empty for the module itself."""
    return layer_of_parameter(f"module.{name}").removeprefix("module").lstrip(".")


class NTKLeastEigenvalue(DiagnosticCallback):
    """Logs the least eigenvalue of the tangent kernel K[(i,h), (j,h')] = ⟨∇f_h(x_i), ∇f_h'(x_j)⟩, on the first
    samples of the probe, with its split into the directions and lengths of WeightNorm (DGM, Section 3) and BatchNorm
    (eq. 2.2): the weights of layers that feed a BatchNorm are directions, its scales γ are lengths.

    BatchNorm uses the statistics of the probe with the current weights, held constant, so that samples are independent
    and K depends on weights and probe alone: means and unbiased variances of its batches, each normalized with its own
    as in training, averaged over the samples. A layer that is trained in eval mode keeps its running statistics.
    ``batch_stats=False`` uses running statistics in all layers, which move without the weights; ``True`` those of each
    batch, through which it differentiates; that takes a backward pass for each sample and output.

    The kernel is exact while that costs at most about 12 gradients of the loss on the probe, a repetition in float64
    included. Otherwise it is estimated, unbiased, from up to 32 random directions over the outputs, and if that is too
    much as well, of fewer samples. The choice is made once, from counts, and said at fit start; all kernels of a fit
    have the same directions.

    Logged after every n-th epoch or step:

    * ``normtheory/ntk_lambda_min``: λ_min, and ``normtheory/ntk_lambda_min_floor``: its error bound. The theory's
      condition is λ_min(K_full) > 0; the kernels ``"trace"`` and ``"sum"`` can be positive where K_full is singular;
    * ``normtheory/ntk_lambda_min_half``, ``normtheory/ntk_lambda_min_quarter``: λ_min of the kernel of the first half
      and quarter of these samples, which are drawn at random, and ``normtheory/ntk_lambda_min_decay``: the exponent p
      of λ_min ∝ n^−p between a quarter of them and all, above the floor. λ_min never increases with the number of
      samples (interlacing): that of an exact kernel is an upper bound of λ_min over the whole training set. From 8
      samples on, and not where samples interact;
    * ``normtheory/ntk_lambda_max``, ``normtheory/ntk_condition_number`` (infinite below the floor) and
      ``normtheory/ntk_effective_rank`` = (tr K)²/‖K‖_F²; ``normtheory/ntk_samples``: n;
      ``normtheory/ntk_gradient_norm`` = max_i √K_ii: max_i ‖∇f(x_i)‖ for one output, otherwise the root mean square
      over the outputs, which is no more than ‖∂f(x_i)/∂θ‖₂;
    * for an estimate, ``normtheory/ntk_directions``: the number of random directions, and from two on
      ``normtheory/ntk_lambda_min_error`` and ``normtheory/ntk_lambda_max_error``: standard errors of λ_min and λ_max;
    * ``normtheory/ntk_change``: ‖K − K₀‖_F/‖K₀‖_F against the kernel at fit start, and ``normtheory/ntk_change_max``,
      the largest so far, ΔK of LIN, Section C. For an iterable dataset K₀ is measured when the probe is complete. When
      the set of trained parameters changes, as layers are unfrozen, both restart: K₀ is the kernel of that measurement,
      for which they are not logged;
    * ``normtheory/ntk_label_alignment``: the cosine between the centered kernel and that of the labels, where the batch
      is a pair (x, y);
    * with WeightNorm or BatchNorm, ``normtheory/ntk_direction_share``, ``…_length_share``, ``…_rest_share``: the parts
      of the trace, exact blocks of the parameters with any statistics of BatchNorm;
      ``normtheory/ntk_direction_lambda_min`` and ``normtheory/ntk_length_lambda_min``; ``normtheory/ntk_crossover`` =
      √(λ_min(K_direction)/λ_min(K_length)), above 1 if the directions dominate; logged if both are above their floors;
    * for a network of DGM's form, ``normtheory/ntk_alpha``, ``…_lambda_0``, ``…_mu_0`` and
      ``normtheory/ntk_threshold``: λ₀/(2α²) for α ≤ 1, μ₀/2 for α > 1 (DGM, Theorems 4.1 and 4.2), with
      ``…_threshold_distance``, negative below;
    * ``normtheory_layers/ntk_share__LAYER`` and, with WeightNorm or BatchNorm, ``…_direction_share__LAYER`` and
      ``…_length_share__LAYER``: a layer's share of the trace, up to 512 samples, not for ``outputs="full"``. The scales
      γ are lengths of the BatchNorm, the directions are those of the layer that feeds it;
    * ``normtheory/ntk_seconds``, and ``normtheory/seconds`` for the whole measurement.

    The arguments that are not listed are those of `DiagnosticCallback`.

    Args:
        samples: the number of samples, the first ones of the probe.
        outputs: ``"full"``: the kernel of all outputs (nk, nk); ``"trace"``: its average over the outputs (n, n);
            ``"sum"``: the kernel of their sum (n, n).
        directions: the number of random directions for ``"trace"``, or the number of outputs, or more, for the exact
            kernel, whatever it costs; ``None``: chosen.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[NTKLeastEigenvalue(samples=64, outputs="full")], logger=False)
    """

    def __init__(
        self,
        *args: Any,
        samples: int = 128,
        outputs: Outputs = "trace",
        directions: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._options: dict[str, Any] = {"samples": samples, "outputs": outputs, "directions": directions}
        super().__init__(*args, **kwargs)

    def make_diagnostics(self) -> list[Diagnostic]:
        return [NTKLeastEigenvalueDiagnostic(**self._options)]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **ntk_settings(self._options)}


def ntk_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under the names that they have in the file, which also has those of other diagnostics."""
    return {f"ntk_{name}": value for name, value in options.items()}
