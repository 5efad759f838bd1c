"""Versions, flags, and what the device can do."""

import importlib.metadata
import platform
from typing import Any

import torch

from lightning_normtheory.linalg.arithmetic import operand_eps, without_tf32
from lightning_normtheory.linalg.precision import device_for_float64

__all__ = ["environment"]

_PACKAGES = ("torch", "pytorch-lightning", "lightning-normtheory")


def environment(device: torch.device) -> dict[str, str]:
    """Return what an issue needs to know, by name."""
    module = torch.get_device_module(device)
    cudnn = torch.backends.cudnn
    found = {
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES),
        "system": f"Python {platform.python_version()}, {platform.platform()}",
        "device": f"{device}: {_device_name(module, device)}",
        "libraries": f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, cuDNN {cudnn.version()}",
        "driver": _or_unknown(lambda: torch._C._cuda_getDriverVersion()),
        "flags": f"cudnn.enabled {cudnn.enabled}, benchmark {cudnn.benchmark}, deterministic {cudnn.deterministic};"
        f" TF32 for convolutions {_or_unknown(lambda: cudnn.allow_tf32)};"
        f" matrices {_or_unknown(torch.get_float32_matmul_precision)};"
        f" deterministic algorithms {torch.are_deterministic_algorithms_enabled()}",
        "float64": "yes" if device_for_float64(device) == device else "no",
        "ε of float32 operands": _operands(device),
    }
    return {name: value for name, value in found.items() if value != "unknown"}


def _operands(device: torch.device) -> str:
    as_set = operand_eps(device, torch.float32)
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
