"""The measured generalization gap: the loss on validation samples minus the loss on training samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_normtheory.callbacks.measurement.function import RETURNS, MeasuredFunction
from lightning_normtheory.callbacks.measurement.passes import FORWARD
from lightning_normtheory.callbacks.samples.batch_contents import describe
from lightning_normtheory.callbacks.samples.probe import ProbeBatch
from lightning_normtheory.callbacks.samples.validation_probe import ValidationProbe
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.record.wording import first_lines

__all__ = ["Gap", "GapMetric", "measure_gap"]


class Gap(NamedTuple):
    """The measured generalization gap.

    Attributes:
        train_loss: the mean loss of the training probe.
        validation_loss: the mean loss of the validation probe.
        gap: ``validation_loss − train_loss``.
    """

    train_loss: float
    validation_loss: float
    gap: float


class GapMetric(Metric):
    """Accumulates the losses of both probes. Every state is a sum, so that processes add up to one exact number.

    Args:
        options: of `torchmetrics.Metric`.

    Example:
        >>> metric = GapMetric()
        >>> metric.update(3, torch.tensor(1.0), validation=False)
        >>> metric.update(1, torch.tensor(5.0), validation=False)
        >>> metric.update(2, torch.tensor(4.0), validation=True)
        >>> metric.compute()
        Gap(train_loss=2.0, validation_loss=4.0, gap=2.0)
    """

    full_state_update = False
    samples: Tensor
    loss_sums: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("samples", "loss_sums"):  # of the training and of the validation probe
            self.add_state(name, torch.zeros(2, dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")

    def update(self, samples: int, loss: Tensor, *, validation: bool) -> None:
        """Add a batch with its mean loss; ``samples`` is 0 for a batch that only keeps the processes in step."""
        if samples == 0:
            return  # 0 · ∞ would be NaN
        self.samples[int(validation)] += samples
        self.loss_sums[int(validation)] += samples * loss.detach().to(self.device)

    def compute(self) -> Gap:
        """Return the gap over all batches, of this process and of the other ones."""
        train, validation = (self.loss_sums / self.samples).tolist()
        return Gap(train, validation, validation - train)


def measure_gap(
    function: MeasuredFunction, probe: ValidationProbe | None, *, train_loss: float | None = None
) -> Gap | None:
    """Measure both losses with the function that predicts: BatchNorm uses its running statistics where it has some,
    unless the callback's ``batch_stats`` says otherwise.

    Args:
        probe: the validation samples; ``None``, or without batches, while the run has no validation data.
        train_loss: the loss of the training probe with the function that predicts, if it is known.

    Raises:
        ValueError: that names the remedy, if the loss cannot be computed on a validation batch.
    """
    if probe is None or probe.collecting or not probe.batches(0, 1):
        return None
    metric = GapMetric(**function.summing).to(function.sum_device)
    unseen = probe.batches(function.processes.rank, function.processes.count)
    with function.measuring(independent=True), function.without_graph():
        for batch in function.batches if train_loss is None else ():
            tick("batch")
            loss = function.loss_of(batch)
            metric.update(batch.samples if batch.counts else 0, loss, validation=False)
        for batch in unseen:
            tick("batch")
            loss = _validation_loss(function, batch)
            metric.update(batch.samples if batch.counts else 0, loss, validation=True)
    gap = metric.compute()
    return gap if train_loss is None else Gap(train_loss, gap.validation_loss, gap.validation_loss - train_loss)


def _validation_loss(function: MeasuredFunction, batch: ProbeBatch) -> Tensor:
    try:
        with function.fresh(batch):
            with _validating(function.trainer):
                data = function.on_device(batch)
            function.passes.add(FORWARD, batch.samples)
            return function.loss_on(data, batch.index)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = first_lines(f"{type(error).__name__}: {error}", lines=1)
        raise ValueError(
            f"The loss of a validation batch ({describe(batch.data)}) could not be computed: {reason}\nIf validation "
            "batches are unlike training batches, pass loss=, a function of the module and a batch of either kind that "
            f"returns {RETURNS['loss']}."
        ) from error


@contextmanager
def _validating(trainer: Trainer) -> Iterator[None]:
    """Set the trainer's stage to validation: transfer hooks that augment ask for it."""
    stage = trainer.state.stage
    trainer.validating = True
    try:
        yield
    finally:
        trainer.state.stage = stage
