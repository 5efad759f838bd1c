"""The report: environment, values, neutrality, memory, cost, synchronizations."""

import gc
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.device.compare import compare, not_finite
from benchmarks.device.environment import environment
from benchmarks.device.trainings import BATCH, CLASSES, SAMPLES, TRAININGS, Fitted, Where, callbacks, fit, on
from lightning_normtheory.linalg.arithmetic import operand_eps
from lightning_normtheory.ntk.empirical import empirical_ntk

__all__ = ["report"]

CPU = torch.device("cpu")
Limited = Callable[[int], AbstractContextManager[None]]
Show = Callable[[str], None]


def report(
    device: torch.device,
    *,
    names: Sequence[str] = tuple(TRAININGS),
    width: int = 256,
    where: Where | None = None,
    limited: Limited | None = None,
    limits: Sequence[int] = (8, 12, 20, 40),
    show: Show = print,
) -> int:
    """Show the report in Markdown, part by part; return the number of differences.

    Args:
        names: of the trainings.
        width: of the networks.
        where: makes the arguments of a trainer that choose the device; ``None``: from the device's name.
        limited: limits the memory inside to some more bytes; ``None``: as torch can for this device.
        limits: in units of the model's size.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS is not deterministic
    where = where or on(device)
    begin = time.perf_counter()
    show(f"### lightning-normtheory on {device}\n")
    for name, value in environment(device).items():
        show(f"- {name}: {value}")
    parts = [
        partial(_values, device, names, width, where, show),
        partial(_neutrality, names, width, where, show),
        partial(_kernel_passes, device, width, show),
        partial(_costs, device, names, width, where, show),
        partial(_little_memory, device, width, where, limited or _limit_of(device), limits, show),
    ]
    differences = sum(_differences(part, show) for part in parts)
    show(f"\n**{differences} differences**, in {time.perf_counter() - begin:.0f} s.")
    return differences


def _differences(part: Callable[[], int], show: Show) -> int:
    """Run a part; an error counts as a difference."""
    try:
        return part()
    except Exception:  # noqa: BLE001  # the other parts are still of interest
        show(f"\n```\n{traceback.format_exc(limit=-4)}```")
        return 1


def _values(device: torch.device, names: Sequence[str], width: int, where: Where, show: Show) -> int:
    show("\n#### Values: CPU against device\n")
    show("| training | metrics | finite on one side only | differ | largest difference, in tolerances |")
    show("|---|---|---|---|---|")
    eps, found = operand_eps(device, torch.float32), []
    for name in names:
        both = [fit(name, width, each, callbacks()) for each in (on(CPU), where)]
        result = compare(both[0].metrics, both[1].metrics, eps, random="noise" in name)
        largest, metric = result.largest
        counts = f"{result.compared} | {len(result.missing)} | {len(result.different)}"
        show(f"| {name} | {counts} | {f'{largest:.2g} ({metric})' if largest else '0'} |")
        found += [f"{name}: {line}" for line in (*result.missing, *result.different)]
        found += [f"{name} says: {line}" for line in dict.fromkeys(both[1].said) if result.missing and "NaN" in line]
    if any("noise" in name for name in names):
        show("\nThe noise differs on a device: with it, only whether metrics are finite is compared.")
    for line in found:
        show(f"\n- {line}" if line is found[0] else f"- {line}")
    return sum(" says: " not in line for line in found)


def _neutrality(names: Sequence[str], width: int, where: Where, show: Show) -> int:
    """Train without, again without, and with the callbacks. Only a device that repeats itself can be compared."""
    show("\n#### Neutrality: weights, buffers and generators after two epochs, bit by bit\n")
    show("| training | twice without the callbacks | without and with them |\n|---|---|---|")
    wrong = 0
    for name in names:
        twice, same = _same_twice(name, width, where)
        note = ""
        if not twice:
            before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
            torch.use_deterministic_algorithms(True, warn_only=True)
            twice, same = _same_twice(name, width, where)
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            note = ", with deterministic algorithms"
        wrong += twice and not same
        ours = ("equal" if same else "DIFFERENT") if twice else "cannot be told"
        show(f"| {name} | {'equal' if twice else 'different'}{note} | {ours} |")
    return wrong


def _same_twice(name: str, width: int, where: Where) -> tuple[bool, bool]:
    bare, again, ours = (fit(name, width, where, each, epochs=2) for each in ([], [], callbacks()))
    return bare.same_bits(again), bare.same_bits(ours)


def _kernel_passes(device: torch.device, width: int, show: Show) -> int:
    (passes, found), (on_cpu, _) = (_kernel(each, width) for each in (device, CPU))
    alone = ", ".join(found.one_by_one) or "none"
    show(
        f"\nKernel of the BatchNorm conv net, {BATCH} samples, {CLASSES} outputs, in {str(found.dtype).split('.')[1]}:"
    )
    show(
        f"{passes} calls of autograd on the device, {on_cpu} on the CPU; gradients computed sample by sample: {alone}."
    )
    return 0


def _kernel(device: torch.device, width: int) -> tuple[int, Any]:
    """Return the number of calls of autograd too."""
    make, inputs = TRAININGS["BatchNorm conv net"]
    torch.manual_seed(0)
    net, x = make(width).net.eval().to(device), inputs()[:BATCH].to(device)
    passes = 0
    differentiate = torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return differentiate(*args, **kwargs)

    torch.autograd.grad = counted
    try:
        found = empirical_ntk(net, x)
    finally:
        torch.autograd.grad = differentiate
    return passes, found


def _costs(device: torch.device, names: Sequence[str], width: int, where: Where, show: Show) -> int:
    show("\n#### Cost\n")
    show("Peaks are in units of the model's size. G is one gradient on the probe. Waits are those of the host.")
    show("The callbacks are NormTheory, with the trace, and HessianTopEigenvalue, by power iteration and with the")
    show("norm of the predictor's Hessian; the measurement whose time is shown is NormTheory's.")
    show("These networks are small: the fixed part of a measurement, up to 64 MB for graphs and 128 MB for kernels,")
    show("outweighs them; docs/benchmarks.md has the cost on real ones.\n")
    show("| training | size | peak without | peak with | measurement | waits without | waits with |")
    show("|---|---|---|---|---|---|---|")
    for name in names:
        size = _size(name, width)
        cells = []
        for ours in ([], callbacks()):
            found, peak, waits = _watched(device, partial(fit, name, width, where, ours))
            cells += ["?" if peak is None else f"{peak / size:.1f}", "?" if waits is None else str(waits)]
        units = found.metrics.get("normtheory/seconds", math.nan) / _gradient(name, width, device)
        bare, waits_bare, peak_ours, waits_ours = cells
        show(f"| {name} | {size / 2**20:.2g} MB | {bare} | {peak_ours} | {units:.0f} G | {waits_bare} | {waits_ours} |")
    if unknown := _unknown(device):
        show(f"\n?: on {device.type}, torch does not tell {' or '.join(unknown)}.")
    return 0


def _unknown(device: torch.device) -> list[str]:
    """What `_watched` cannot find, in words."""
    module, unknown = torch.get_device_module(device), []
    if not hasattr(module, "max_memory_allocated"):
        now = hasattr(module, "current_allocated_memory")  # MPS
        unknown.append("the peak of memory" + (" (only what is allocated at the moment)" if now else ""))
    if not hasattr(module, "set_sync_debug_mode"):
        unknown.append("how often the host waits")
    return unknown


def _size(name: str, width: int) -> int:
    """The bytes of the parameters."""
    return sum(parameter.nbytes for parameter in TRAININGS[name][0](width).parameters())


def _watched(device: torch.device, action: Callable[[], Fitted]) -> tuple[Fitted, int | None, int | None]:
    """Return the peak of allocated bytes and the number of host synchronizations too, where torch can count them."""
    module = torch.get_device_module(device)
    peaks, waits = hasattr(module, "max_memory_allocated"), hasattr(module, "set_sync_debug_mode")
    if peaks:
        module.reset_peak_memory_stats()
    if waits:
        module.set_sync_debug_mode("warn")
    try:
        found = action()
    finally:
        if waits:
            module.set_sync_debug_mode("default")
    peak = module.max_memory_allocated() if peaks else None
    return found, peak, sum("synchronizing" in line for line in found.said) if waits else None


def _gradient(name: str, width: int, device: torch.device) -> float:
    """Seconds of one gradient on the probe, the least of five."""
    make, inputs = TRAININGS[name]
    training, x, y = make(width).to(device), inputs().to(device), torch.randint(CLASSES, (SAMPLES,)).to(device)
    wait = getattr(torch.get_device_module(device), "synchronize", lambda: None)
    taken = []
    for _ in range(5):
        wait()
        begin = time.perf_counter()
        for some in range(0, SAMPLES, BATCH):
            batch = x[some : some + BATCH], y[some : some + BATCH]
            torch.autograd.grad(training.training_step(batch, 0), list(training.parameters()))
        wait()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _little_memory(
    device: torch.device,
    width: int,
    where: Where,
    limited: Limited | None,
    limits: Sequence[int],
    show: Show,
) -> int:
    """With some multiples of the model's size free: does the training go on as without the callbacks?"""
    show("\n#### Little memory\n")
    if limited is None:
        show(f"torch cannot limit the memory of {device.type}.")
        return 0
    name = "WeightNorm MLP"
    width = max(2 * width, 512)  # so that the model is larger than its batches and kernels
    size = _size(name, width)
    bare, free = fit(name, width, where, []), fit(name, width, where, callbacks())
    show(f"{name} of {size / 2**20:.2g} MB.\n\n| free | training | metrics that are finite |\n|---|---|---|")
    wrong = 0
    for times in limits:
        try:
            with limited(times * size):
                fit(name, width, where, [])
        except Exception as error:  # noqa: BLE001
            show(f"| {times} × | does not fit by itself ({type(error).__name__}) | |")
            continue
        try:
            with limited(times * size):
                found = fit(name, width, where, callbacks())
        except Exception as error:  # noqa: BLE001
            wrong += 1
            show(f"| {times} × | ENDS with {type(error).__name__} | |")
            continue
        same = found.same_bits(bare)
        wrong += not same
        missing, total = not_finite(found.metrics, free.metrics), sum(map(math.isfinite, free.metrics.values()))
        finite = f"{total - len(missing)} of {total}" + (f", without {_few(missing)}" if missing else "")
        show(f"| {times} × | {'as without the callbacks' if same else 'DIFFERENT'} | {finite} |")
    return wrong


def _few(names: Sequence[str]) -> str:
    """Name the first metrics, without those that belong to another one, such as its residual."""
    shown = [name for name in names if not any(name != other and name.startswith(other) for other in names)][:6]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _limit_of(device: torch.device) -> Limited | None:
    """Limit the memory by the fraction that torch lets a process use."""
    module = torch.get_device_module(device)
    known = hasattr(module, "mem_get_info") or hasattr(module, "recommended_max_memory")
    if not known or not hasattr(module, "set_per_process_memory_fraction"):
        return None

    @contextmanager
    def limited(more: int) -> Iterator[None]:
        gc.collect()
        module.empty_cache()
        if hasattr(module, "mem_get_info"):
            used, total = module.memory_reserved(), module.mem_get_info()[1]
        else:  # MPS
            used, total = module.driver_allocated_memory(), module.recommended_max_memory()
        module.set_per_process_memory_fraction(min((used + more) / total, 1.0))
        try:
            yield
        finally:
            module.set_per_process_memory_fraction(1.0)

    return limited
