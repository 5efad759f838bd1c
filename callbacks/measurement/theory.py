"""What the theorems ask about the function that is trained: its structure, samples, targets, loss and steps."""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_normtheory.architecture.operations import Operation, opaque
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.callbacks.measurement.batch_parts import batch_parts
from lightning_normtheory.callbacks.measurement.function import MeasuredFunction, default_predict
from lightning_normtheory.callbacks.measurement.probe import describe
from lightning_normtheory.model.batches import SampleBatch, joined
from lightning_normtheory.model.checks import has_samples, some_samples, trainable_parameters
from lightning_normtheory.theorems.losses import KnownLoss, as_targets, identify_loss, same_loss
from lightning_normtheory.theorems.papers.bn_form import BatchNormForm, batchnorm_form, batchnorm_network
from lightning_normtheory.theorems.papers.dgm import DGMForm, dgm_form
from lightning_normtheory.theorems.problem import Problem

__all__ = ["ExaminedFunction"]

# Samples on which the forward pass is watched.
_WATCHED = 4
# Batches, and samples of each, on which the loss is recognized.
_LOSS_BATCHES, _LOSS_SAMPLES = 4, 64


class ExaminedFunction(MeasuredFunction):
    """`MeasuredFunction` with what is known of it.

    Args:
        known: what was found out about the samples and the loss in an earlier epoch, and does not change.
    """

    def __init__(self, *args: Any, known: dict[str, Any]) -> None:
        super().__init__(*args)
        self._known = known

    @cached_property
    def problem(self) -> Problem:
        """What the theorems ask about: the structure of the network now, its samples and its loss."""
        with self._measuring(independent=True):
            output = self._record_forward()
            # What one bad epoch has hidden (a loss or an input that was not finite) is looked for again in the next.
            if not all(map(math.isfinite, self._known.get("x_norms", (math.nan,)))):
                self._known["x_norms"] = self._x_norms()
            loss = self._identify_loss()
            if isinstance(loss, KnownLoss) and "perturbed" not in self._known:
                elsewhere = self._identify_loss_elsewhere()
                # Plain, since it goes into the checkpoint.
                self._known["perturbed"] = elsewhere if isinstance(elsewhere, str) else tuple(elsewhere)
        # What is one loss where it is and another elsewhere has a part that was zero by chance.
        if isinstance(loss, KnownLoss):
            perturbed = self._known["perturbed"]
            loss = same_loss([loss, perturbed if isinstance(perturbed, str) else KnownLoss(*perturbed)])
        return Problem(output, self._known["x_norms"], loss, trainable_parameters(self.model))

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
            self._reset_buffers()
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
        for batch in self._all_batches[:_LOSS_BATCHES]:
            n = min(batch.samples, _LOSS_SAMPLES)
            data = some_samples(self._on_device(batch), batch.samples, slice(n))
            parts = batch_parts(data, n)
            if parts is None or parts.y is None:
                return "the loss is not known: its batches are no pairs of inputs and targets"
            with torch.no_grad():
                self._reset_buffers()
                loss = float(self._loss_on(data, batch.index))
                self._reset_buffers()
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

    def targets(self, samples: int) -> Tensor | None:
        """The labels of the first samples of the probe, where its batches are pairs of tensors, or longer with an
        input that is the first alone: a predictor of the user's may read two inputs."""
        found = []
        for batch, asked in self._first(samples):
            data = batch.data
            if not isinstance(data, (tuple, list)) or len(data) < 2 or not has_samples(data[1], batch.samples):
                return None
            if len(data) > 2 and self._predict is not default_predict:
                return None
            if data[1].dim() > 1 and not data[1].is_floating_point():
                return None  # labels of a sequence, or of pixels
            found.append(data[1][:asked])
        return torch.cat(found) if len({y.shape[1:] for y in found}) == 1 else None

    @cached_property
    def target_matrix(self) -> Tensor | None:
        """The targets of the whole probe as numbers (n, k), where they are some: classes become unit vectors."""
        n = sum(batch.samples for batch in self._all_batches)
        targets = self.targets(n)
        return (
            None if targets is None else as_targets(torch.zeros(n, self.problem.outputs, dtype=torch.float64), targets)
        )

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
            self._reset_buffers()
            network.norm.training = True  # the statistics of these samples; the flag is restored with all others
            return batchnorm_form(self.model, x.flatten(1), self._predict(self.model, data))
