"""`Diagnostic`: one quantity of the theory, free of Lightning's hooks."""

from collections.abc import Collection, Container, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pytorch_lightning import Trainer
from torch import nn

from lightning_normtheory.callbacks.engine.cost import Sizes
from lightning_normtheory.callbacks.measurement.curvature import HessianRequest
from lightning_normtheory.callbacks.measurement.measurement import Measurement

__all__ = ["LOSS_SETTINGS", "SAMPLE_SETTINGS", "Diagnostic", "NotApplicable", "layer_metric"]

# The settings of a callback that determine the samples, and the loss on them.
SAMPLE_SETTINGS = frozenset({"probe", "seed"})
LOSS_SETTINGS = SAMPLE_SETTINGS | {"loss", "parameters", "batch_stats"}


class NotApplicable(ValueError):
    """The model lacks what a diagnostic measures."""


def layer_metric(quantity: str, layer: str, taken: Container[str]) -> str:
    """Return the name of a layer's metric, one that is not taken: "a.b_c" and "a_b.c" are different layers.

    Example:
        >>> layer_metric("weight_norm", "a.b_c", {"layers/weight_norm__a_b_c"})
        'layers/weight_norm__a_b_c_'
    """
    name = f"layers/{quantity}__{layer.replace('.', '_')}"
    while name in taken:
        name += "_"
    return name


class Diagnostic:
    """One quantity. The callback that runs it does everything else.

    Attributes:
        key: its main metric, without the prefix; identifies it in checkpoints, warnings and messages.
        metrics: the metrics that it is expected to log, without the prefix. When a measurement fails, these and the
            metrics of the last measurement are logged as NaN.
        title: its name in one to three words, for the progress display.
        reasons: why a metric of the last measurement is NaN or missing, as a clause, where the diagnostic knows it; or
            why a flag is 0.
        needs_probe: whether it uses samples; if not, any loader and any batch will do.
        needs_loss: whether it uses the loss of a batch.
        needs_outputs: whether it uses the outputs of a batch.
        needs_validation: whether it also uses validation data; requires `needs_probe` and `needs_loss`.
        optional: whether a callback may leave it out without a warning if it does not apply.
        shared: the quantities that it asks a measurement for and others may ask for, too, see `cost.SHARED`.
        since_start: those of its metrics that compare with what `start` has measured.
    """

    key: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    title: ClassVar[str] = "measuring"
    reasons: Mapping[str, str] = MappingProxyType({})
    needs_probe: ClassVar[bool] = True
    needs_loss: ClassVar[bool] = True
    needs_outputs: ClassVar[bool] = False
    needs_validation: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    shared: ClassVar[tuple[str, ...]] = ()
    since_start: ClassVar[tuple[str, ...]] = ()

    def check(self, model: nn.Module) -> None:
        """Check the model at fit start.

        Raises:
            NotApplicable: if the model lacks what is measured.
        """

    def cost(self, sizes: Sizes) -> float:
        """Return the expected cost of one measurement, without the `shared` quantities, in G: gradients of the loss on
        the whole probe."""
        return 0.0

    def start_cost(self, sizes: Sizes) -> float:
        """Return the expected cost of `start` in G."""
        return 0.0

    def start(self, measurement: Measurement) -> None:
        """Measure before the first training step of a fresh run, if the probe is known by then."""

    def after_batch(self, trainer: Trainer, outputs: Any, batch_idx: int) -> None:
        """Read what the training step of a batch returned, after the optimizer's step. It runs in every step: it must
        not wait for the device, nor for other processes.

        Args:
            outputs: those of Lightning's ``on_train_batch_end``.
        """

    def hessian_request(self) -> HessianRequest | None:
        """Return what `measure` needs of the loss's Hessian, if anything; ``measurement.curvature.answer(self.key)``
        then has the answer. The requests of all diagnostics share one gradient graph."""
        return None

    def measure(self, measurement: Measurement) -> dict[str, float]:
        """Return the metrics of an epoch by name. Names that begin with ``layers/`` get their own section."""
        raise NotImplementedError

    def notes(self) -> dict[str, Any]:
        """Return facts for the header of the run's file that are not numbers: plain strings, lists and dicts."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to give the same numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; an empty state means that the checkpoint has none."""

    def forget(self, changed: Collection[str]) -> str:
        """Drop the loaded state if it was measured on different samples or of a different function.

        Args:
            changed: the names of the settings that differ from the checkpoint's.

        Returns:
            What was dropped, in words; empty if nothing was.
        """
        return ""
