"""A step of plain training with Cockpit's full set of instruments, as its documentation says, and one without it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.timing import timed, unit

__all__ = ["step_times"]

_TRACKED, _PLAIN = 2, 50


def step_times(build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> tuple[float, list[float]]:
    """Seconds of a step without instruments, and of some with all of them."""
    from backpack import extend
    from cockpit import Cockpit
    from cockpit.utils.configuration import configuration
    from cockpit.utils.schedules import linear

    plain = _Plain(build(), x, y)
    bare = unit(plain.step, _PLAIN)
    model, loss = extend(build()), extend(nn.CrossEntropyLoss())
    each_loss, optimizer = nn.CrossEntropyLoss(reduction="none"), SGD(model.parameters(), 0.01)
    cockpit = Cockpit(model.parameters(), quantities=configuration("full", track_schedule=linear(1)))

    def step(number: int) -> None:
        optimizer.zero_grad()
        output = model(x)
        mean = loss(output, y)
        info: dict[str, Any] = {"batch_size": len(x), "individual_losses": each_loss(output, y), "loss": mean}
        with cockpit(number, info={**info, "optimizer": optimizer}):
            mean.backward(create_graph=cockpit.create_graph(number))
        optimizer.step()

    return bare, [timed(lambda number=number: step(number)) for number in range(_TRACKED)]


class _Plain:
    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self._model, self._x, self._y = model, x, y
        self._optimizer = SGD(model.parameters(), 0.01)

    def step(self) -> None:
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._model(self._x), self._y).backward()
        self._optimizer.step()
