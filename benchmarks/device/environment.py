"""Which devices there are, versions, flags, and what a device can do."""

import importlib.metadata
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lightning_normtheory.linalg.arithmetic import operand_eps, without_tf32
from lightning_normtheory.linalg.precision import device_for_float64

__all__ = ["choose", "environment"]

_PACKAGES = ("torch", "pytorch-lightning", "lightning-normtheory")


def choose(name: str | None) -> torch.device:
    """Return the device of this name, or the accelerator of this machine.

    Raises:
        ValueError: if there is none, in one line.
    """
    counts = {"cpu": 1, **_accelerators()}
    if name is None:
        if len(counts) == 1:
            raise ValueError("torch finds no accelerator on this machine. --device cpu compares the CPU with itself.")
        return torch.device(list(counts)[1])
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or (device.index or 0) >= counts.get(device.type, 0):
        there = [kind if kind == "cpu" else f"{kind}:{i}" for kind, count in counts.items() for i in range(count)]
        raise ValueError(f"--device: expected a device of this machine ({', '.join(there)}), got {name!r}.")
    return device


def _accelerators() -> dict[str, int]:
    """Return the number of devices by type, without the types that have none."""
    if hasattr(torch, "accelerator"):  # from torch 2.6 on
        kind = torch.accelerator.current_accelerator()
        counts = {kind.type: torch.accelerator.device_count()} if kind else {}
    else:
        counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    return {kind: count for kind, count in counts.items() if count}


def environment(device: torch.device) -> dict[str, str]:
    """Return what an issue needs to know, by name."""
    module = torch.get_device_module(device)
    found = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "commit": _commit(),
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES),
        "system": f"Python {platform.python_version()}, {platform.platform()}",
        "device": f"{device}: {_device_name(module, device)}",
        **(_cuda() if device.type == "cuda" else {}),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float64": "yes" if device_for_float64(device) == device else "no",
        "ε of float32 operands": _operands(device),
    }
    return {name: value for name, value in found.items() if value != "unknown"}


def _cuda() -> dict[str, str]:
    cudnn = torch.backends.cudnn
    return {
        "libraries": f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, cuDNN {cudnn.version()}",
        "driver": _or_unknown(lambda: torch._C._cuda_getDriverVersion()),
        "flags": f"cudnn.enabled {cudnn.enabled}, benchmark {cudnn.benchmark}, deterministic {cudnn.deterministic};"
        f" TF32 for convolutions {_or_unknown(lambda: cudnn.allow_tf32)};"
        f" matrices {_or_unknown(torch.get_float32_matmul_precision)}",
    }


def _commit() -> str:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        said = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()


def _operands(device: torch.device) -> str:
    as_set = operand_eps(device, torch.float32)
    if not as_set:
        return _in_words(as_set)
    with without_tf32():
        least = operand_eps(device, torch.float32)
    return f"{_in_words(as_set)} as the flags are, {_in_words(least)} with TF32 switched off"


def _in_words(eps: float) -> str:
    return {0.0: "2^-23 (float32)", 2.0**-10: "2^-10 (TF32)", 2.0**-7: "2^-7 (bfloat16)"}.get(eps, f"{eps:.2g}")


def _device_name(module: Any, device: torch.device) -> str:
    return (
        platform.processor() or platform.machine()
        if device.type == "cpu"
        else _or_unknown(lambda: module.get_device_name(device))
    )


def _or_unknown(ask: Any) -> str:
    try:
        return str(ask())
    except (AttributeError, RuntimeError):
        return "unknown"
