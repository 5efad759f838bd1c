"""One strange model is trained, with and without our callbacks, and everything is compared."""

import contextlib
import io
import math
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_normtheory import normalized_layers
from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory

from reliability.outcome import Outcome
from reliability.strange.strange_bounds import BoundChecks
from reliability.strange.strange_ledger import Ledger
from reliability.strange.strange_models import StrangeModel, strange_model
from support.lit import rows, trainer
from support.neutral_cases import Recorder, generators, state

PREDICTOR_SAMPLES = 2
ALWAYS = ("loss", "rsc_ratio", "hessian_lambda_max", "ntk_lambda_min", "rademacher_bound", "seconds")


@contextlib.contextmanager
def quiet():
    """Without the table of theorems and the summary of the run."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


class States(pl.Callback):
    """Copies of the module's state before the training and after each epoch."""

    def __init__(self):
        self.states: list[dict[str, torch.Tensor]] = []
        self.steps: list[int] = []

    def note(self, trainer, pl_module):
        self.states.append({name: value.clone() for name, value in pl_module.state_dict().items()})
        self.steps.append(trainer.global_step)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not self.states:
            self.note(trainer, pl_module)

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(trainer, pl_module)


def fit(model: StrangeModel, callbacks: list[pl.Callback], folder: Path) -> tuple[list[Any], pl.LightningModule]:
    """A run's record of everything that must not differ."""
    pl.seed_everything(model.seed)
    recorder = Recorder()
    run = trainer(
        [*callbacks, recorder], max_epochs=model.plan.epochs, default_root_dir=folder, precision=model.plan.precision
    )
    module = model.build()
    run.fit(module, model.loader(), model.validation_loader())
    recorder.note(state(run, module), generators())
    return recorder.seen, module


def our_callbacks(model: StrangeModel, **changed: Any) -> list[pl.Callback]:
    """All diagnostics, and for every third model the predictor's Hessian."""
    plan = model.plan
    shared = {"probe": plan.probe, "on_error": "raise" if plan.twice_differentiable else "warn", **model.arguments}
    shared = {**shared, "batch_stats": plan.options["batch_stats"], **changed}
    made: list[pl.Callback] = [NormTheory(**{**plan.options, **shared})]
    if model.seed % 3 == 0:
        made.append(HessianTopEigenvalue(prefix="other", predictor_samples=PREDICTOR_SAMPLES, **shared))
    return made


def try_model(seed: int, folder: Path) -> Outcome:
    """Train the model of a seed twice, and compare all that was recorded and logged; differences come in words."""
    return try_this(strange_model(seed), our_callbacks, folder / f"strange_{seed}")


def try_this(model: StrangeModel, make_callbacks: Any, folder: Path) -> Outcome:
    torch.set_num_threads(1)
    states = States()
    with warnings.catch_warnings(record=True) as caught, quiet():
        warnings.simplefilter("always")
        bare, _ = fit(model, [], folder)
        try:
            watched, module = fit(model, [*make_callbacks(model), states], folder)
        except Exception as error:  # noqa: BLE001  # whatever the product raises is a difference
            return Outcome(1, (f"{model.describe}: {type(error).__name__}: {error}",))
        unknown = set(normalized_layers(module).unknown)
    row = Ledger({_plain(name): value for name, value in rows(folder)[model.plan.epochs - 1].items()})
    row.require(len(bare) == len(watched), "the run has another length")
    for position, (a, b) in enumerate(zip(bare, watched)):
        row.require(a == b, f"training differs in record {position} of {len(bare)}")
    messages = [str(each.message) for each in caught]
    try:
        compare(BoundChecks(model, row, states.states, states.steps), unknown, messages)
    except Exception as error:  # noqa: BLE001  # a reference that fails has compared nothing
        row.require(False, f"the comparison failed: {type(error).__name__}: {error}")
    return Outcome(row.compared, tuple(f"{model.describe}: {words}" for words in row.differences))


def _plain(name: str) -> str:
    for prefix, short in {"normtheory_layers/": "layers/", "normtheory/": "", "other/": "other/"}.items():
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name


def compare(checks: BoundChecks, unknown: set[str], messages: list[str]) -> None:
    """All metrics, each once."""
    row, plan = checks.row, checks.plan
    for name in ALWAYS:
        row.require(name in row, f"{name} is not logged")
    checks.loss()
    checks.training_set()
    if plan.twice_differentiable:
        checks.hessian_reference()
        checks.hessian()
        checks.bracket()
    else:
        refused(row, "", messages)
    checks.edges()
    if "other/seconds" in row:
        row.at_least("other/seconds", 0.0)
        if plan.twice_differentiable:
            row.at_least("other/hessian_lambda_max_seconds", 0.0)
            checks.hessian("other/")
            checks.bracket("other/")
            checks.predictor_hessian("other/", PREDICTOR_SAMPLES)
        else:
            refused(row, "other/", messages)
        checks.edges("other/")
    checks.kernel(unknown)
    checks.fewer_samples()
    checks.few_samples()
    checks.weight_norms(unknown)
    checks.distance_from_start()
    checks.batch_norms()
    checks.generalization()
    checks.certificate()
    reasons = [message for message in messages if "/rademacher_bound is NaN: " in message]
    row.require(len(reasons) == math.isnan(row["rademacher_bound"]), f"one reason, but: {reasons}")
    row.close()


def refused(row: Ledger, prefix: str, messages: list[str]) -> None:
    """No second derivative: NaN, with the reason once. 2/η needs none."""
    for name in ("hessian_lambda_max", "hessian_rayleigh_train", "predictor_hessian_"):
        for found in row.starting(f"{prefix}{name}"):
            row.nan(found)
    start = f"{prefix or 'normtheory/'}hessian_lambda_max failed and is logged as NaN: SecondDerivativeError"
    reasons = [message for message in messages if message.startswith(start) and "Cube" in message]
    row.require(len(reasons) == 1, f"one reason, but: {reasons}")
