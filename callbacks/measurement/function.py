"""The function that a run trains, its loss and its outputs on the samples of the probe, measured without a trace."""

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
# What a function of the user's has to give, for messages.
RETURNS = {"loss": "the mean loss, a scalar tensor", "predict": "the outputs, a tensor (samples, outputs)"}
# How much the loss of a batch may differ from that of its halves, by rounding: a float32 loss errs by some 1e-6.
_SAME_LOSS = 1e-4


class MeasuredFunction:
    """Model, loss and predictor on the probe, in every process; what is done inside of `_measuring` leaves nothing.

    Args:
        loss: ``loss(module, batch)``, the mean loss of a batch; ``None``: the module's own `training_step`.
        predict: ``predict(module, batch)``, the outputs f of a batch; ``None``: ``module(x)``.
        batch_stats: ``True``: BatchNorm with the statistics of each probe batch, ``False``: with the running ones,
            ``None``: the first for loss and gradient, which is the function that is trained.
    """

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
        self._batches = probe.batches(trainer.global_rank, trainer.world_size)
        self._all_batches = probe.batches(0, 1)
        self._loss = loss
        self._predict = predict or default_predict
        self._batch_stats = batch_stats

    def _first(self, samples: int) -> list[tuple[ProbeBatch, int]]:
        """The batches that hold the first samples of the probe, and how many of them each."""
        return [
            (batch, min(batch.samples, samples - batch.first)) for batch in self._all_batches if batch.first < samples
        ]

    @property
    def _independent_stats(self) -> bool | None:
        """Where samples shall be independent: running statistics, wherever there are any."""
        tracked = all(layer.running_mean is not None for layer in batch_norm_layers(self.model).values())
        return self._batch_stats if self._batch_stats is not None or not tracked else False

    def try_out(self, *, loss: bool, outputs: bool) -> None:
        """Run the loss and the predictor, if they will be asked for, on the first batch, so that a mistake shows before
        an epoch is spent.

        Raises:
            ValueError: that names the remedy. Running out of memory is no mistake of the set-up: it is reported later.
        """
        trials: dict[str, Callable[[ProbeBatch], Any]] = {}
        if loss:
            trials["loss"] = lambda batch: require_graph(self._loss_of(batch), "a loss")
        if outputs:
            trials["predict"] = self._predict_on
        trainable_parameters(self.model)
        with self._measuring():
            for batch in self._batches[:1]:
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
    def _measuring(self, *, independent: bool = False) -> Iterator[None]:
        """Local work on the function that is measured; if it fails in one process, it fails in all.

        Without the agreement at the end, a process that failed would leave the others waiting in the next sum.

        Args:
            independent: whether samples shall be independent, see `_independent_stats`.
        """
        error: Exception | None = None
        batch_stats = self._independent_stats if independent else self._batch_stats
        # Also what a step may reach outside of the module. The optimizer's tensors change in its own step only.
        around = Snapshot([optimizer.param_groups for optimizer in self.trainer.optimizers], arrays=False)
        should_stop = self.trainer.should_stop
        try:
            with (
                muted(self.trainer, self.model),
                preserve_state(self.model, batch_stats=batch_stats, processes=self.processes) as self._reset_buffers,
                self.trainer.precision_plugin.forward_context(),
                torch.autocast(self.model.device.type, enabled=False),  # mixed precision has the weights in full
                torch.enable_grad(),
            ):
                yield
        except Exception as caught:  # noqa: BLE001  # handed on below, in every process
            error = caught
        finally:
            self.trainer.should_stop = should_stop
            around.restore()  # last: an interrupt that came meanwhile takes effect at its end
        self.processes.run_on_all(lambda: _hand_on(error))

    def _retry_smaller(self, measure: Callable[[], T]) -> T:
        """``measure()``; where it runs out of memory, once more with batches of half the size, as long as they can be
        halved. All processes do the same."""
        while True:
            try:
                return self.processes.run_on_all(measure)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)  # which holds on to what has to go
            if not self._halve_batches():
                raise failure

    def _halve_batches(self) -> bool:
        """Measure on batches of half the size from now on, or less, if the loss is a mean over samples that do not see
        each other. Whether it is shows in its value, on the largest batches for which there is memory."""
        larger = self._batches
        while True:
            smaller = [half for batch in larger for half in batch.halves()]
            if not self._all_agree(len(smaller) > len(larger)):
                return False
            smaller = self._pad_ranks(smaller)
            try:
                with self._measuring(), torch.no_grad():
                    same = self._is_mean_over_samples(larger, smaller)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                larger = smaller
                continue
            if not self._all_agree(same):
                return False
            self._batches = smaller
            return True

    def _pad_ranks(self, batches: list[ProbeBatch]) -> list[ProbeBatch]:
        """With as many batches as the process that has most, since a step may wait for those of the others."""
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
        """Over the samples of this process; the loss is also computed where it only keeps step."""
        losses = [(batch, float(self._loss_of(batch))) for batch in batches]
        return sum(batch.samples * loss for batch, loss in losses if batch.counts)

    def _all_agree(self, here: bool) -> bool:
        """Whether it is so in all processes."""
        return float(self.processes.sum(torch.tensor([float(not here)]))) == 0

    def _sum_of_parts(self, part: Callable[[], Tensor]) -> Tensor:
        """The sum over all processes of ``part()``; if it fails in one, it fails in all."""
        return self.processes.sum(self.processes.run_on_all(part))

    def _largest(self, pair: Tensor) -> tuple[float, float]:
        """The pair with the largest first entry over all processes."""
        pairs = torch.zeros(self.processes.count, 2, dtype=torch.float64)
        pairs[self.processes.rank] = pair
        pairs = self.processes.sum(pairs)
        largest = pairs[pairs[:, 0].argmax()]
        return float(largest[0]), float(largest[1])

    @property
    def _sum_device(self) -> torch.device:
        """Where sums in double precision can be kept."""
        return torch.device("cpu") if self.model.device.type == "mps" else self.model.device

    def _loss_of(self, batch: ProbeBatch) -> Tensor:
        self._reset_buffers()
        return self._loss_on(self._on_device(batch), batch.index)

    def _loss_on(self, data: Any, index: int) -> Tensor:
        loss = self._loss(self.model, data) if self._loss else training_step_loss(self.model, data, index)
        if not isinstance(loss, Tensor):
            raise TypeError(f"Expected the loss as a tensor, but got {describe(loss)}.")
        if loss.numel() != 1:
            raise ValueError(f"Expected a scalar loss, but got a tensor of shape {tuple(loss.shape)}.")
        return loss.reshape(())

    def _predict_on(self, batch: ProbeBatch) -> Tensor:
        self._reset_buffers()
        output = self._predict(self.model, self._on_device(batch))
        if not isinstance(output, Tensor):
            raise TypeError(f"Expected a tensor (samples, outputs), but got {describe(output)}.")
        if not output.is_floating_point() or output.dim() == 0:
            raise TypeError(
                f"Expected floating-point outputs (samples, outputs), but got {output.dtype} {describe(output)}."
            )
        return output

    def _on_device(self, batch: ProbeBatch) -> Any:
        # A copy: the user's hooks and steps may work in place, and the probe must stay as it is.
        data = copy.deepcopy(batch.data)
        if batch.transferred:
            return self.model.transfer_batch_to_device(data, self.model.device, 0)
        data = self.trainer.precision_plugin.convert_input(data)
        data = self.model._on_before_batch_transfer(data, dataloader_idx=0)
        return self.trainer.strategy.batch_to_device(data, dataloader_idx=0)


def _hand_on(error: Exception | None) -> None:
    if error is not None:
        raise error


def default_predict(module: LightningModule, batch: Any) -> Tensor:
    """f = ``module(x)``, where x is the batch itself or the first of a tuple or list.

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
    """The loss that the module's own `training_step` returns, regularizers included."""
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
