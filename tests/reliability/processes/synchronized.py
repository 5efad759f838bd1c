"""The kernels of SyncBatchNorm, which torch has for CUDA only, on the stand-in."""

import torch
from torch import Tensor

__all__ = ["register"]

LIBRARY = torch.library.Library("aten", "IMPL")


def register() -> None:
    for kernel in (
        *(batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt),
        *(batch_norm_backward_reduce, batch_norm_backward_elemt),
    ):
        LIBRARY.impl(kernel.__name__, kernel, "PrivateUse1")


def axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def wide(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x, eps):
    return x.mean(axes(x)), (x.var(axes(x), correction=0) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    n, share = counts.sum(), (counts / counts.sum()).view(-1, 1)
    mean = (share * means).sum(0)
    variance = (share * (invstds**-2 - eps + means**2)).sum(0) - mean**2
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * n / (n - 1), momentum)
    return mean, (variance + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    return (x - wide(mean, x)) * wide(invstd * weight, x) + wide(bias, x)


def batch_norm_backward_reduce(gradient, x, mean, invstd, weight, input_g, weight_g, bias_g):
    total = gradient.sum(axes(x))
    along = (gradient * (x - wide(mean, x))).sum(axes(x))
    return total, along, along * invstd, total.clone()


def batch_norm_backward_elemt(gradient, x, mean, invstd, weight, total, along, counts):
    n = counts.sum()
    rest = gradient - wide(total / n, x) - (x - wide(mean, x)) * wide(invstd**2 * along / n, x)
    return rest * wide(invstd * weight, x)
