"""A training on the CPU and on a device: the same metrics, the same values within the arithmetic, nothing disturbed."""

import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory

from reliability.devices.device_models import TABLE
from reliability.devices.tolerances import agree
from reliability.outcome import Outcome
from support.accelerator import KINDS, run
from support.accelerator.trainer import arguments
from support.lit import rows, trainer
from support.neutral_cases import Recorder, freeze, generators, state

CASES = [f"{kind}: {name}" for kind in KINDS for name in TABLE]


def outcome(case: str, folder: Path) -> Outcome:
    """Compare a training on a device with the CPU, in the process that has the device."""
    kind, _, name = case.partition(": ")
    return Outcome(*run(kind, compare, name))


def compare(name: str, used: Callable[[], list] | None = None) -> tuple[int, tuple[str, ...]]:
    """Return how many values were compared, and those that differ, in words."""
    used = used or callbacks
    measured, _ = fit(name, used())
    _, bare = fit(name, [], **arguments())
    try:
        found, watched = fit(name, used(), **arguments())
        wrong = [] if watched == bare else ["the training differs from the one without callbacks"]
    except Exception as error:  # noqa: BLE001  # whatever ends the training is a difference
        found, wrong = {}, [f"the training ends with {type(error).__name__}: {error}"]
    values = [(epoch, metric) for epoch, row in measured.items() for metric in row]
    for epoch, metric in values:
        expected, given = measured[epoch][metric], found.get(epoch, {}).get(metric)
        if (words := difference(metric, expected, given, measured[epoch], found.get(epoch, {}))) is not None:
            wrong.append(f"epoch {epoch}, {words}")
    new = sorted({metric for row in found.values() for metric in row} - {metric for _, metric in values})
    return len(values) + 1, (*wrong, *(f"{metric} is not logged on the CPU" for metric in new))


def difference(metric: str, expected: float | None, given: float | None, cpu: dict, device: dict) -> str | None:
    """Say what differs, if anything does."""
    if expected is None or not math.isfinite(expected):
        same = given is not None and str(given) == str(expected)  # also NaN
    else:
        same = given is not None and agree(metric, cpu, device)
    return None if same else f"{metric} is {given} instead of {expected}"


def callbacks() -> list:
    """`NormTheory` with all its options, and the predictor's Hessian, which it has not."""
    probe = {"probe": 16, "max_hvps": 40}
    return [
        NormTheory(**probe, trace_hvps=12, ntk_samples=6),
        HessianTopEigenvalue(**probe, predictor_samples=2, prefix="other"),
    ]


def fit(name: str, used: list, **device: Any) -> tuple[dict[int, dict], list]:
    """Train for two epochs; return what was logged by epoch, and all that callbacks must not change."""
    row, recorder = TABLE[name], DeviceRecorder()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        lightning = trainer([*used, recorder], max_epochs=2, default_root_dir=folder, num_sanity_val_steps=0, **device)
        module = row.module()
        lightning.fit(module, row.loader(), row.loader(seed=1))
        recorder.note(state(lightning, module), generators())
        return rows(folder) if used else {}, recorder.seen


class DeviceRecorder(Recorder):
    """A `Recorder` that also sees the generator of the device."""

    def note(self, *values: Any) -> None:
        self.seen.append(freeze((*values, torch.get_device_module("standin").get_rng_state())))
