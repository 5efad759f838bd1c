"""The empirical tangent kernel: network, plan, gradients, assembly, result."""

from lightning_normtheory.ntk.dynamics import kernel_change, label_alignment
from lightning_normtheory.ntk.empirical import empirical_ntk
from lightning_normtheory.ntk.result import TangentKernel

__all__ = ["TangentKernel", "empirical_ntk", "kernel_change", "label_alignment"]
