"""`HessianTrace`: the trace of the loss's Hessian with its standard error."""

from functools import partial
from typing import Any, get_args

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.cost import Sizes, products_cost
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic, layer_metric
from lightning_normtheory.callbacks.measurement.curvature import HessianRequest
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.hessian.operator import Memory
from lightning_normtheory.hessian.trace import TraceEstimate, check_products, estimate_trace

__all__ = ["HessianTrace"]


class HessianTraceDiagnostic(Diagnostic):
    """tr(∇²L) by Hutch++, of the whole Hessian or also of each layer's block."""

    title = "Hessian trace"
    key = "hessian_trace"
    metrics = (key, f"{key}_error", f"{key}_hvps", f"{key}_seconds")

    def __init__(self, hvps: int = 30, layers: bool = False, memory: Memory = "high") -> None:
        check_products(hvps)
        if memory not in get_args(Memory):
            raise ValueError(f"Expected memory to be 'high' or 'low', but got {memory!r}.")
        self._hvps, self._layers, self._memory = hvps, layers, memory

    def cost(self, sizes: Sizes) -> float:
        return products_cost(min(self._hvps, sizes.parameters), self._memory)

    def hessian_request(self) -> HessianRequest:
        return HessianRequest(partial(estimate_trace, hvps=self._hvps, layers=self._layers), self._memory)

    def measure(self, measurement: Measurement) -> dict[str, float]:
        answer = measurement.curvature.answer(self.key)
        trace: TraceEstimate = answer.value
        metrics = {
            self.key: trace.value,
            f"{self.key}_error": trace.standard_error,
            f"{self.key}_hvps": float(trace.hvps),
            f"{self.key}_seconds": answer.seconds,
        }
        for layer, (value, error) in trace.layers.items():
            metrics[layer_metric(self.key, layer, metrics)] = value
            metrics[layer_metric(f"{self.key}_error", layer, metrics)] = error
        return metrics


class HessianTrace(DiagnosticCallback):
    """Logs tr(∇²L), the sum of all eigenvalues of the loss's Hessian on the probe, with its standard error.

    Hutch++ (Meyer, Musco, Musco, Woodruff, 2021) computes the part of the trace in the leading directions and estimates
    the rest from random vectors. In `NormTheory`, with ``trace_hvps``, it shares the gradient's graph with λ_max.

    Logged after every n-th epoch or step:

    * ``normtheory/hessian_trace``: an unbiased estimate of tr(∇²L); exact for models with at most ``hvps`` parameters;
    * ``normtheory/hessian_trace_error``: its standard error. The trace is within three of them in about 98 % of draws.
      All epochs use the same random vectors, so a smooth curve is no proof of a small error;
    * ``normtheory/hessian_trace_hvps`` and ``normtheory/hessian_trace_seconds``: products and time that it took;
    * with ``layers``, ``normtheory_layers/hessian_trace__LAYER`` and ``normtheory_layers/hessian_trace_error__LAYER``:
      the same for the diagonal block of each layer. The blocks' traces add up to the whole;
    * ``normtheory/seconds``: time of the whole measurement.

    The arguments that are not listed are those of `DiagnosticCallback`.

    Args:
        hvps: the number of Hessian-vector products, at least 12. Where few eigenvalues
            dominate, the error falls faster than 1/√hvps.
        layers: whether to log the traces of the layers, too; they take no further products.
        memory: as in `HessianTopEigenvalue`.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[HessianTrace(every_n_epochs=5, layers=True)], logger=False)
    """

    def __init__(
        self, *args: Any, hvps: int = 30, layers: bool = False, memory: Memory = "high", **kwargs: Any
    ) -> None:
        self._options: dict[str, Any] = {"hvps": hvps, "layers": layers, "memory": memory}
        super().__init__(*args, **kwargs)

    def make_diagnostics(self) -> list[Diagnostic]:
        return [HessianTraceDiagnostic(**self._options)]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **{f"trace_{name}": value for name, value in self._options.items()}}
