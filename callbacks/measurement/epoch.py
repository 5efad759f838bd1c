"""What a diagnostic sees of a run: every quantity of the function that is trained, once an epoch."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_normtheory.callbacks.measurement.function import RETURNS, BatchFunction, default_predict
from lightning_normtheory.callbacks.measurement.probe import ProbeBatch, count_training_samples, describe
from lightning_normtheory.callbacks.measurement.rsc_metric import RSCMetric
from lightning_normtheory.callbacks.measurement.theory import ExaminedFunction
from lightning_normtheory.callbacks.measurement.validation_probe import Gap, GapMetric, ValidationProbe
from lightning_normtheory.hessian.operator import LossHessian, Memory
from lightning_normtheory.hessian.predictor import predictor_hessian
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.model.checks import trainable_parameters
from lightning_normtheory.ntk.empirical import tangent_kernel_of_batches
from lightning_normtheory.ntk.rank import fingerprint_samples
from lightning_normtheory.ntk.result import Outputs, TangentKernel
from lightning_normtheory.rsc import RSC, gradients_of, rsc_of_one_batch

__all__ = ["View"]

T = TypeVar("T")
# A matrix for each layer: no more than this.
_SAMPLES_WITH_LAYERS = 512


class View(ExaminedFunction):
    """One epoch's look at the run. Every quantity is computed once, on first use, and leaves nothing behind.

    The arguments that are not listed are those of `MeasuredFunction`.

    Args:
        validation: the samples that the generalization gap is measured against, if there are any.
        known: what was found out about the samples and the loss in an earlier epoch, and does not change.
    """

    def __init__(self, *args: Any, validation: ValidationProbe | None, known: dict[str, Any]) -> None:
        super().__init__(*args, known=known)
        self._validation = validation
        self._kernels: dict[tuple[int, Outputs], TangentKernel] = {}

    @cached_property
    def loss(self) -> float:
        """The mean loss of the probe, without a gradient."""
        return self._retry_smaller(self._measure_loss)

    def _measure_loss(self) -> float:
        sums = torch.zeros(2, dtype=torch.float64)
        with self._measuring(), torch.no_grad():
            for batch in self._batches:
                tick("batch")
                loss = float(self._loss_of(batch))
                if batch.counts:
                    sums += batch.samples * torch.tensor([loss, 1.0], dtype=torch.float64)
        total, samples = self.processes.sum(sums).tolist()
        return total / samples

    @cached_property
    def rsc(self) -> RSC:
        """R = ‖∇L‖²/L and ‖ḡ‖² of the probe."""
        return self._retry_smaller(self._measure_rsc)

    def _measure_rsc(self) -> RSC:
        parameters = trainable_parameters(self.model)
        metric = RSCMetric([p.numel() for p in parameters.values()], **self._summing).to(self._sum_device)
        alone = len(self._batches) == 1 and self.processes.count == 1
        with self._measuring():
            for batch in self._batches:
                tick("batch")
                loss = self._loss_of(batch)
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
    def _summing(self) -> dict[str, Any]:
        """How torchmetrics adds up over the processes: it stacks a list of their states, here their sum, and adds."""
        return {
            "distributed_available_fn": lambda: self.processes.count > 1,
            "dist_sync_fn": lambda values, group=None: [self.processes.sum(values)],
        }

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
        metric = GapMetric(**self._summing).to(self._sum_device)
        unseen = probe.batches(self.processes.rank, self.processes.count)
        with self._measuring(independent=True), torch.no_grad():
            for batch in self._batches:
                tick("batch")
                loss = self._loss_of(batch)
                metric.update(batch.samples if batch.counts else 0, loss, validation=False)
            for batch in unseen:
                tick("batch")
                loss = self._validation_loss_of(batch)
                metric.update(batch.samples if batch.counts else 0, loss, validation=True)
        return metric.compute()

    def _validation_loss_of(self, batch: ProbeBatch) -> Tensor:
        self._reset_buffers()
        try:
            with self._validating():
                data = self._on_device(batch)
            return self._loss_on(data, batch.index)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(
                f"The loss of a validation batch ({describe(batch.data)}) could not be computed: "
                f"{type(error).__name__}: {error}\nIf validation batches are unlike training batches, pass loss=, a "
                f"function of the module and a batch of either kind that returns {RETURNS['loss']}."
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
    def gradient_cosine(self) -> float:
        """cos(∇L, ḡ), κ of RSC for a step of gradient descent."""
        _ = self.rsc
        return self._cosine

    def with_hessian(self, measure: Callable[[LossHessian], T], memory: Memory) -> T:
        """What ``measure`` finds out about ∇²L of the probe; it must do the same in every process."""
        if memory == "high":
            try:
                return self.processes.run_on_all(partial(self._measure_hessian, measure, "high"))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        return self._retry_smaller(partial(self._measure_hessian, measure, "low"))

    def _measure_hessian(self, measure: Callable[[LossHessian], T], memory: Memory) -> T:
        def loss_of(batch: ProbeBatch) -> tuple[Tensor, int]:
            return self._loss_of(batch), batch.samples if batch.counts else 0

        losses = [partial(loss_of, batch) for batch in self._batches]
        with self._measuring():
            parameters = trainable_parameters(self.model)
            hessian = LossHessian(parameters, losses, memory=memory, processes=self.processes)
            try:
                return measure(hessian)
            finally:
                hessian.release()

    def tangent_kernel(self, samples: int, outputs: Outputs) -> TangentKernel:
        """Of the first samples of the probe. Every process runs all of them, a kernel is about pairs, and computes some
        of the rows."""
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
                    processes=self.processes,
                )
            self._kernels[key] = dataclasses.replace(
                found,
                one_by_one=tuple(name.removeprefix("module.") for name in found.one_by_one),
                layers={f"{name}.".removeprefix("module.").strip("."): x for name, x in found.layers.items()},
            )
        return self._kernels[key]

    def fingerprint(self, samples: int) -> int:
        """Of the first samples of the probe: other samples have another."""
        return fingerprint_samples(
            (SampleBatch(batch.data, batch.samples, asked).first, asked) for batch, asked in self._first(samples)
        )

    def _inputs(self, samples: int) -> list[SampleBatch] | None:
        """What the predictor sees of the first samples, where that is known: not the labels."""
        if self._predict is not default_predict:
            return None
        first = [(batch.data, batch.samples, asked) for batch, asked in self._first(samples)]
        return [SampleBatch(data[0] if isinstance(data, (tuple, list)) else data, n, asked) for data, n, asked in first]

    def predictor_hessian(self, samples: int, tol: float, max_hvps: int) -> tuple[float, float]:
        """max_i ‖∇²f(θ; x_i)‖₂ over the first samples of the probe, and its residual."""
        batch_stats = self._independent_stats
        largest = torch.zeros(2, dtype=torch.float64)
        with self._measuring():
            predictor = _Predictor(self.model, self._predict)
            for batch in self._batches:
                if not batch.counts or batch.first >= samples:
                    continue
                # The whole batch, not only the samples that are asked for: a BatchNorm may have its statistics.
                result = predictor_hessian(
                    predictor,
                    self._on_device(batch),
                    tol=tol,
                    max_hvps=max_hvps,
                    batch_stats=batch_stats,
                    first=samples - batch.first,
                )
                top = int(result.norms.argmax())
                found = torch.tensor([float(result.norms[top]), float(result.residuals[top])], dtype=torch.float64)
                largest = max(largest, found, key=lambda pair: float(pair[0]))
        return self._largest(largest)


class _Predictor(nn.Module):
    """A module whose forward pass is the user's predictor on a batch."""

    def __init__(self, module: nn.Module, predict: BatchFunction) -> None:
        super().__init__()
        self.module = module
        self._predict = predict

    def forward(self, batch: Any) -> Tensor:
        return self._predict(self.module, batch)
