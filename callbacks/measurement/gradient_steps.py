"""What the theorems ask about the steps of a run: plain gradient descent, on the whole training set."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden

from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.samples.fresh import why_repeated
from lightning_normtheory.record.wording import join_names

__all__ = ["GradientSteps", "gradient_steps"]


# Where a module can change the gradients or the step.
_HOOKS = ("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step", "optimizer_step")


class GradientSteps(NamedTuple):
    """How a run steps.

    Attributes:
        rate: η of an optimizer whose steps are θ − η × gradient with one η for all parameters; ``None`` for any other.
        other: why the steps are not θ − η∇L, or not known to be; empty if they are.
        batches: why ∇L of a step is not that of the whole training set; empty if it is.
        batch: the number of samples in a step; ``None`` if it is not known.
    """

    rate: float | None
    other: str
    batches: str
    batch: int | None


def gradient_steps(function: MeasuredFunction) -> GradientSteps:
    """Find out how the run steps."""
    rate, other = _rate(function)
    batch = _samples_of_a_step(function)
    n = function.training_samples
    if batch is None or n is None:
        batches = "the number of samples in a step is not known"
    elif batch < n:
        batches = f"mini-batches of {batch} of {n} samples"
    else:
        batches = why_repeated(function.trainer) or _why_uneven(function.trainer, n)
    return GradientSteps(rate, other or _why_more(function) or _why_unknown(function.model), batches, batch)


def _why_more(function: MeasuredFunction) -> str:
    """Return why a step is not on the measured parameters alone."""
    theta = {id(p) for p in function.theta.values()}
    others = [name for name, p in function.model.named_parameters() if p.requires_grad and id(p) not in theta]
    return (
        f"{others[0]!r} is trained, too, but is not among the chosen parameters" if function.chosen and others else ""
    )


def _why_unknown(module: LightningModule) -> str:
    """Return why the module's own code may change the steps."""
    if not module.automatic_optimization:
        return "manual optimization, whose steps are not known"
    # That of pytorch_lightning or of lightning.
    base = next(each for each in type(module).__mro__ if each.__name__ == "LightningModule")
    changed = [name for name in _HOOKS if is_overridden(name, module, base)]
    return f"the module may change its steps: it has its own {join_names(changed)}" if changed else ""


def _why_uneven(trainer: Trainer, n: int) -> str:
    """Return why samples do not count equally in a step that has them all, or not with the weight 1/n."""
    loader: Any = trainer.train_dataloader
    accumulated = trainer.accumulate_grad_batches
    batches = int(trainer.num_training_batches)
    try:
        own = min(len(loader.sampler), batches * loader.batch_size)
    except (AttributeError, TypeError, NotImplementedError):
        return "the number of samples in an epoch is not known"
    if loader.batch_size == n and trainer.world_size == 1 and getattr(loader.sampler, "repeats_the_set", False):
        own = n  # each batch is the whole set
    if own * trainer.world_size != n:
        return f"{own * trainer.world_size} draws of {n} samples"
    if accumulated > batches:
        return f"the gradients of {batches} {'batch' if batches == 1 else 'batches'} are divided by {accumulated}"
    return "batches of different sizes count equally" if accumulated > 1 and own % loader.batch_size else ""


def _rate(function: MeasuredFunction) -> tuple[float | None, str]:
    """Return η, or ``None`` and the reason why there is none."""
    theta = {id(p) for p in function.theta.values()}
    optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in function.trainer.optimizers]
    optimizers = [each for each in optimizers if any(theta & _ids(group) for group in each.param_groups)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if theta & _ids(group)]
    names = [type(optimizer).__name__ for optimizer in optimizers if type(optimizer) is not torch.optim.SGD]
    if names:
        return None, f"the optimizer is {names[0]}, not gradient descent"
    for option, name in (("momentum", "momentum"), ("weight_decay", "weight decay"), ("maximize", "maximization")):
        if values := [group[option] for group in groups if group[option]]:
            return None, name if values[0] is True else f"{name} of {values[0]:g}"
    if function.trainer.gradient_clip_val:
        return None, f"gradients are clipped to {function.trainer.gradient_clip_val:g}"
    if not groups or not theta <= set.union(*map(_ids, groups)):
        return None, "no optimizer has all the parameters"
    rates = {float(group["lr"]) for group in groups}
    return (rates.pop(), "") if len(rates) == 1 else (None, f"{len(rates)} learning rates, not one")


def _samples_of_a_step(function: MeasuredFunction) -> int | None:
    """Return the number of samples in a step, over all processes, if the batches have a size."""
    trainer, n = function.trainer, function.training_samples
    size = getattr(trainer.train_dataloader, "batch_size", None)
    batches = trainer.num_training_batches
    if not isinstance(size, int) or n is None or math.isinf(batches):
        return None
    return min(n, size * trainer.world_size * min(trainer.accumulate_grad_batches, int(batches)))


def _ids(group: Mapping[str, Any]) -> set[int]:
    return {id(p) for p in group["params"]}
