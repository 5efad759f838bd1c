"""What a diagnostic sees of a run: the model, its loss and predictor, and the probe."""

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn

from lightning_normtheory.architecture import Operation, opaque
from lightning_normtheory.batchnorm_form import BatchNormForm, batchnorm_form, batchnorm_network
from lightning_normtheory.callbacks.batch_parts import batch_parts
from lightning_normtheory.callbacks.muted import muted
from lightning_normtheory.callbacks.probe import Probe, ProbeBatch, count_training_samples, describe
from lightning_normtheory.callbacks.rsc_metric import RSCMetric
from lightning_normtheory.callbacks.validation_probe import Gap, GapMetric, ValidationProbe
from lightning_normtheory.flat import FlatParameters
from lightning_normtheory.hessian import LossHessian, Memory
from lightning_normtheory.infinite_width import DGMForm, dgm_form
from lightning_normtheory.inputs import has_samples, require_graph, some_samples, trainable_parameters
from lightning_normtheory.kernel_measurement import tangent_kernel_of_batches
from lightning_normtheory.kernel_rank import fingerprint
from lightning_normtheory.known_losses import KnownLoss, as_targets, identify_loss, same_loss
from lightning_normtheory.layers import batch_norm_layers
from lightning_normtheory.predictor_hessian import predictor_hessian
from lightning_normtheory.recorded_forward import record_forward
from lightning_normtheory.rsc import RSC, gradients_of, rsc_of_one_batch
from lightning_normtheory.sample_batches import SampleBatch, joined
from lightning_normtheory.setting import Setting
from lightning_normtheory.snapshot import Snapshot
from lightning_normtheory.tangent_kernel import Outputs, TangentKernel
from lightning_normtheory.untouched import untouched

__all__ = ["BatchFunction", "FailedElsewhereError", "View", "default_predict", "training_step_loss"]

T = TypeVar("T")
BatchFunction = Callable[[Any, Any], Tensor]
# Samples on which the forward pass is watched.
_WATCHED = 4
# Batches, and samples of each, on which the loss is recognised.
_LOSS_BATCHES, _LOSS_SAMPLES = 4, 64
# A matrix for each layer: no more than this.
_SAMPLES_WITH_LAYERS = 512
_RETURNS = {"loss": "the mean loss, a scalar tensor", "predict": "the outputs, a tensor (samples, outputs)"}


class FailedElsewhereError(RuntimeError):
    """This process did its part, another one did not."""

    def __init__(self) -> None:
        super().__init__("The measurement failed in another process, which reports the reason.")


