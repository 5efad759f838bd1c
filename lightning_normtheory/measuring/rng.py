"""Seed the global random generators inside a block, and restore them afterwards."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_normtheory.measuring.interrupts import uninterrupted

__all__ = ["isolated_rng"]


@contextmanager
def isolated_rng(seed: int = 0) -> Iterator[None]:
    """Seed python, numpy and torch, on all devices in use, inside the block, and restore their states afterwards.

    Random operations inside (an augmentation, a dropout that cannot be switched off) repeat exactly from call to call,
    and random numbers outside are the same as without the block.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(1)
        >>> with isolated_rng(7):
        ...     inside = torch.rand(2)
        >>> outside = torch.rand(2)
        >>> _ = torch.manual_seed(1)
        >>> torch.equal(outside, torch.rand(2))
        True
        >>> with isolated_rng(7):
        ...     torch.equal(inside, torch.rand(2))
        True
    """
    # numpy is no dependency: only a program that has loaded it has a state to keep.
    numpy_random = sys.modules.get("numpy.random")
    python_state = random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    torch_state = torch.random.get_rng_state()
    on_devices = [(module, _states(module)) for module in _device_modules()]
    try:
        random.seed(seed)
        if numpy_random is not None:
            numpy_random.seed(seed)
        torch.default_generator.manual_seed(seed)
        for module, _ in on_devices:
            _seed(module, seed)
        yield
    finally:
        with uninterrupted():
            random.setstate(python_state)
            if numpy_random is not None:
                numpy_random.set_state(numpy_state)
            torch.random.set_rng_state(torch_state)
            for module, states in on_devices:
                _restore(module, states)


def _device_modules() -> list[Any]:
    """Return the modules, such as torch.cuda, of the device types in use that have random generators."""
    modules: list[Any] = [getattr(torch, name) for name in _types_with_generators(len(vars(torch)))]
    # Asking a device that the program has not used would initialize it; some need no initialization.
    return [module for module in modules if getattr(module, "is_initialized", module.device_count)()]


@lru_cache(maxsize=1)
def _types_with_generators(attributes: int) -> list[str]:
    """Search the attributes of torch, where `torch.get_device_module` finds the module of every device type.

    Args:
        attributes: their number: a device type that is added later is one more.
    """
    return [
        name
        for name, module in list(vars(torch).items())
        if isinstance(module, ModuleType) and {"set_rng_state", "device_count"} <= vars(module).keys()
    ]


def _states(module: Any) -> list[Tensor]:
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state(*device) for device in _devices(module)]


def _restore(module: Any, states: list[Tensor]) -> None:
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(states)
        return
    for device, state in zip(_devices(module), states):
        module.set_rng_state(state, *device)


def _seed(module: Any, seed: int) -> None:
    if hasattr(module, "manual_seed_all"):
        module.manual_seed_all(seed)
        return
    for device in _devices(module):
        with module.device(*device) if device else nullcontext():
            module.manual_seed(seed)


def _devices(module: Any) -> list[tuple[int, ...]]:
    """Return the devices as arguments; none for a single one, since Apple's module does not count them."""
    count = module.device_count()
    return [()] if count == 1 else [(index,) for index in range(count)]
