"""Autocast on the stand-in: products in the lower precision, losses and norms in float32, as on CUDA and MPS."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register"]

LOWER = (
    *("linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "baddbmm", "addbmm"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
)
SINGLE = (
    *("softmax.int", "log_softmax.int", "layer_norm", "group_norm", "norm.Scalar", "exp", "log", "pow.Tensor_Scalar"),
    *("nll_loss", "nll_loss_nd", "cross_entropy_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"),
    *("binary_cross_entropy_with_logits", "cumsum", "prod", "sum", "sum.dim_IntList", "softplus", "rsqrt"),
)
LIBRARY = torch.library.Library("aten", "IMPL")  # unregisters when it is deleted


def register() -> None:
    for names, dtype in ((LOWER, lambda: torch.get_autocast_dtype("standin")), (SINGLE, lambda: torch.float32)):
        for name in names:
            base, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, base), overload or "default")
            LIBRARY.impl(name, _casting(operation, dtype), "AutocastPrivateUse1")


def _casting(operation: Callable, dtype: Callable[[], torch.dtype]) -> Callable:
    def cast(value: Any) -> Any:
        wanted = isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == "standin"
        return value.to(dtype()) if wanted and value.dtype != torch.float64 else value

    def call(*arguments: Any, **keywords: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operation(*map(cast, arguments), **{name: cast(value) for name, value in keywords.items()})

    return call
