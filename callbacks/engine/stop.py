"""Stop a measurement on SIGTERM."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from pytorch_lightning import Trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_normtheory.callbacks.measurement.ranks import stopped_together
from lightning_normtheory.measuring.interrupts import after_signal

__all__ = ["SIGTERMException", "stopped_by_sigterm"]


@contextmanager
def stopped_by_sigterm(trainer: Trainer) -> Iterator[None]:
    """Raise a `SIGTERMException` inside the block as soon as SIGTERM comes, or at once if it has come already.

    Lightning itself only takes note of the signal, and ends the fit after the batch: a long measurement would delay
    that. Several processes stop when they next exchange a message: one that stops alone would leave the others waiting.
    """

    def stop() -> None:
        if trainer.received_sigterm:
            raise SIGTERMException

    if trainer.world_size > 1:
        try:
            with stopped_together():
                yield
        except SIGTERMException:
            # The signal may come to the others later: all must end the fit here.
            trainer._signal_connector.received_sigterm = True
            raise
        return
    with after_signal(signal.SIGTERM, stop):
        stop()
        yield
