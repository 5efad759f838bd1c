"""The form of a diagnostic: one quantity of the theory, free of Lightning's hooks."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import nn

from lightning_normtheory.callbacks.measurement.epoch import View

__all__ = ["LOSS_SETTINGS", "SAMPLE_SETTINGS", "Diagnostic", "NotApplicable"]

# The settings of a callback that say which samples are measured, and which loss of them.
SAMPLE_SETTINGS = frozenset({"probe", "seed"})
LOSS_SETTINGS = SAMPLE_SETTINGS | {"loss", "batch_stats"}


class NotApplicable(ValueError):
    """The model lacks what a diagnostic measures."""


class Diagnostic:
    """One quantity. The callback that runs it does everything else.

    Attributes:
        title: what it measures, in a word or two, for people who wait for it.
        names: the metrics it logs, without the prefix; these become NaN when a measurement fails.
        explained: metrics that are NaN for a reason which the diagnostic has given itself.
        needs_probe: whether it looks at data; if not, any loader and any batch will do.
        needs_loss: whether it asks for the loss of a batch.
        needs_outputs: whether it asks for the outputs of a batch.
        needs_validation: whether it also looks at validation data; with `needs_probe` and `needs_loss`.
        optional: whether a callback that leaves out what does not apply need not mention it.
    """

    title: ClassVar[str] = "measuring"
    names: tuple[str, ...]
    explained: frozenset[str] = frozenset()
    needs_probe: ClassVar[bool] = True
    needs_loss: ClassVar[bool] = True
    needs_outputs: ClassVar[bool] = False
    needs_validation: ClassVar[bool] = False
    optional: ClassVar[bool] = False

    def check(self, model: nn.Module) -> None:
        """At fit start.

        Raises:
            NotApplicable: if the model lacks what is measured.
        """

    def start(self, view: View) -> None:
        """Before the first training step of a fresh run, where the probe is known by then."""

    def measure(self, view: View) -> dict[str, float]:
        """At the end of an epoch: the metrics by name. Names that begin with ``layers/`` get a section of their own."""
        raise NotImplementedError

    def notes(self) -> dict[str, Any]:
        """What is no number, for the head of the file: plain strings, lists and dicts."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to give the same numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def forget(self, changed: Collection[str]) -> str:
        """Drop what was loaded and is about other samples or another function than what is measured now.

        Args:
            changed: the names of the settings that are others than in the checkpoint.

        Returns:
            What was dropped, in words; nothing if nothing was.
        """
        return ""
