"""`RSCMetric`: sums for the RSC ratio, over batches and processes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_normtheory.measuring.workspace import empty, give_back
from lightning_normtheory.rsc import RSC, add_gradients, flat_gradients, rsc_from_sums
from lightning_normtheory.rsc_train import add_to_table, spread_table

__all__ = ["RSCMetric"]


class RSCMetric(Metric):
    """Accumulates the arguments of `rsc_from_sums`. Every state is a sum, so that processes add up to one exact number.

    Args:
        sizes: the sizes of the trainable parameters.
        groups: the number of groups of batches in ``table``, from which `rsc_of_set` estimates; 0: no table.
        options: of `torchmetrics.Metric`.

    Example:
        >>> metric = RSCMetric(sizes=[1])
        >>> metric.update(1, torch.tensor(1.0), [torch.tensor([2.0])], 1, [torch.tensor([1.0])])
        >>> metric.update(1, torch.tensor(4.0), [torch.tensor([12.0])], 1, [torch.tensor([3.0])])
        >>> metric.compute()
        RSC(loss=2.5, grad_norm_sq=49.0, ratio=19.6, mean_predictor_grad_norm_sq=4.0)
    """

    full_state_update = False
    samples: Tensor
    outputs: Tensor
    loss_sum: Tensor
    loss_gradient_sum: Tensor
    predictor_gradient_sum: Tensor
    table: Tensor
    cosine: float
    spread: Tensor | None = None

    def __init__(self, sizes: Sequence[int], groups: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self._sizes = list(sizes)
        # The gradients get their size with the first batch: a metric copies its initial states.
        for name in ("samples", "outputs", "loss_sum", "loss_gradient_sum", "predictor_gradient_sum"):
            self.add_state(name, torch.zeros((), dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")
        self._groups = groups
        if groups:
            self.add_state("table", spread_table(groups), dist_reduce_fx="sum")

    def update(
        self,
        samples: int,
        loss: Tensor,
        loss_gradients: Sequence[Tensor | None],
        outputs: float,
        predictor_gradients: Sequence[Tensor | None],
        group: int = 0,
    ) -> None:
        """Add a batch: its mean loss with the gradients, and those of the sum of its outputs, by parameter."""
        if self.loss_gradient_sum.dim() == 0:
            self.loss_gradient_sum, self.predictor_gradient_sum = (
                empty(sum(self._sizes), dtype=torch.float64, device=self.device).zero_() for _ in range(2)
            )
        self.samples += samples
        self.outputs += outputs
        self.loss_sum += samples * loss.detach().to(self.device)
        loss_gradients = flat_gradients(loss_gradients, self.device)
        predictor_gradients = flat_gradients(predictor_gradients, self.device)
        loss_square = add_gradients(self.loss_gradient_sum, loss_gradients, samples, self._sizes)
        predictor_square = add_gradients(self.predictor_gradient_sum, predictor_gradients, 1, self._sizes)
        if self._groups:
            add_to_table(
                self.table[group],
                self._sizes,
                samples=samples,
                loss=loss,
                loss_gradients=loss_gradients,
                loss_square=loss_square,
                outputs=outputs,
                predictor_gradients=predictor_gradients,
                predictor_square=predictor_square,
            )

    def release(self) -> None:
        """Free the sums: a metric is in reference cycles."""
        give_back(self.loss_gradient_sum, self.predictor_gradient_sum)
        self.reset()

    def compute(self) -> RSC:
        """Return the result over all batches and processes, and set ``cosine``, that between both gradients, and
        ``spread``, the table."""
        self.spread = self.table if self._groups else None
        norms = self.loss_gradient_sum.norm() * self.predictor_gradient_sum.norm()
        self.cosine = float(self.loss_gradient_sum @ self.predictor_gradient_sum / norms)
        return rsc_from_sums(
            float(self.samples),
            float(self.loss_sum),
            self.loss_gradient_sum,
            float(self.outputs),
            self.predictor_gradient_sum,
        )
