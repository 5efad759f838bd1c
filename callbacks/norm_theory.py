"""`NormTheory`: every diagnostic in one callback."""

from lightning_normtheory.callbacks.base import DiagnosticCallback
from lightning_normtheory.callbacks.min_weight_norm import MinWeightNormDiagnostic
from lightning_normtheory.callbacks.rsc_ratio import RSCRatioDiagnostic

__all__ = ["NormTheory"]


class NormTheory(DiagnosticCallback):
    """Logs everything that `MinWeightNorm` and `RSCRatio` log, with what they share computed once.

    A diagnostic that does not apply to the model (the weight norms of a model without normalised layers) is left out,
    and a warning at fit start says so. The arguments are those of `DiagnosticCallback`.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[NormTheory()], logger=False)
    """

    diagnostics = (MinWeightNormDiagnostic, RSCRatioDiagnostic)
    leaves_out = True
