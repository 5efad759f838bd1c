"""Run a `training_step` that optimizes manually without training, and read off the losses."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_normtheory.autodiff.graph import leaves

__all__ = ["HandedLoss", "ManualStep", "StopStep", "replaced", "with_inner"]


class StopStep(BaseException):
    """Ends a `training_step` early. No `Exception`: the user's code may catch those."""


class HandedLoss(NamedTuple):
    """A loss that a step hands to `backward`.

    Attributes:
        loss: the value, with its graph.
        name: the name of the variable in the step, or its number.
    """

    loss: Tensor
    name: str


class ManualStep:
    """What a step hands to `manual_backward` or `Tensor.backward`, and the optimizers that step on it.

    Inside `watching`, neither a backward pass nor an optimizer nor a learning-rate scheduler does anything.

    Args:
        stop_after: end the step with `StopStep` when this many losses are known; ``None``: run all of it.

    Attributes:
        losses: in the order of the step.
        used_by: for each optimizer that stepped, the numbers of the losses since its last `zero_grad` that reach one of
            its parameters: the gradient of their sum is what it steps on.
    """

    def __init__(self, stop_after: int | None = None) -> None:
        self.losses: list[HandedLoss] = []
        self.used_by: dict[int, tuple[int, ...]] = {}
        self._since_zero: dict[int, list[int]] = {}
        self._stop_after = stop_after

    @contextmanager
    def watching(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
        """Watch the step that runs inside the block."""
        raw = list(trainer.optimizers)
        self._parameters = [[p for group in each.param_groups for p in group["params"]] for each in raw]

        def backward(
            loss: Tensor, gradient: Tensor | None = None, *args: Any, inputs: Any = None, **kwargs: Any
        ) -> None:
            self._hand(loss, gradient, inputs, sys._getframe(1))

        with ExitStack() as stack:
            stack.enter_context(replaced(vars(pl_module), "manual_backward", backward))
            stack.callback(setattr, Tensor, "backward", Tensor.backward)
            Tensor.backward = backward  # type: ignore[method-assign, assignment]
            for number, pair in enumerate(zip(raw, trainer.strategy._lightning_optimizers)):
                for optimizer in (pair[1], *with_inner(pair[0])):
                    stack.enter_context(replaced(vars(optimizer), "step", self._step(number)))
                    stack.enter_context(replaced(vars(optimizer), "zero_grad", self._zero_grad(number)))
            for config in trainer.lr_scheduler_configs:
                stack.enter_context(replaced(vars(config.scheduler), "step", lambda *args, **kwargs: None))
            # A scaler of the user's own: the loss is measured as it is, and the scale does not grow.
            scaling: dict[str, Any] = {
                "scale": lambda scaler, outputs: outputs,
                "unscale_": lambda scaler, optimizer: None,
                "step": lambda scaler, optimizer, *args, **kwargs: optimizer.step(*args, **kwargs),
                "update": lambda scaler, new_scale=None: None,
            }
            stack.enter_context(patch.multiple(GradScaler, **scaling))
            yield

    def _hand(self, loss: Tensor, gradient: Tensor | None, inputs: Any, frame: Any) -> None:
        reached = {id(leaf) for leaf in leaves(loss)}
        if inputs is not None:
            reached &= {id(x) for x in ([inputs] if isinstance(inputs, Tensor) else inputs)}
        names = [name for name, value in frame.f_locals.items() if value is loss and name.isidentifier()]
        if gradient is not None:
            loss = (loss * gradient).sum()
        self.losses.append(HandedLoss(loss, names[0] if names else f"loss {len(self.losses) + 1}"))
        for number, parameters in enumerate(self._parameters):
            if all(p.grad is None for p in parameters):  # by zero_grad of a module
                self._since_zero[number] = []
            # If all are frozen, because θ is another player's, their graph is not there to tell.
            if any(id(p) in reached for p in parameters) or not any(p.requires_grad for p in parameters):
                self._since_zero.setdefault(number, []).append(len(self.losses) - 1)
            for p in parameters:  # the step may read the gradients
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
        if self._stop_after is not None and len(self.losses) >= self._stop_after:
            raise StopStep

    def _step(self, number: int) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            result = closure() if closure is not None else None
            self.used_by.setdefault(number, tuple(self._since_zero.get(number, ())))
            return result

        return step

    def _zero_grad(self, number: int) -> Callable[..., None]:
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            self._since_zero[number] = []

        return zero_grad

    def losses_for(self, theta: Collection[Tensor]) -> tuple[int, ...] | str:
        """Return the numbers of the losses whose sum trains the parameters θ, or why they are not known.

        They are those that the optimizers of θ step on; if none of these steps, as while gradients accumulate, the only
        loss that reaches θ and that no other optimizer steps on.
        """
        ids = {id(p) for p in theta}
        owners = [number for number, mine in enumerate(self._parameters) if any(id(p) in ids for p in mine)]
        used = {self.used_by[number] for number in owners if self.used_by.get(number)}
        if used and len(owners) > 1 and any(number not in self.used_by for number in owners):
            return f"only some of the optimizers of these parameters step in this batch, on {self._describe()}"
        if not used:
            others = {i for numbers in self.used_by.values() for i in numbers}
            free = [(i, each.loss) for i, each in enumerate(self.losses) if i not in others]
            used = {(i,) for i, loss in free if any(id(leaf) in ids for leaf in leaves(loss))}
        if len(used) == 1:
            return used.pop()
        if not used:
            return "training_step hands no loss of these parameters to manual_backward"
        return f"training_step hands {len(self.losses)} losses to manual_backward: {self._describe()}"

    def _describe(self) -> str:
        texts = []
        for i, each in enumerate(self.losses):
            numbers = [str(number) for number, used in self.used_by.items() if i in used]
            texts.append(f"{each.name} (optimizer {' and '.join(numbers)})" if numbers else each.name)
        return ", ".join(texts)


def with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Iterate over an optimizer and those that it wraps, as SAM and Lookahead do."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from with_inner(value)


@contextmanager
def replaced(attributes: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute inside the block; remove it afterwards if the instance had none."""
    had, before = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            attributes.pop(name, None)