class View:
    """One epoch's look at the run. Every quantity is computed once, on first use, and leaves nothing behind.

    Args:
        loss: ``loss(module, batch)``, the mean loss of a batch; ``None``: the module's own `training_step`.
        predict: ``predict(module, batch)``, the outputs f of a batch; ``None``: ``module(x)``.
        batch_stats: ``True``: BatchNorm with the statistics of each probe batch, ``False``: with the running ones,
            ``None``: the first for loss and gradient, which is the function that is trained.
        validation: the samples that the generalization gap is measured against, if there are any.
        known: what was found out about the samples and the loss in an earlier epoch, and does not change.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        probe: Probe,
        loss: BatchFunction | None,
        predict: BatchFunction | None,
        batch_stats: bool | None,
        validation: ValidationProbe | None = None,
        known: dict[str, Any] | None = None,
    ) -> None:
        self.trainer = trainer
        self.model = pl_module
        self._batches = probe.batches(trainer.global_rank, trainer.world_size)
        self._all_batches = probe.batches(0, 1)
        self._validation = validation
        self._known: dict[str, Any] = {} if known is None else known
        self._kernels: dict[tuple[int, Outputs], TangentKernel] = {}
        self._loss = loss
        self._predict = predict or default_predict
        self._batch_stats = batch_stats

    @cached_property
    def loss(self) -> float:
        """The mean loss of the probe, without a gradient."""
        sums = torch.zeros(2, dtype=torch.float64)
        with self._measuring(), torch.no_grad():
            for index, batch in enumerate(self._batches):
                loss = float(self._loss_of(batch, index))
                if batch.counts:
                    sums += batch.samples * torch.tensor([loss, 1.0], dtype=torch.float64)
        total, samples = self._add_up(sums).tolist()
        return total / samples

    @cached_property
    def rsc(self) -> RSC:
        """R = ‖∇L‖²/L and ‖ḡ‖² of the probe."""
        parameters = trainable_parameters(self.model)
        metric = RSCMetric([p.numel() for p in parameters.values()]).to(self._sum_device)
        alone = len(self._batches) == 1 and self.trainer.world_size == 1
        with self._measuring():
            for index, batch in enumerate(self._batches):
                loss = self._loss_of(batch, index)
                loss_gradients = gradients_of(loss, parameters)
                output = self._predict_on(batch)
                predictor_gradients = gradients_of(output.sum(), parameters)
                if alone:  # nothing to add up
                    value = float(loss.detach())
                    result, self._cosine = rsc_of_one_batch(value, loss_gradients, output.numel(), predictor_gradients)
                elif batch.counts:
                    metric.update(batch.samples, loss, loss_gradients, output.numel(), predictor_gradients)
        if alone:
            return result
        if not any(batch.counts for batch in self._batches):  # fewer batches than processes: take part with nothing
            metric.update(0, torch.zeros(()), [], 0, [])
        result = metric.compute()
        self._cosine = metric.cosine
        return result

    @property
    def mean_loss(self) -> float:
        """The mean loss of the probe, from what is there already."""
        return self.rsc.loss if "rsc" in vars(self) else self.loss

    @property
    def training_samples(self) -> int | None:
        """n, the size of the training set; ``None`` where none is known, as of an iterable dataset."""
        return count_training_samples(self.trainer)

    @cached_property
    def generalization_gap(self) -> Gap | None:
        """The mean loss of the validation probe minus that of the training probe; ``None`` as long as the run has no
        validation data. Both with the function that predicts: BatchNorm with its running statistics, where it has some
        and the callback's ``batch_stats`` does not say otherwise.

        Raises:
            ValueError: that names the remedy, if the loss cannot be computed on a validation batch.
        """
        probe = self._validation
        if probe is None or probe.collecting or not probe.batches(0, 1):
            return None
        metric = GapMetric().to(self._sum_device)
        unseen = probe.batches(self.trainer.global_rank, self.trainer.world_size)
        with self._measuring(independent=True), torch.no_grad():
            for index, batch in enumerate(self._batches):
                loss = self._loss_of(batch, index)
                metric.update(batch.samples if batch.counts else 0, loss, validation=False)
            for index, batch in enumerate(unseen):
                loss = self._validation_loss_of(batch, index)
                metric.update(batch.samples if batch.counts else 0, loss, validation=True)
        return metric.compute()

    def _validation_loss_of(self, batch: ProbeBatch, index: int) -> Tensor:
        self._afresh()
        try:
            with self._validating():
                data = self._on_device(batch)
            return self._loss_on(data, index)
        except (torch.cuda.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise ValueError(
                f"The loss of a validation batch ({describe(batch.data)}) could not be computed: "
                f"{type(error).__name__}: {error}\nIf validation batches are unlike training batches, pass loss=, a "
                f"function of the module and a batch of either kind that returns {_RETURNS['loss']}."
            ) from error

    @contextmanager
    def _validating(self) -> Iterator[None]:
        """Transfer hooks that augment ask the trainer whether it trains."""
        stage = self.trainer.state.stage
        self.trainer.validating = True
        try:
            yield
        finally:
            self.trainer.state.stage = stage

    @property
    def _sum_device(self) -> torch.device:
        """Where sums in double precision can be kept."""
        return torch.device("cpu") if self.model.device.type == "mps" else self.model.device

    @property
    def gradient_cosine(self) -> float:
        """cos(∇L, ḡ), κ of RSC for a step of gradient descent."""
        _ = self.rsc
        return self._cosine

    @cached_property
    def setting(self) -> Setting:
        """What the theorems ask about: the structure of the network now, its samples and its loss."""
        with self._measuring(independent=True):
            output = self._record_forward()
            if "x_norms" not in self._known:
                self._known["x_norms"] = self._x_norms()
            loss = self._identify_loss()
            if "perturbed" not in self._known:
                self._known["perturbed"] = self._identify_loss_elsewhere()
        # What is one loss where it is and another elsewhere has a part that was zero by chance.
        elsewhere = self._known["perturbed"]
        loss = loss if isinstance(loss, str) else same_loss([loss, elsewhere])
        return Setting(output, self._known["x_norms"], loss, trainable_parameters(self.model))

    @property
    def plain_learning_rate(self) -> float | None:
        """η of plain gradient steps θ − η∇L with one η for all parameters; ``None`` for anything else."""
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in self.trainer.optimizers]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        plain = all(type(optimizer) is torch.optim.SGD for optimizer in optimizers) and not any(
            group["momentum"] or group["weight_decay"] or group["maximize"] for group in groups
        )
        if not plain or self.trainer.gradient_clip_val:
            return None
        moved = {id(p) for group in groups for p in group["params"]}
        if any(id(p) not in moved for p in trainable_parameters(self.model).values()):
            return None
        rates = {float(group["lr"]) for group in groups}
        return rates.pop() if len(rates) == 1 else None

    def _record_forward(self) -> Operation:
        """The steps of the forward pass, watched on the first samples of the probe."""
        batch = self._all_batches[0]
        watched = min(batch.samples, _WATCHED)
        parts = batch_parts(some_samples(self._on_device(batch), batch.samples, slice(watched)), watched)
        if parts is None:
            return opaque(f"the input is not the first of its batches, nor the only one ({describe(batch.data)})")

        def forward(x: Tensor) -> Tensor:
            self._afresh()
            return self._predict(self.model, parts.with_input(x))

        return record_forward(self.model, parts.x, forward)

    def _x_norms(self) -> tuple[float, float]:
        """The smallest and the largest norm of an input on the probe."""
        found = [batch_parts(self._on_device(batch), batch.samples) for batch in self._all_batches]
        norms = [parts.x.detach().double().flatten(1).norm(dim=1) for parts in found if parts is not None]
        together = torch.cat(norms) if len(norms) == len(found) else torch.tensor([math.nan])
        return float(together.min()), float(together.max())

    def _identify_loss(self) -> KnownLoss | str:
        """By its value on some samples of the first batches, at every measurement: it may change in training."""
        found = []
        for index, batch in enumerate(self._all_batches[:_LOSS_BATCHES]):
            n = min(batch.samples, _LOSS_SAMPLES)
            data = some_samples(self._on_device(batch), batch.samples, slice(n))
            parts = batch_parts(data, n)
            if parts is None or parts.y is None:
                return "the loss is not known: its batches are no pairs of inputs and targets"
            with torch.no_grad():
                self._afresh()
                loss = float(self._loss_on(data, index))
                self._afresh()
                outputs = self._predict(self.model, data)
            found.append(identify_loss(loss, outputs.reshape(len(outputs), -1), parts.y.to(outputs.device)))
        return same_loss(found)

    def _identify_loss_elsewhere(self) -> KnownLoss | str:
        """The same with other parameters, which the end of the measurement takes back."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(0.1 * torch.randn_like(parameter) * parameter.abs().mean().clamp_min(0.1))
        return self._identify_loss()

    def with_hessian(self, measure: Callable[[LossHessian], T], memory: Memory) -> T:
        """What ``measure`` finds out about ∇²L of the probe; it must do the same in every process."""
        parameters = trainable_parameters(self.model)
        space = FlatParameters(parameters)

        def loss_of(index: int, batch: ProbeBatch) -> tuple[Tensor, int]:
            return self._loss_of(batch, index), batch.samples if batch.counts else 0

        def exchange(part: Callable[[], Tensor], size: int) -> Tensor:
            return self._sum_of_parts(part, torch.zeros(size, dtype=space.dtype, device=space.device))

        losses = [partial(loss_of, index, batch) for index, batch in enumerate(self._batches)]
        with self._measuring():
            hessian = LossHessian(parameters, losses, memory=memory, exchange=exchange)
            try:
                return measure(hessian)
            finally:
                hessian.release()

    def tangent_kernel(self, samples: int, outputs: Outputs) -> TangentKernel:
        """Of the first samples of the probe. Every process computes all of it: a kernel is about pairs of samples."""
        key = (samples, outputs)
        if key not in self._kernels:
            with self._measuring():
                found = tangent_kernel_of_batches(
                    _Predictor(self.model, self._predict),
                    [
                        SampleBatch(self._on_device(batch), batch.samples, asked)
                        for batch, asked in self._first(samples)
                    ],
                    outputs=outputs,
                    batch_stats=self._independent_stats,
                    layers=outputs != "full" and samples <= _SAMPLES_WITH_LAYERS,
                    seen=self._inputs(samples),
                )
            self._kernels[key] = dataclasses.replace(
                found,
                one_by_one=tuple(name.removeprefix("module.") for name in found.one_by_one),
                layers={f"{name}.".removeprefix("module.").strip("."): x for name, x in found.layers.items()},
            )
        return self._kernels[key]

    def targets(self, samples: int) -> Tensor | None:
        """The labels of the first samples of the probe, where its batches are pairs of tensors."""
        found = []
        for batch, asked in self._first(samples):
            data = batch.data
            if not isinstance(data, (tuple, list)) or len(data) < 2 or not has_samples(data[1], batch.samples):
                return None
            if data[1].dim() > 1 and not data[1].is_floating_point():
                return None  # labels of a sequence, or of pixels
            found.append(data[1][:asked])
        return torch.cat(found) if len({y.shape[1:] for y in found}) == 1 else None

    def dgm_form(self, samples: int) -> DGMForm | str:
        """The constants of DGM's theorems on the first samples of the probe, or why there are none."""
        inputs, outputs = [], []
        with self._measuring(), torch.no_grad():
            for batch, asked in self._first(samples):
                data = self._on_device(batch)
                x = data[0] if isinstance(data, (tuple, list)) else data
                if not has_samples(x, batch.samples):
                    return "its batches do not begin with the input"
                inputs.append(x[:asked].flatten(1))
                outputs.append(self._predict_on(batch)[:asked].reshape(asked, -1))
            if len({x.shape[1:] for x in inputs}) != 1 or outputs[0].shape[1] != 1:
                return "it has not exactly one output"
            return dgm_form(self.model, torch.cat(inputs), torch.cat(outputs))

    def batchnorm_form(self, samples: int) -> BatchNormForm | str:
        """The network of BN with its features on the first samples of the probe as one batch, or why it is none."""
        network = batchnorm_network(self.model)
        if isinstance(network, str):
            return network  # so that no other model has to take all samples at once
        with self._measuring(), torch.no_grad():
            first = self._first(samples)
            batches = [SampleBatch(self._on_device(batch), batch.samples, asked) for batch, asked in first]
            (data, n), *others = joined(batches)
            x = data[0] if isinstance(data, (tuple, list)) else data
            if others or not has_samples(x, n):
                return "its batches do not begin with the input, or are of different forms"
            self._afresh()
            network.norm.training = True  # the statistics of these samples; the flag is restored with all others
            return batchnorm_form(self.model, x.flatten(1), self._predict(self.model, data))

    @cached_property
    def target_matrix(self) -> Tensor | None:
        """The targets of the whole probe as numbers (n, k), where they are some: classes become unit vectors."""
        n = sum(batch.samples for batch in self._all_batches)
        targets = self.targets(n)
        return (
            None if targets is None else as_targets(torch.zeros(n, self.setting.outputs, dtype=torch.float64), targets)
        )

    def fingerprint(self, samples: int) -> int:
        """Of the first samples of the probe: other samples have another."""
        return fingerprint(
            (SampleBatch(batch.data, batch.samples, asked).first, asked) for batch, asked in self._first(samples)
        )

    def _inputs(self, samples: int) -> list[SampleBatch] | None:
        """What the predictor sees of the first samples, where that is known: not the labels."""
        if self._predict is not default_predict:
            return None
        first = [(batch.data, batch.samples, asked) for batch, asked in self._first(samples)]
        return [SampleBatch(data[0] if isinstance(data, (tuple, list)) else data, n, asked) for data, n, asked in first]

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

    def predictor_hessian(self, samples: int, tol: float, max_hvps: int) -> tuple[float, float]:
        """max_i ‖∇²f(θ; x_i)‖₂ over the first samples of the probe, and its residual."""
        batch_stats = self._independent_stats
        largest = torch.zeros(2, dtype=torch.float64)
        with self._measuring():
            predictor = _Predictor(self.model, self._predict)
            for batch in self._batches:
                if not batch.counts or batch.first >= samples:
                    continue
                data = some_samples(self._on_device(batch), batch.samples, slice(samples - batch.first))
                result = predictor_hessian(predictor, data, tol=tol, max_hvps=max_hvps, batch_stats=batch_stats)
                top = int(result.norms.argmax())
                found = torch.tensor([float(result.norms[top]), float(result.residuals[top])], dtype=torch.float64)
                largest = max(largest, found, key=lambda pair: float(pair[0]))
        return self._largest(largest)

    def _largest(self, pair: Tensor) -> tuple[float, float]:
        """The pair with the largest first entry over all processes."""
        if self.trainer.world_size > 1:
            gathered = self.trainer.strategy.all_gather(pair.to(self.model.device)).reshape(-1, 2)
            pair = gathered[gathered[:, 0].argmax()]
        return float(pair[0]), float(pair[1])

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
                            f"function of the module and a batch that returns {_RETURNS[argument]}."
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


class _Predictor(nn.Module):
    """A module whose forward pass is the user's predictor on a batch."""

    def __init__(self, module: nn.Module, predict: BatchFunction) -> None:
        super().__init__()
        self.module = module
        self._predict = predict

    def forward(self, batch: Any) -> Tensor:
        return self._predict(self.module, batch)


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
