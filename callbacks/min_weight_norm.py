"""`MinWeightNorm`: the minimum weight-vector norm w_min of WN, Definition 3.1."""

from pytorch_lightning.utilities import rank_zero_warn
from torch import nn

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic, NotApplicable, layer_metric
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.norms.units import NormalizedLayers, require_normalized, smallest, unit_norms

__all__ = ["MinWeightNorm"]


class MinWeightNormDiagnostic(Diagnostic):
    """w_min and the smallest norm of each layer."""

    title = "weight norms"
    key = "min_weight_norm"
    metrics = (key,)
    needs_probe = False
    needs_loss = False

    def check(self, model: nn.Module) -> None:
        try:
            self._layers: NormalizedLayers = require_normalized(model)
        except ValueError as error:
            raise NotApplicable(str(error)) from None
        fed = {batch_norm for weight in self._layers.weights for batch_norm in weight.batch_norms}
        unfed = {name: reason for name, reason in self._layers.unknown.items() if name not in fed}
        if unfed:
            name, reason = next(iter(unfed.items()))
            rank_zero_warn(
                f"{len(unfed)} BatchNorm layers normalize no layer's output that could be found, and are excluded. The "
                f"first is {name!r}: {reason}. See normalized_layers(model).unknown for all."
            )

    def measure(self, measurement: Measurement) -> dict[str, float]:
        layers, self.reasons = self._layers, {}
        if measurement.function.chosen:
            theta = {id(p) for p in measurement.function.theta.values()}
            weights = [each for each in layers.weights if any(id(p) in theta for p in each.module.parameters())]
            if not weights:
                self.reasons = {self.key: "the chosen parameters have no normalized layer"}
                return {}
            layers = layers._replace(weights=tuple(weights))
        norms = unit_norms(layers)
        metrics = {"min_weight_norm": smallest(norms)}
        for layer, norm in norms.items():
            metrics[layer_metric("weight_norm", layer, metrics)] = float(norm.min())
        return metrics


class MinWeightNorm(DiagnosticCallback):
    """Logs the smallest norm of a weight vector in any normalized layer. It needs no data.

    Logged after every n-th epoch or step:

    * ``normtheory/min_weight_norm``: w_min = min over units i and normalized layers l of ‖W_i^(l)‖₂, where W_i is the
      direction v_i of a WeightNorm, or the raw weights of a unit that feeds a BatchNorm;
    * ``normtheory_layers/weight_norm__LAYER``: the minimum over the units of each layer;
    * ``normtheory/seconds``: the time of the measurement.

    Under plain gradient descent (no momentum, no weight decay) w_min of WeightNorm layers cannot fall, since ∇_v L ⟂ v
    (DGM, eq. 2.3).

    A model without a normalized layer is trained without the callback, with a warning at fit start.

    The arguments are those of `DiagnosticCallback`.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[MinWeightNorm()], logger=False)
    """

    diagnostics = (MinWeightNormDiagnostic,)
