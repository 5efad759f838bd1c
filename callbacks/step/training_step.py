"""Call the user's `training_step`."""

import inspect
from collections.abc import Mapping
from typing import Any

from pytorch_lightning import LightningModule
from torch import Tensor

from lightning_normtheory.callbacks.samples.batch_contents import describe

__all__ = ["call_training_step", "training_step_loss"]


def call_training_step(module: LightningModule, batch: Any, batch_idx: int) -> Any:
    """Call the module's own `training_step`, with the arguments that it takes."""
    names = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in names:
        raise TypeError("Expected a training_step that takes a batch, but it takes dataloader_iter.")
    variadic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in names.values())
    arguments = (batch, batch_idx) if len(names) > 1 or variadic else (batch,)  # as Lightning decides it
    return module.training_step(*arguments)


def training_step_loss(module: LightningModule, batch: Any, batch_idx: int) -> Tensor:
    """Return the loss of the module's own `training_step`, regularizers included."""
    result = call_training_step(module, batch, batch_idx)
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"Expected training_step to return the loss, or a dict with the key 'loss', but got {describe(result)}."
        )
    return loss
