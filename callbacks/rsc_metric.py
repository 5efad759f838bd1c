"""The sums behind the RSC ratio, over batches and processes."""

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_normtheory.rsc import RSC, rsc_from_sums

__all__ = ["RSCMetric"]


class RSCMetric(Metric):
    """Accumulates what `rsc_from_sums` needs; every state is a sum, so processes add up to one exact number.

    Args:
        parameters: p, the number of trainable parameters.

    Example:
        >>> metric = RSCMetric(parameters=1)
        >>> metric.update(1, torch.tensor(1.0), torch.tensor([2.0]), 1, torch.tensor([1.0]))
        >>> metric.update(1, torch.tensor(4.0), torch.tensor([12.0]), 1, torch.tensor([3.0]))
        >>> metric.compute()
        RSC(loss=2.5, grad_norm_sq=49.0, ratio=19.6, mean_predictor_grad_norm_sq=4.0)
    """

    full_state_update = False
    samples: Tensor
    outputs: Tensor
    loss_sum: Tensor
    loss_gradient_sum: Tensor
    predictor_gradient_sum: Tensor
    cosine: float

    def __init__(self, parameters: int) -> None:
        super().__init__()
        for name in ("samples", "outputs", "loss_sum"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("loss_gradient_sum", "predictor_gradient_sum"):
            self.add_state(name, torch.zeros(parameters, dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self, samples: int, loss: Tensor, loss_gradient: Tensor, outputs: int, predictor_gradient_sum: Tensor
    ) -> None:
        """Add a batch: its mean loss and gradient, and the gradient of the sum of its outputs."""
        self.samples += samples
        self.outputs += outputs
        self.loss_sum += samples * loss.detach()
        self.loss_gradient_sum += samples * loss_gradient
        self.predictor_gradient_sum += predictor_gradient_sum

    def compute(self) -> RSC:
        """The result over everything added, here and in the other processes; then also ``cosine``, that of the angle
        between both gradients."""
        norms = self.loss_gradient_sum.norm() * self.predictor_gradient_sum.norm()
        self.cosine = float(self.loss_gradient_sum @ self.predictor_gradient_sum / norms)
        return rsc_from_sums(
            float(self.samples),
            float(self.loss_sum),
            self.loss_gradient_sum,
            float(self.outputs),
            self.predictor_gradient_sum,
        )
