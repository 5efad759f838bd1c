"""Check the setup before anything runs."""

import difflib
import inspect
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn

__all__ = [
    "check_arguments",
    "check_strategy",
    "refuse_unknown_arguments",
    "synchronized_layers",
]

# The strategies of either Lightning package that shard the weights over processes.
_SHARDING = {"FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy"}


def refuse_unknown_arguments(cls: type, given: dict[str, Any]) -> None:
    """Check the keyword arguments of a callback.

    Raises:
        TypeError: that names the nearest argument.
    """
    known: list[str] = []
    for base in cls.__mro__:  # as far as each __init__ passes **kwargs on
        if "__init__" in vars(base):
            _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            known += [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{cls.__name__} has no argument {name!r}.{hint} It takes {', '.join(known)}.")


def check_arguments(batch_stats: Any, prefix: str, on_error: str, **functions: Any) -> None:
    """Check the arguments that all callbacks have.

    Raises:
        ValueError: or TypeError, with what was expected.
    """
    if batch_stats not in (None, True, False):
        raise ValueError(f"Expected batch_stats to be True, False or None, but got {batch_stats!r}.")
    if not prefix or "/" in prefix or "." in prefix:
        raise ValueError(
            f"Expected a prefix without slash or dot (dashboards group metrics by it), but got {prefix!r}."
        )
    if on_error not in ("warn", "raise"):
        raise ValueError(f"Expected on_error to be 'warn' or 'raise', but got {on_error!r}.")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"Expected {name} to be a function of (module, batch), but got {function!r}.")


def check_strategy(trainer: Trainer, callback: str) -> None:
    """Check that every process has the whole model, and that torch.distributed connects the processes.

    Raises:
        ValueError: with the reason and the alternative.
    """
    strategy = type(trainer.strategy)
    if _SHARDING & {base.__name__ for base in strategy.__mro__}:
        raise ValueError(
            f"Expected a strategy that gives every process the whole model, but {strategy.__name__} divides its weights"
            f" between them, and {callback} differentiates through all of them at once. Train with strategy='ddp', or"
            " leave the callback out and measure the weights of a checkpoint in one process, with the functions of"
            " lightning_normtheory."
        )
    if trainer.world_size > 1 and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ValueError(
            f"Expected processes connected by torch.distributed, but {strategy.__name__} runs {trainer.world_size} that"
            f" are not, and {callback} cannot sum over them. Train with strategy='ddp', or leave the callback out."
        )


def synchronized_layers(trainer: Trainer, pl_module: LightningModule) -> list[str]:
    """Return the layers that normalize with the statistics of all processes.

    They are measured with their running statistics: torch cannot differentiate those of all processes twice.

    Raises:
        ValueError: with the reason and the alternative, if a layer keeps no running statistics.
    """
    modules = pl_module.named_modules() if trainer.world_size > 1 else ()
    found = {name: module for name, module in modules if isinstance(module, nn.SyncBatchNorm)}
    for name, module in found.items():
        if module.running_mean is None:
            raise ValueError(
                f"Expected running statistics to measure SyncBatchNorm {name!r} with, but it keeps none: torch cannot"
                " differentiate the statistics of all processes twice. Set track_running_stats=True, or train without"
                " sync_batchnorm."
            )
    return list(found)
