"""Exceptions in the user's code: while it is measured, in loaders and metrics; and callbacks that are copied."""

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory

from reliability.faults.fault_runs import SAMPLES, Comparison, fit, undisturbed
from reliability.faults.faults_errors import MODULE, OnPurposeError, fail
from reliability.outcome import Outcome
from support.lit import Classifier, loader, tensors


def measured(module: pl.LightningModule) -> bool:
    """Whether a user's function is called for a measurement, after the first epoch: training steps have dropout on."""
    return module.trainer.training and not module.training and module.current_epoch == 1


class StepFails(Classifier):
    """At one batch of the probe."""

    index = 0

    def training_step(self, batch, batch_idx):
        return fail() if measured(self) and batch_idx == self.index else super().training_step(batch, batch_idx)


class SecondStepFails(StepFails):
    index = 1


class LastStepFails(StepFails):
    index = 2


class StepStops(Classifier):
    """An iterator of the user's own has come to its end: an exception that generators treat in their own way."""

    def training_step(self, batch, batch_idx):
        return next(iter(())) if measured(self) else super().training_step(batch, batch_idx)


class TransferFails(Classifier):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return fail() if measured(self) else batch


class ForwardFailsDisturbed(Classifier):
    """Leaves everything in disorder before it fails."""

    def forward(self, x):
        if measured(self):
            with torch.no_grad():
                for tensor in self.state_dict(keep_vars=True).values():
                    tensor.zero_()
            self.train()
            self.lr, self.extra = 0.0, []
            self.trainer.should_stop = True
            torch.rand(3)
            torch.set_grad_enabled(False)
            fail()
        return super().forward(x)


# What is measured without the user's step, and what is measured without the outputs.
WITHOUT_STEP = ("min_weight_norm", "layers/weight_norm", "weightnorm_displacement", "batchnorm_epsilon")
WITHOUT_OUTPUTS = (*WITHOUT_STEP, "layers/batchnorm_epsilon")


def failing_code(
    folder: Path,
    module: Callable,
    spared: tuple[str, ...],
    says: str = "on purpose",
    missing: str = "rsc_ratio",
    **arguments: Any,
) -> Outcome:
    """The user's own code fails in the second measurement only."""
    check = Comparison()
    reference, bare = undisturbed("bn")
    watched = fit(folder / "watched", [NormTheory(**arguments)], module=partial(module, "bn"))
    check.training(watched, bare)
    rows = watched.rows
    check.holds(f"epoch 1, {missing} is {rows[1][missing]}", math.isnan(rows[1][missing]))
    expected = reference.rows
    expected[1] = {name: value for name, value in expected[1].items() if name.startswith(spared)}
    # After a failure these look back to the measurement before it.
    for name in [
        name for name in expected[2] if name.startswith(("loss_ratio", "hessian", "ntk_change", "certificate"))
    ]:
        del expected[2][name]
    check.rows(rows, expected)
    own = [message for message in watched.messages if message.startswith("normtheory/")]
    named = [message.split()[0] for message in own]
    check.equal("the failures that are reported more than once", len(named) - len(set(named)), 0)
    check.holds(f"no warning gives the reason {says!r}", any(says in message for message in own))
    check.resumed(watched, bare, lambda: [NormTheory()], module=MODULE)
    return check.outcome


def failing_predict(module, batch):
    return fail() if module.current_epoch == 1 and measured(module) else module(batch[0])


class UnlikeTraining:
    """A loss that cannot read validation batches, and says something else each time."""

    def __init__(self) -> None:
        self.known = set(map(tuple, tensors(SAMPLES)[0].tolist()))
        self.calls = iter(range(1000))

    def __call__(self, module, batch):
        if not set(map(tuple, batch[0].tolist())) <= self.known:
            raise KeyError(f"no key in call {next(self.calls)}")
        return nn.functional.cross_entropy(module(batch[0]), batch[1])


