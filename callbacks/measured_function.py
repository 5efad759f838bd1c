"""The function that a run trains, its loss and its outputs on the samples of the probe, measured without a trace."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from lightning_normtheory.callbacks.muted import muted
from lightning_normtheory.callbacks.probe import Probe, ProbeBatch, describe
from lightning_normtheory.inputs import require_graph, trainable_parameters
from lightning_normtheory.layers import batch_norm_layers
from lightning_normtheory.snapshot import Snapshot
from lightning_normtheory.untouched import untouched

__all__ = [
    "RETURNS",
    "BatchFunction",
    "FailedElsewhereError",
    "MeasuredFunction",
    "default_predict",
    "training_step_loss",
]

BatchFunction = Callable[[Any, Any], Tensor]
# What a function of the user's has to give, for messages.
RETURNS = {"loss": "the mean loss, a scalar tensor", "predict": "the outputs, a tensor (samples, outputs)"}


class FailedElsewhereError(RuntimeError):
    """This process did its part, another one did not."""

    def __init__(self) -> None:
        super().__init__("The measurement failed in another process, which reports the reason.")


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
            trials["loss"] = lambda batch: require_graph(self._loss_of(batch, 0), "a loss")
        if outputs:
            trials["predict"] = self._predict_on
        trainable_parameters(self.model)
        with self._measuring():
            for batch in self._batches[:1]:
                for argument, trial in trials.items():
                    try:
                        trial(batch)
                    except (torch.cuda.OutOfMemoryError, MemoryError):
                        return
                    except Exception as error:
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
                untouched(self.model, batch_stats=batch_stats) as self._afresh,
                self.trainer.precision_plugin.forward_context(),
                torch.autocast(self.model.device.type, enabled=False),  # mixed precision has the weights in full
                torch.enable_grad(),
            ):
                yield
        except Exception as caught:  # noqa: BLE001  # handed on below, in every process
            error = caught
        finally:
            around.restore()
            self.trainer.should_stop = should_stop
        failures = float(self._add_up(torch.tensor([float(error is not None)])))
        if error is not None:
            raise error
        if failures:
            raise FailedElsewhereError

    def _add_up(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.trainer.world_size == 1:
            return values
        return self.trainer.strategy.reduce(values.to(self.model.device), reduce_op="sum")

    def _sum_of_parts(self, part: Callable[[], Tensor], nothing: Tensor) -> Tensor:
        """The sum over all processes of ``part()``, of the form of ``nothing``; if it fails in one, it fails in all."""
        if self.trainer.world_size == 1:
            return part()
        error: Exception | None = None
        try:
            own = part()
        except Exception as caught:  # noqa: BLE001  # raised below, when the others know
            own, error = nothing, caught
        total = self._add_up(torch.cat([own, own.new_full((1,), float(error is not None))]))
        if error is not None:
            raise error
        if float(total[-1]):
            raise FailedElsewhereError
        return total[:-1]

    def _largest(self, pair: Tensor) -> tuple[float, float]:
        """The pair with the largest first entry over all processes."""
        if self.trainer.world_size > 1:
            gathered = self.trainer.strategy.all_gather(pair.to(self.model.device)).reshape(-1, 2)
            pair = gathered[gathered[:, 0].argmax()]
        return float(pair[0]), float(pair[1])

    @property
    def _sum_device(self) -> torch.device:
        """Where sums in double precision can be kept."""
        return torch.device("cpu") if self.model.device.type == "mps" else self.model.device

    def _loss_of(self, batch: ProbeBatch, index: int) -> Tensor:
        self._afresh()
        return self._loss_on(self._on_device(batch), index)

    def _loss_on(self, data: Any, index: int) -> Tensor:
        loss = self._loss(self.model, data) if self._loss else training_step_loss(self.model, data, index)
        if not isinstance(loss, Tensor):
            raise TypeError(f"Expected the loss as a tensor, but got {describe(loss)}.")
        if loss.numel() != 1:
            raise ValueError(f"Expected a scalar loss, but got a tensor of shape {tuple(loss.shape)}.")
        return loss.reshape(())

    def _predict_on(self, batch: ProbeBatch) -> Tensor:
        self._afresh()
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
    """The loss that the module's own `training_step` returns, regularisers included."""
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
