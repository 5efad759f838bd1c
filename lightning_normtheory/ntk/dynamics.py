"""Compare a tangent kernel with an earlier one and with the labels."""

import math

from torch import Tensor

__all__ = ["kernel_change", "label_alignment"]


def kernel_change(kernel: Tensor, reference: Tensor) -> float:
    """‖K − K₀‖_F/‖K₀‖_F, the relative change of the kernel.

    Its maximum over the training is ΔK of LIN, Section C, which is small if the model trains like a linear one.

    Example:
        >>> import torch
        >>> kernel_change(torch.tensor([[3.0]]), torch.tensor([[2.0]]))
        0.5
    """
    if kernel.shape != reference.shape:
        raise ValueError(
            f"Expected two kernels of the same samples and outputs, but got {tuple(kernel.shape)} and "
            f"{tuple(reference.shape)}."
        )
    return float((kernel - reference).norm() / reference.norm())


def label_alignment(kernel: Tensor, targets: Tensor) -> float:
    """⟨K_c, (YYᵀ)_c⟩/(‖K_c‖‖(YYᵀ)_c‖), the cosine between the kernel and that of the labels.

    Both are centered: A_c = CAC with C = I − 11ᵀ/n. It is 1 if the kernel depends on the classes alone, near 0 if it is
    unrelated to them; NaN if all labels are the same.

    Args:
        kernel: (n, n).
        targets: classes (n,), as integers, or values (n, …).

    Example:
        >>> import torch
        >>> classes = torch.tensor([0, 0, 1])
        >>> round(label_alignment((classes[:, None] == classes).double(), classes), 6)
        1.0
    """
    if kernel.shape != (len(targets), len(targets)):
        raise ValueError(
            f"Expected a kernel (n, n) for n = {len(targets)} targets, but got {tuple(kernel.shape)}. For a "
            "TangentKernel of all outputs, pass its `over_samples`."
        )
    y = targets.to(kernel.device)
    if y.dim() == 1 and not y.is_floating_point():
        y = (y[:, None] == y.unique()).to(kernel.dtype)
    y = y.reshape(len(y), -1).to(kernel.dtype)
    y = y - y.mean(0)
    centered = kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()
    aligned = float((y * (centered @ y)).sum())
    scale = float(centered.norm()) * float((y.t() @ y).norm())
    return aligned / scale if scale > 0 else math.nan
