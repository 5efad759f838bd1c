"""`ProgressiveBound`: the test error during the first pass over the data, bounded by the losses of that pass."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.samples.fresh import why_not_fresh
from lightning_normtheory.linalg.precision import to_float64
from lightning_normtheory.theorems.progressive import fresh_derivative, progressive_bound

__all__ = ["ProgressiveBound"]

_BOUND = "progressive_error_bound"
# Values of single batches that are kept before they are summed.
_PIECE = 256
_NOT_SEEN = "the first batches of the run were not seen"


class ProgressiveBoundDiagnostic(Diagnostic):
    """Adds up 1 − e^{−loss} of the first pass, on the device, and bounds the error by it when it is measured."""

    title = "progressive bound"
    key = _BOUND
    metrics = (key,)
    needs_outputs = True  # to recognize the loss
    shared = ("problem",)

    def __init__(self, delta: float = 0.05, *, alone: bool = True) -> None:
        """
        Args:
            alone: whether it gives the reason if the loss has no such bound; other diagnostics do.
        """
        if not 0 < delta < 1:
            raise ValueError(f"Expected delta to be a probability between 0 and 1, but got {delta!r}.")
        self._delta, self._alone = delta, alone
        self._total, self._batches = 0.0, 0  # over all processes, up to the last measurement
        self._values: list[Tensor] = []  # of this process since then
        self._sums: list[Tensor] = []
        self._new = 0
        self._closed, self._seen, self._single = False, False, True
        self._recognized = False  # the loss; after the first pass, once is enough
        self._zeroed = 0
        self._why = ""

    def after_batch(self, trainer: Trainer, outputs: Any, batch_idx: int) -> None:
        if self._closed:
            return
        self._closed = True  # unless this batch is fresh and can be read
        if not self._is_fresh(trainer, batch_idx):
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None:  # a step that was skipped: g ≤ 1
            loss = torch.full((), torch.inf, device=trainer.strategy.root_device)
        # Lightning divides the loss that it differentiates.
        self._values.append(fresh_derivative(loss.detach().float() * trainer.accumulate_grad_batches))
        self._new += 1
        if len(self._values) == _PIECE:
            self._sum_up()
        self._closed = False

    def _is_fresh(self, trainer: Trainer, batch_idx: int) -> bool:
        """Return whether the weights that gave the loss of this batch do not depend on it."""
        first, self._seen = not self._seen, True
        self._single = trainer.world_size == 1
        if trainer.current_epoch > 0 or (first and (batch_idx > 0 or trainer.global_step > 1)):
            self._why = _NOT_SEEN if first else self._why
            return False
        if first:
            module = trainer.lightning_module
            automatic = "" if module.automatic_optimization else "the loss of a step is unknown in manual optimization"
            self._why = automatic or why_not_fresh(trainer)
        # Each evaluation of the loss sets the gradients to zero first, except while gradients are accumulated.
        before, self._zeroed = self._zeroed, _times_zeroed(trainer)
        if self._zeroed - before > 1:
            self._why = "the optimizer evaluates the loss several times in a step"
        # The last batches of several processes repeat samples to be of equal number.
        return not self._why and (self._single or not trainer.is_last_batch)

    def _sum_up(self) -> None:
        if self._values:
            # In float64, so that the sum does not depend on how often it is taken.
            self._sums.append(to_float64(torch.stack(self._values)).sum())
            self._values = []

    def _own_total(self) -> float:
        self._sum_up()
        return float(to_float64(torch.stack(self._sums)).sum()) if self._sums else 0.0

    def measure(self, measurement: Measurement) -> dict[str, float]:
        self.reasons: dict[str, str] = {}
        self._collect(measurement)
        unfit = "" if self._recognized and self._closed else _why_unfit(measurement)
        self._recognized = not unfit
        if unfit or self._why or not self._batches:
            reason = unfit or self._why or "no fresh batch was seen"
            if self._alone or not unfit:
                self.reasons = {_BOUND: reason}
            return {}
        found = progressive_bound(self._total, self._batches, self._delta)
        return {
            _BOUND: found.value,
            f"{_BOUND}_sharper": found.sharper,
            "progressive_error_vacuous": float(found.vacuous),
            "progressive_derivative": self._total / self._batches,
            "progressive_batches": float(self._batches),
        }

    def _collect(self, measurement: Measurement) -> None:
        """Add what the processes have seen since the last measurement. The batches of a step are one draw."""
        processes = measurement.processes
        new = torch.tensor([self._own_total(), float(self._new)], dtype=torch.float64, device="cpu")
        total, batches = (processes.sum(new) / processes.count).tolist()
        self._total, self._batches = self._total + total, self._batches + round(batches)
        self._sums, self._new = [], 0

    def state_dict(self) -> dict[str, Any]:
        # One process of several does not know the other ones' batches since the last measurement.
        own, new = (self._own_total(), self._new) if self._single else (0.0, 0)
        return {
            "total": self._total + own,
            "batches": self._batches + new,
            "why": self._why,
            "recognized": self._recognized,
            "seen": self._seen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # A loader that is started again may repeat samples: the bound stays that of the batches so far.
        self._closed = self._seen = state.get("seen", True)
        self._total, self._batches = state.get("total", 0.0), state.get("batches", 0)
        self._why, self._recognized = state.get("why", _NOT_SEEN), state.get("recognized", False)
        self._values, self._sums, self._new = [], [], 0


def _why_unfit(measurement: Measurement) -> str:
    """Return why the mean loss ℓ of the training step does not bound 1 − p_y by 1 − e^{−ℓ}."""
    if measurement.function.user_loss is not None:
        return "loss= is not the loss of the training step"
    loss = measurement.theory.problem.loss
    if isinstance(loss, str):
        return loss
    scale = loss.scale if loss.name == "cross_entropy" else loss.scale * loss.terms
    if not loss.is_square and not loss.summed and math.isclose(scale, 1, rel_tol=1e-3):
        return ""
    return "the loss is neither a cross entropy nor a logistic loss, averaged over its terms"


def _times_zeroed(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad.total.completed


class ProgressiveBound(DiagnosticCallback):
    """Logs a bound on the test error that follows from the losses of the first pass over the training data.

    In the first pass, the weights W_s that compute the loss of batch s have not been trained on it. So these losses are
    test losses, and a martingale inequality (BN, Lemma E.2 and Corollary E.3) bounds the test error, averaged over the
    weights W_0, …, W_{t−1} of that pass, with probability 1 − δ; for any network with a logistic loss or a cross
    entropy. `progressive_bound` has the statement and the proof. It takes no additional pass: the loss that the
    training step returns bounds 1 − p_y by 1 − e^{−loss}.

    Logged after every n-th epoch or step; from the second epoch on, the values of the first pass stay:

    * ``normtheory/progressive_error_bound``: (8 Σ_s g_s + 8 ln(1/δ))/t, g_s = 1 − e^{−loss} of batch s, t batches;
    * ``normtheory/progressive_error_bound_sharper``: the same with a better inequality;
    * ``normtheory/progressive_error_vacuous``: 1 if both are 1 or more, else 0;
    * ``normtheory/progressive_derivative``: (1/t) Σ_s g_s, what is measured: twice this estimates a bound of the error;
    * ``normtheory/progressive_batches``: t;
    * ``normtheory/seconds``: the time of the measurement.

    The bound is about the network as it is trained: with dropout, and with the statistics of a batch in BatchNorm; of a
    loss that is a mean over positions or outputs, about the share of wrong ones. It assumes that the batches are
    independent draws from one distribution (with augmentation: the augmented one), which holds for shuffled data, and
    that the weights at fit start do not depend on them. Whether a custom sampler or a stream gives such draws, and no
    sample twice in its first pass, cannot be checked. A run that is resumed in the first pass keeps the bound of the
    batches before.

    There is no bound with a sampler of torch that repeats samples or keeps the order of the dataset (a `DataLoader`
    without ``shuffle=True``), except in a single batch; nor with several loaders, with manual optimization, and with an
    optimizer that evaluates the loss several times in a step.

    The arguments that are not listed are those of `DiagnosticCallback`.

    Args:
        delta: δ, the probability that the bound fails.

    Example:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[ProgressiveBound(every_n_steps=100)], logger=False)
    """

    def __init__(self, *args: Any, delta: float = 0.05, **kwargs: Any) -> None:
        self._options: dict[str, Any] = {"delta": delta}
        super().__init__(*args, **kwargs)

    def make_diagnostics(self) -> list[Diagnostic]:
        return [ProgressiveBoundDiagnostic(**self._options)]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **self._options}
