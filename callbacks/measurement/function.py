"""The trained function (model, loss and predictor) on the probe, evaluated without a trace in the run."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from lightning_normtheory.callbacks.measurement.probe import Probe, ProbeBatch, describe
from lightning_normtheory.callbacks.measurement.ranks import processes_of
from lightning_normtheory.callbacks.measurement.silence import muted
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.snapshot import Snapshot
from lightning_normtheory.model.checks import require_graph, trainable_parameters
from lightning_normtheory.model.layers import batch_norm_layers, with_batch_statistics

__all__ = [
    "RETURNS",
    "BatchFunction",
    "MeasuredFunction",
    "default_predict",
    "training_step_loss",
]

T = TypeVar("T")
BatchFunction = Callable[[Any, Any], Tensor]
# What a function passed by the user must return, for messages.
RETURNS = {"loss": "the mean loss, a scalar tensor", "predict": "the outputs, a tensor (samples, outputs)"}
# Relative difference between the loss of a batch and that of its halves that rounding explains: float32 errs by 1e-6.
_SAME_LOSS = 1e-4


class MeasuredFunction:
    """Model, loss and predictor on the probe, in every process. Code inside `measuring` leaves the run unchanged.

    Args:
        loss: ``loss(module, batch)``, the mean loss of a batch; ``None``: the module's own `training_step`.
        predict: ``predict(module, batch)``, the outputs f of a batch; ``None``: ``module(x)``.
        batch_stats: BatchNorm uses the statistics of each probe batch (``True``), its running statistics (``False``),
            or batch statistics for loss and gradient, which is the function that is trained (``None``).

    Attributes:
        batches: this process's batches of the probe; `retry_smaller` may halve them.
        all_batches: all batches of the probe, the same in every process.
        reset_buffers: inside `measuring`, restores the model's buffers before the next forward pass.
    """

    reset_buffers: Callable[[], None]

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        probe: Probe,
        loss: BatchFunction | None,
        predict: BatchFunction | None,
        batch_stats: bool | None,
    ) -> None:
        self.trainer = trainer
        self.model = pl_module
        self.processes = processes_of(trainer)
        self.batches = probe.batches(trainer.global_rank, trainer.world_size)
        self.all_batches = probe.batches(0, 1)
        self.predict = predict or default_predict
        self._loss = loss
        self._batch_stats = batch_stats

    def first(self, samples: int) -> list[tuple[ProbeBatch, int]]:
        """Return the batches that hold the first samples of the probe, each with its number of those samples."""
        return [
            (batch, min(batch.samples, samples - batch.first)) for batch in self.all_batches if batch.first < samples
        ]

    @property
    def independent_stats(self) -> bool | None:
        """``batch_stats`` for quantities of independent samples: running statistics where all layers keep them."""
        tracked = all(layer.running_mean is not None for layer in batch_norm_layers(self.model).values())
        return self._batch_stats if self._batch_stats is not None or not tracked else False

    def try_out(self, *, loss: bool, outputs: bool) -> None:
        """Run the loss and the predictor on the first batch, so that a mistake shows before an epoch is spent.

        Args:
            loss: whether a diagnostic needs the loss.
            outputs: whether a diagnostic needs the outputs.

        Raises:
            ValueError: that names the remedy. Running out of memory is no such mistake: it is reported later.
        """
        trials: dict[str, Callable[[ProbeBatch], Any]] = {}
        if loss:
            trials["loss"] = lambda batch: require_graph(self.loss_of(batch), "a loss")
        if outputs:
            trials["predict"] = self.outputs_of
        trainable_parameters(self.model)
        with self.measuring():
            for batch in self.batches[:1]:
                for argument, trial in trials.items():
                    try:
                        trial(batch)
                    except Exception as error:
                        if is_out_of_memory(error):
                            return
                        raise ValueError(
                            f"The {argument} of a probe batch ({describe(batch.data)}) could not be computed: "
                            f"{type(error).__name__}: {error}\nIf the model itself is right, pass {argument}=, a "
                            f"function of the module and a batch that returns {RETURNS[argument]}."
                        ) from error

    @contextmanager
    def measuring(self, *, independent: bool = False) -> Iterator[None]:
        """Set the model up for a measurement, and restore everything afterwards. A failure in one process fails in all.

        Without the exchange at the end, a process that failed would leave the other ones waiting in the next sum.

        Args:
            independent: whether samples must be independent, see `independent_stats`.
        """
        error: Exception | None = None
        batch_stats = self.independent_stats if independent else self._batch_stats
        # A step may also change these, outside the module. The optimizer's tensors change in its own step only.
        around = Snapshot([optimizer.param_groups for optimizer in self.trainer.optimizers], arrays=False)
        should_stop = self.trainer.should_stop
        try:
            with (
                muted(self.trainer, self.model),
                preserve_state(self.model, batch_stats=batch_stats, processes=self.processes) as self.reset_buffers,
                self.trainer.precision_plugin.forward_context(),
                torch.autocast(self.model.device.type, enabled=False),  # mixed precision has the weights in full
                torch.enable_grad(),
            ):
                yield
        except Exception as caught:  # noqa: BLE001  # raised below, in every process
            error = caught
        finally:
            self.trainer.should_stop = should_stop
            around.restore()  # last: a deferred interrupt takes effect at its end
        self.processes.run_on_all(lambda: _raise(error))

    # -- less memory ---------------------------------------------------------------------------------------------------

    def retry_smaller(self, measure: Callable[[], T]) -> T:
        """Return ``measure()``. While it runs out of memory, halve the batches and try again, in all processes."""
        while True:
            try:
                return self.processes.run_on_all(measure)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)  # the traceback would keep the memory in use
            if not self._halve_batches():
                raise failure

    def _halve_batches(self) -> bool:
        """Halve the batches, once or more, if the loss is a mean over independent samples. Its value tells, compared on
        the largest batches that fit into memory."""
        larger = self.batches
        while True:
            smaller = [half for batch in larger for half in batch.halves()]
            if not self._all_agree(len(smaller) > len(larger)):
                return False
            smaller = self._pad_ranks(smaller)
            try:
                with self.measuring(), torch.no_grad():
                    same = self._is_mean_over_samples(larger, smaller)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                larger = smaller
                continue
            if not self._all_agree(same):
                return False
            self.batches = smaller
            return True

    def _pad_ranks(self, batches: list[ProbeBatch]) -> list[ProbeBatch]:
        """Pad to the largest number of batches of any process, since a step may wait for the other processes."""
        numbers = torch.zeros(self.processes.count, dtype=torch.int64)
        numbers[self.processes.rank] = len(batches)
        missing = int(self.processes.sum(numbers).max()) - len(batches)
        return batches + [replace(batches[0], counts=False)] * missing

    def _is_mean_over_samples(self, larger: Sequence[ProbeBatch], smaller: Sequence[ProbeBatch]) -> bool:
        if with_batch_statistics(self.model):
            return False
        whole, parts = self._sum_of_losses(larger), self._sum_of_losses(smaller)
        return abs(whole - parts) <= _SAME_LOSS * abs(whole)

    def _sum_of_losses(self, batches: Sequence[ProbeBatch]) -> float:
        """Sum over this process's samples. Padding batches are computed, too, but do not count."""
        losses = [(batch, float(self.loss_of(batch))) for batch in batches]
        return sum(batch.samples * loss for batch, loss in losses if batch.counts)

    def _all_agree(self, here: bool) -> bool:
        return float(self.processes.sum(torch.tensor([float(not here)]))) == 0

    # -- one batch -----------------------------------------------------------------------------------------------------

    def loss_of(self, batch: ProbeBatch) -> Tensor:
        """Return the mean loss of a probe batch, a scalar; inside `measuring`."""
        self.reset_buffers()
        return self.loss_on(self.on_device(batch), batch.index)

    def loss_on(self, data: Any, index: int) -> Tensor:
        """Return the mean loss of a batch on the device; ``index`` is its ``batch_idx``."""
        loss = self._loss(self.model, data) if self._loss else training_step_loss(self.model, data, index)
        if not isinstance(loss, Tensor):
            raise TypeError(f"Expected the loss as a tensor, but got {describe(loss)}.")
        if loss.numel() != 1:
            raise ValueError(f"Expected a scalar loss, but got a tensor of shape {tuple(loss.shape)}.")
        return loss.reshape(())

    def outputs_of(self, batch: ProbeBatch) -> Tensor:
        """Return the outputs (samples, …) of a probe batch; inside `measuring`."""
        self.reset_buffers()
        output = self.predict(self.model, self.on_device(batch))
        if not isinstance(output, Tensor):
            raise TypeError(f"Expected a tensor (samples, outputs), but got {describe(output)}.")
        if not output.is_floating_point() or output.dim() == 0:
            raise TypeError(
                f"Expected floating-point outputs (samples, outputs), but got {output.dtype} {describe(output)}."
            )
        return output

    def on_device(self, batch: ProbeBatch) -> Any:
        """Return a copy of the batch on the model's device, after the module's transfer hooks."""
        # A copy: the user's hooks and steps may work in place, and the probe must not change.
        data = copy.deepcopy(batch.data)
        if batch.transferred:
            return self.model.transfer_batch_to_device(data, self.model.device, 0)
        data = self.trainer.precision_plugin.convert_input(data)
        data = self.model._on_before_batch_transfer(data, dataloader_idx=0)
        return self.trainer.strategy.batch_to_device(data, dataloader_idx=0)

    # -- sums over processes -------------------------------------------------------------------------------------------

    @property
    def sum_device(self) -> torch.device:
        """The device for sums in double precision, which MPS lacks."""
        return torch.device("cpu") if self.model.device.type == "mps" else self.model.device

    @property
    def summing(self) -> dict[str, Any]:
        """Options that let a torchmetrics metric sum over processes: it stacks a list of their states, here one sum."""
        return {
            "distributed_available_fn": lambda: self.processes.count > 1,
            "dist_sync_fn": lambda values, group=None: [self.processes.sum(values)],
        }


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def default_predict(module: LightningModule, batch: Any) -> Tensor:
    """Return f = ``module(x)``, where x is the batch itself or the first of a tuple or list.

    Raises:
        ValueError: for a batch of another form.
    """
    x = batch[0] if isinstance(batch, (tuple, list)) and len(batch) > 0 else batch
    if not isinstance(x, Tensor):
        raise ValueError(
            "Expected a batch that is the input tensor, or a tuple or list that begins with it, but got "
            f"{describe(batch)}. Say where the input is: predict=lambda module, batch: module(batch['image'])."
        )
    return module(x)


def training_step_loss(module: LightningModule, batch: Any, batch_idx: int) -> Tensor:
    """Return the loss of the module's own `training_step`, regularizers included."""
    names = inspect.signature(module.training_step).parameters
    variadic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in names.values())
    arguments = (batch, batch_idx) if len(names) > 1 or variadic else (batch,)  # as Lightning decides it
    result = module.training_step(*arguments)
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"Expected training_step to return the loss, or a dict with the key 'loss', but got {describe(result)}."
        )
    return loss
