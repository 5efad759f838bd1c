"""Run the user's `training_step` without its messages reaching any logger."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from pytorch_lightning import LightningModule, Trainer

__all__ = ["muted"]


class _Silence:
    """Replaces a logger, its experiment, and what they return: accepts every call and does nothing."""

    def __getattr__(self, name: str) -> "_Silence":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Silence":
        return self


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


@contextmanager
def muted(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Drop what ``self.log``, the trainer's loggers and a direct ``wandb.log`` receive inside the block."""
    with ExitStack() as stack:
        for module in pl_module.modules():
            if hasattr(module, "log_dict"):  # a LightningModule of either package, also as a submodule
                stack.enter_context(patch.object(module, "log", _ignore))
                stack.enter_context(patch.object(module, "log_dict", _ignore))
        loggers = trainer.loggers
        stack.callback(setattr, trainer, "loggers", loggers)  # first: an interrupt may come in between
        trainer.loggers = [_Silence() for _ in loggers]  # type: ignore[misc]
        wandb = sys.modules.get("wandb")
        if wandb is not None and getattr(wandb, "run", None) is not None:
            stack.enter_context(patch.object(wandb, "log", _ignore))
            stack.enter_context(patch.object(wandb.run, "log", _ignore))
        watching = sys.modules.get("wandb.integration.torch.wandb_torch")
        if hasattr(watching, "log_track_update"):  # `watch` calls it before it logs a gradient
            stack.enter_context(patch.object(watching, "log_track_update", lambda *args: False))
        yield