class OtherValidation(Classifier):
    """Whose validation batches have other inputs than the training set."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1, batch[1]] if self.trainer.validating else batch


def failing_validation(folder: Path) -> Outcome:
    check = Comparison()
    watched = fit(folder / "watched", [NormTheory(loss=UnlikeTraining())], module=partial(OtherValidation, "bn"))
    bare = fit(folder / "bare", module=partial(OtherValidation, "bn"))
    check.training(watched, bare)
    for epoch, row in watched.rows.items():
        check.holds(f"epoch {epoch} has a gap", "generalization_gap" not in row)
        for name in ("rademacher_bound", "generalization_bound", "rsc_ratio", "hessian_lambda_max"):
            check.holds(f"epoch {epoch}, {name} is not finite", math.isfinite(row[name]))
    check.equal("the epochs in the file", sorted(watched.rows), [0, 1, 2])
    check.reports(watched, "generalization_gap is not logged")
    return check.outcome


class LateMetric(Classifier):
    """Logs a metric that can be computed only when the module's own epoch has ended, after ours."""

    class Metric(torchmetrics.SumMetric):
        ready = False

        def compute(self):
            return super().compute() if self.ready else fail()

    def __init__(self, net):
        super().__init__(net)
        self.metric = self.Metric()

    def on_train_epoch_start(self):
        self.metric.ready = False

    def training_step(self, batch, batch_idx):
        self.metric.update(1.0)
        self.log("late", self.metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.metric.ready = True


def failing_metric(folder: Path) -> Outcome:
    """A metric of the user's that cannot be asked yet. The recorder asks, too: only the end of the runs is compared."""
    check = Comparison()

    def end(name: str, ours: list) -> tuple[Any, Any]:
        pl.seed_everything(1, verbose=False)
        model = LateMetric("bn")
        run = pl.Trainer(
            callbacks=ours, max_epochs=2, default_root_dir=folder / name, logger=False, accelerator="cpu",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        try:
            run.fit(model, loader(SAMPLES))
        except OnPurposeError as error:
            return repr(error), None
        return [(k, v.tolist()) for k, v in model.state_dict().items()], float(run.callback_metrics["late"])

    check.equal("the end of the training", end("watched", [NormTheory()]), end("bare", []))
    return check.outcome


class Copies(pl.Callback):
    """Copies our callback, as some tuners and launchers do."""

    def __init__(self, method):
        self.method, self.made = method, []

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.made = [self.method(each) for each in trainer.callbacks if isinstance(each, NormTheory)]


def copied(folder: Path, method: Callable) -> Outcome:
    check = Comparison()
    reference, bare = undisturbed("bn")
    copies = Copies(method)
    watched = fit(folder / "watched", [NormTheory()], module=MODULE, users=[copies])
    check.training(watched, bare)
    check.rows(watched.rows, reference.rows)
    check.equal("the number of copies", len(copies.made), 1)
    if copies.made:
        check.rows(fit(folder / "copy", copies.made, module=MODULE).rows, reference.rows)
    return check.outcome


class Breaks(TensorDataset):
    broken = False

    def __getitem__(self, index):
        return fail() if self.broken and index == 13 else super().__getitem__(index)


class BreakIn(pl.Callback):
    def __init__(self, dataset, epoch):
        self.dataset, self.epoch = dataset, epoch

    def on_train_epoch_start(self, trainer, pl_module):
        self.dataset.broken = trainer.current_epoch == self.epoch


def failing_loader(folder: Path) -> Outcome:
    """That is the user's own error: the fit ends with it, and a checkpoint made then goes on."""
    check = Comparison()

    def run(name: str, ours: list) -> Any:
        dataset = Breaks(*tensors(SAMPLES))
        users = [BreakIn(dataset, 1), pl.callbacks.OnExceptionCheckpoint(folder / name)]
        arguments = {"module": MODULE, "users": users, "data": lambda: DataLoader(dataset, 8, shuffle=True)}
        return fit(folder / name, ours, enable_checkpointing=True, **arguments)

    watched, bare = run("watched", [NormTheory()]), run("bare", [])
    check.equal("what the fit ended with", type(watched.error), OnPurposeError)
    check.training(watched, bare)
    check.equal("the epochs in the file", sorted(watched.rows), [0])
    again, other = (
        fit(folder / f"{run.folder.name} again", ours, module=MODULE, checkpoint=run.folder / "on_exception.ckpt")
        for run, ours in ((watched, [NormTheory()]), (bare, []))
    )
    check.training(again, other)
    check.equal("the epochs in the second file", sorted(again.rows), [1, 2])
    check.readable(folder / "watched" / "on_exception.ckpt")
    return check.outcome


CASES: dict[str, Callable[[Path], Outcome]] = {
    "training_step fails at the first probe batch": partial(failing_code, module=StepFails, spared=WITHOUT_STEP),
    "training_step fails at the second probe batch": partial(failing_code, module=SecondStepFails, spared=WITHOUT_STEP),
    "training_step fails at the last probe batch": partial(failing_code, module=LastStepFails, spared=WITHOUT_STEP),
    "training_step raises StopIteration": partial(
        failing_code, module=StepStops, spared=WITHOUT_STEP, says="StopIteration"
    ),
    "predict fails": partial(
        failing_code,
        module=Classifier,
        spared=(*WITHOUT_OUTPUTS, "rsc_ratio", "loss", "grad_norm_sq"),
        missing="mean_predictor_grad_norm_sq",
        predict=failing_predict,
    ),
    "on_after_batch_transfer fails": partial(failing_code, module=TransferFails, spared=WITHOUT_OUTPUTS),
    "forward fails and leaves disorder": partial(failing_code, module=ForwardFailsDisturbed, spared=WITHOUT_OUTPUTS),
    "validation batches fail": failing_validation,
    "a user's metric is not ready": failing_metric,
    "callback deep-copied in the middle": partial(copied, method=copy.deepcopy),
    "callback pickled in the middle": partial(copied, method=lambda each: pickle.loads(pickle.dumps(each))),
    "loader fails in the middle of an epoch": failing_loader,
}
