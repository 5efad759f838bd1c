"""KeyboardInterrupt inside of a measurement: Lightning ends the fit, and everything is as it was before we began."""

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from torch.nn.utils import parametrize

from lightning_normtheory.callbacks import (
    HessianTopEigenvalue,
    NormTheory,
    NTKLeastEigenvalue,
    RademacherBound,
    RSCRatio,
)
from lightning_normtheory.measuring import progress, same_bits

from reliability.faults.fault_runs import Comparison, Run, fit
from reliability.outcome import Outcome
from support.lit import Classifier

EPOCH = 1
ORIGINAL_WEIGHT_NORM = torch._weight_norm


def machinery() -> dict[str, Any]:
    """What a measurement switches in torch, python and our own modules while it lasts."""
    return {
        "torch._weight_norm": torch._weight_norm is ORIGINAL_WEIGHT_NORM,
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "func transforms": torch._C._functorch.peek_interpreter_stack() is None,
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "parametrize cache": (parametrize._cache_enabled, dict(parametrize._cache)),
        "compiler stance": _stance(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warnings": list(warnings.filters),
        "ticks": progress._listener.get(),
    }


def _stance() -> str:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo._stance.stance if dynamo is not None and hasattr(dynamo, "_stance") else "default"


def attached(run: Run) -> dict[str, Any]:
    """What a measurement hangs on the model and the trainer while it lasts."""
    modules = list(run.model.modules())
    return {
        "muted": [name for module in modules for name in ("log", "log_dict") if name in vars(module)],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in modules],
        "parameter hooks": [len(p._backward_hooks or ()) for p in run.model.parameters()],
        "loggers": [type(logger) for logger in run.trainer.loggers],
        "forward": [name for module in modules for name in ("forward",) if name in vars(module)],
        "stage": str(run.trainer.state.stage),
        "should stop": run.trainer.should_stop,
        "requires_grad": [p.requires_grad for p in run.model.parameters()],
    }


def interrupt():
    raise KeyboardInterrupt


def terminate():
    signal.raise_signal(signal.SIGTERM)


class Stop(pl.Callback):
    """The interrupt of a bare run, where ours would measure."""

    def __init__(self, how):
        self.how = how

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == EPOCH:
            self.how()


class Armed(pl.Callback):
    """Counts calls in the measurement of one epoch, and interrupts at one of them. Before ours."""

    def __init__(self, at=None, how=interrupt):
        self.at, self.count, self.armed, self.how = at, 0, False, how

    def on_train_epoch_end(self, trainer, pl_module):
        self.armed = trainer.current_epoch == EPOCH

    def on_exception(self, trainer, pl_module, exception):
        self.armed = False

    def __call__(self, step=""):
        if self.armed:
            self.count += 1
            if self.count == self.at:
                self.how()


def interrupted(folder: Path, ours: Callable[[], pl.Callback], net: str, interrupts: Armed, way: Callable) -> Outcome:
    check = Comparison()
    module = partial(Classifier, net)
    logger = {"logger": pl.loggers.CSVLogger(folder)}
    before = machinery()
    with way(interrupts):
        watched = fit(folder / "watched", [ours()], module=module, users=[interrupts], **logger)
    after = machinery()
    for name, value in before.items():
        check.equal(f"{name} after the interrupt", after[name], value)
    bare = interrupted_bare(net, interrupts.how)
    check.equal("whether the fit was interrupted", type(watched.error), type(bare.error))
    check.holds("the fit was not interrupted", isinstance(bare.error, SystemExit))
    check.training(watched, bare)
    for name, value in attached(bare).items():
        check.equal(f"{name} of the model or trainer", attached(watched)[name], value)
    check.equal("the epochs in the file", sorted(watched._replace(folder=folder).rows), [0])
    saved = watched.save()
    check.readable(saved)
    again = fit(folder / "again", [ours()], module=module, checkpoint=saved)
    check.equal("the end of the resumed fit", again.error, None)
    check.holds("the resumed fit measures its last epoch", 2 in again.rows)
    return check.outcome


@cache
def interrupted_bare(net: str, how: Callable[[], None]) -> Run:
    folder = Path(mkdtemp())
    return fit(folder, [Stop(how)], module=partial(Classifier, net), logger=pl.loggers.CSVLogger(folder))


@cache
def number_of_ticks(ours: Callable[[], pl.Callback], net: str) -> int:
    counter = Armed()
    with progress.listening(counter):
        fit(Path(mkdtemp()), [ours()], module=partial(Classifier, net), users=[counter], epochs=EPOCH + 1)
    return counter.count


def at_tick(
    folder: Path, ours: Callable[[], pl.Callback], part: float, net: str = "wn", how: Callable[[], None] = interrupt
) -> Outcome:
    """After a part of the signs of life of one measurement."""
    at = 1 + round(part * (number_of_ticks(ours, net) - 1))
    return interrupted(folder, ours, net, Armed(at, how), progress.listening)


@contextmanager
def while_restoring(interrupts: Armed) -> Iterator[None]:
    """A real signal while the tensors of the model are put back."""
    original = same_bits._compare

    def compare(a: torch.Tensor, b: torch.Tensor) -> bool | torch.Tensor:
        try:
            interrupts()
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        return original(a, b)

    with mock.patch.object(same_bits, "_compare", compare):
        yield


def at_restored_tensor(folder: Path, number: int, how: Callable[[], None] = interrupt) -> Outcome:
    return interrupted(folder, RSCRatio, "bn", Armed(number, how), while_restoring)


CASES: dict[str, Callable[[Path], Outcome]] = {
    **{
        f"interrupt in NormTheory after {part:.0%} of a measurement, {net}": partial(
            at_tick, ours=NormTheory, part=part, net=net
        )
        for net in ("wn", "bn")
        for part in (0.0, 0.3, 0.6, 0.9, 1.0)
    },
    **{
        f"interrupt in {ours.__name__} after {part:.0%} of a measurement": partial(at_tick, ours=ours, part=part)
        for ours in (RSCRatio, HessianTopEigenvalue, NTKLeastEigenvalue, RademacherBound)
        for part in (0.0, 0.5, 1.0)
    },
    **{
        f"SIGTERM in NormTheory after {part:.0%} of a measurement, {net}": partial(
            at_tick, ours=NormTheory, part=part, net=net, how=terminate
        )
        for net in ("wn", "bn")
        for part in (0.0, 0.3, 0.6, 0.9, 1.0)
    },
    "SIGTERM while tensor 2 is put back": partial(at_restored_tensor, number=2, how=terminate),
    **{
        f"interrupt while tensor {number} is put back": partial(at_restored_tensor, number=number)
        for number in (1, 2, 5, 9)
    },
}
