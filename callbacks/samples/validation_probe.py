"""The validation samples on which the generalization gap is measured."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pytorch_lightning import Trainer

from lightning_normtheory.callbacks.samples.probe import Probe

__all__ = ["ValidationProbe"]


class ValidationProbe(Probe):
    """A fixed set of samples of the first validation loader; otherwise as `Probe`.

    * Lightning creates the validation loaders when it first needs them, and `prepare` does not create them earlier:
      until then, and in a run without validation, there are no batches.
    * From an iterable dataset, batches are copied in the first validation. The sanity check does not count: a resumed
      run has none, and it may be shorter than the probe.
    * Loaders that are not run one after the other (a `CombinedLoader` in another mode than ``"sequential"``) give one
      batch of batches, as in training.

    Batches are cut at the validation loader's batch size.

    Example:
        >>> ValidationProbe(samples=128).batches(rank=0, world_size=1)
        []
    """

    _part: ClassVar[str] = "validation"

    def prepare(self, trainer: Trainer) -> None:
        """Read the samples once the loaders exist. All processes call it together."""
        loader = trainer.fit_loop.epoch_loop.val_loop._combined_loader
        # Loaders that are replaced during a run do not replace the probe.
        if self._source is None and loader is not None and loader.flattened:
            super().prepare(trainer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        # The checkpoint may be older than the first validation.
        self._restored = bool(self._chunks or self._batches)

    def _find(self, trainer: Trainer) -> tuple[Any, Any, float]:
        source = trainer.fit_loop.epoch_loop.val_loop._combined_loader
        assert source is not None  # `prepare` comes first
        # A limit on validation batches does not limit the probe: every sample of the set is unseen in training.
        return source, source.flattened[0] if source._mode == "sequential" else source.iterables, float("inf")

    def _draw_others(self, *_: Any) -> None:
        pass  # nothing is measured on more of them

    def _on_empty(self) -> None:
        pass  # no validation data, no gap
