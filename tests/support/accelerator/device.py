"""The device of this process, and what tests ask of it."""

import contextlib
import ctypes
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from support.accelerator import autocast, cudnn, mps

__all__ = ["DEVICE", "failing_allocation", "kind", "memory_limit", "peak", "reset", "start", "synchronizations", "tf32"]

NAME = "standin"
_kind: str | None = None


def start(kind: str, path: Path) -> None:
    """Give this process a device of this kind, for good: torch keeps what it found when an operation was first used."""
    global _kind, DEVICE
    torch.ops.load_library(path)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(kind))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    torch.nn.Module._apply = _keep_ties(torch.nn.Module._apply)
    torch.ops.standin.become(kind == "mps")
    DEVICE = torch.device(NAME, 0)
    autocast.register()
    {"cuda": cudnn, "mps": mps}[kind].register()
    _kind = kind


def reset() -> None:
    """Start as a new process would, but for what was imported."""
    torch.ops.standin.revive()
    torch.ops.standin.set_limit(0)
    torch.ops.standin.fail_at(0)
    torch.ops.standin.tf32(False, False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark = True, False
    torch.set_default_device(None)
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def kind() -> str:
    return _kind


@contextlib.contextmanager
def memory_limit(further: int) -> Iterator[None]:
    """Inside, at most this number of bytes can be allocated beyond those that are now."""
    torch.ops.standin.set_limit(torch.ops.standin.memory()[0] + further)
    try:
        yield
    finally:
        torch.ops.standin.set_limit(0)


@contextlib.contextmanager
def failing_allocation(which: int) -> Iterator[list[bool]]:
    """Inside, one allocation fails: the first for 1. The list says afterwards whether there were so many."""
    happened: list[bool] = []
    torch.ops.standin.fail_at(which)
    try:
        yield happened
    finally:
        happened.append(torch.ops.standin.fail_at(0) == 0)


def peak(function: Callable[[], Any]) -> int:
    """Return how many bytes more than at its begin were allocated at some moment of a call."""
    torch.ops.standin.reset_peak()
    before = torch.ops.standin.memory()[0]
    function()
    return torch.ops.standin.memory()[1] - before


@contextlib.contextmanager
def tf32(matmul: bool = True, conv: bool = True) -> Iterator[None]:
    """Inside, products round their operands to 10 bits of mantissa, as Ampere and later do; torch's flags say so."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv
    torch.ops.standin.tf32(matmul, conv)
    try:
        yield
    finally:
        torch.ops.standin.tf32(False, False)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


class synchronizations:
    """Count where the host waits for the device: copies, ``.item()``, and operations whose shape depends on values.

    Attributes:
        counts: how often, by kind of wait.
        places: how often, by kind and the innermost line of a file whose path has ``inside`` in it.
    """

    def __init__(self, inside: str | None = None) -> None:
        self.inside, self.places = inside, Counter()

    def __enter__(self) -> "synchronizations":
        torch.ops.standin.reset_counts()
        if self.inside is not None:
            self._heard = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._hear)
            torch.ops.standin.listen(ctypes.cast(self._heard, ctypes.c_void_p).value)
        return self

    def __exit__(self, *_: object) -> None:
        torch.ops.standin.listen(0)
        self.counts = dict(torch.ops.standin.counts())

    def _hear(self, what: bytes) -> None:
        frames = [frame for frame in traceback.extract_stack() if self.inside in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "elsewhere"
        self.places[f"{what.decode()}, {where}"] += 1


def _keep_ties(apply: Callable) -> Callable:
    """Keep tied parameters tied when a module is moved, as on CUDA: for such a device torch makes new parameters."""

    def moved(module: torch.nn.Module, *arguments: Any, **keywords: Any) -> torch.nn.Module:
        places: dict[int, list] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                places.setdefault(id(parameter), []).append((part._parameters, name))
        apply(module, *arguments, **keywords)
        for (first, name), *others in places.values():
            for parameters, other in others:
                parameters[other] = first[name]
        return module

    return moved


def _device_module(kind: str) -> ModuleType:
    """What ``torch.cuda`` or ``torch.mps`` is for the real ones."""
    own = torch.ops.standin
    found = ModuleType(f"torch.{NAME}")
    vars(found).update(
        is_available=lambda: True,
        device_count=lambda: 1,
        synchronize=lambda device=None: torch.accelerator.synchronize(),
        manual_seed=own.seed,
        get_rng_state=lambda device=None: own.get_rng_state(),
        set_rng_state=lambda state, device=None: own.set_rng_state(state.cpu()),
        empty_cache=lambda: None,
        # What torch asks of every device of this sort:
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        manual_seed_all=own.seed,
        current_device=lambda: 0,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        **{"cuda": _cuda_functions, "mps": _mps_functions}[kind](),
    )
    return found


def _mps_functions() -> dict[str, Callable]:
    memory = torch.ops.standin.memory
    return {
        "current_allocated_memory": lambda: memory()[0],
        "driver_allocated_memory": lambda: memory()[0],
        "recommended_max_memory": lambda: memory()[3],
    }


def _cuda_functions() -> dict[str, Callable]:
    own = torch.ops.standin
    return {
        "is_initialized": lambda: True,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "get_rng_state_all": lambda: [own.get_rng_state()],
        "set_rng_state_all": lambda states: [own.set_rng_state(state.cpu()) for state in states],
        "memory_allocated": lambda device=None: own.memory()[0],
        "max_memory_allocated": lambda device=None: own.memory()[1],
        "memory_reserved": lambda device=None: own.memory()[0],
        "max_memory_reserved": lambda device=None: own.memory()[1],
        "reset_peak_memory_stats": lambda device=None: own.reset_peak(),
        "mem_get_info": lambda device=None: tuple(own.memory()[2:]),
    }
