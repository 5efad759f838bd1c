"""Faults in numbers: what is not finite, or zero, somewhere in the training, and is gone again later."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import (
    ConvergenceCertificate,
    HessianTopEigenvalue,
    MinWeightNorm,
    NormTheory,
    NTKLeastEigenvalue,
    RademacherBound,
    RSCRatio,
)

from reliability.faults.fault_modules import (
    Broken,
    Definitions,
    Guarded,
    NoGradient,
    Regression,
    ScaledLoss,
    Transferred,
    Unguarded,
)
from reliability.faults.fault_runs import EPOCHS, SAMPLES, Comparison, fit, undisturbed
from reliability.outcome import Outcome
from support.lit import Classifier, tensors
from support.models import direction

NAN, INF = math.nan, math.inf
LOSS = ("loss", "grad_norm_sq", "rsc_ratio")
OUTPUTS = ("ntk_lambda_max", "mean_predictor_grad_norm_sq")
# Products in float32 over at most 24 samples and 8 units, sums in float64.
REL = 1e-4


def with_fault(
    folder: Path,
    module: Callable[[], pl.LightningModule],
    users: Callable[[], list[pl.Callback]] = list,
    *,
    hit: dict[int, tuple[str, ...]],
    ours: Callable[[], pl.Callback] = NormTheory,
    net: str = "wn",
    data: tuple | None = None,
    loss: Callable = nn.functional.cross_entropy,
    reports: Iterable[str] = (),
) -> Outcome:
    """The training is that of the bare run; numbers are not finite exactly where the fault hits, and right elsewhere.

    Args:
        hit: by epoch, which of `Definitions` cannot be finite.
    """
    data = data or tensors(SAMPLES)
    loaded = lambda: DataLoader(TensorDataset(*data), 8, shuffle=True)  # noqa: E731
    definitions = Definitions(net, data, loss)
    check = Comparison()
    watched = fit(folder / "watched", [ours()], module=module, users=users(), data=loaded)
    # The fault is part of both runs; the oracle sees the weights as our callbacks see them.
    bare = fit(folder / "bare", [definitions], module=module, users=users(), data=loaded)
    check.training(watched, bare)
    rows = watched.rows
    check.equal("the epochs in the file", sorted(rows), list(range(EPOCHS)))
    for epoch, expected in definitions.found.items():
        for name in expected.keys() & rows.get(epoch, {}).keys():
            found = rows[epoch][name]
            if name in hit.get(epoch, ()):
                check.holds(f"epoch {epoch}, {name} is {found}, with a fault in it", not math.isfinite(found))
            else:
                check.close(f"epoch {epoch}, {name}", found, expected[name], REL)
    check.reports(watched, *reports)
    resumed = check.resumed(watched, bare, lambda: [ours()], module=module, users=users(), data=loaded)
    if EPOCHS - 1 not in hit:
        # When the fault is over nothing is missing; a crossover is there only if its parts are above their floors.
        names = [{*row} - {"ntk_crossover"} for row in (rows[EPOCHS - 1], resumed[EPOCHS])]
        check.equal("the names in the last row, and not in that of the resumed run", names[0] - names[1], set())
        check.equal("the names in the row of the resumed run, and not in the last", names[1] - names[0], set())
    return check.outcome


def scaled(folder: Path, factor: float, epochs: tuple[int, ...], **arguments: Any) -> Outcome:
    return with_fault(folder, partial(ScaledLoss, factor, epochs), hit=dict.fromkeys(epochs, LOSS), **arguments)


def broken(folder: Path, find: Callable, value: float, epochs: tuple[int, ...], **arguments: Any) -> Outcome:
    module = partial(Guarded, arguments.get("net", "wn"))
    hit = arguments.pop("hit", dict.fromkeys(epochs, (*LOSS, *OUTPUTS)))
    return with_fault(folder, module, lambda: [Broken(find, value, epochs)], hit=hit, **arguments)


def poisoned_data(folder: Path, value: float, *, target: bool) -> Outcome:
    """One input, or one number to be learned, is not finite from the beginning."""
    x, _ = tensors(SAMPLES)
    y = x[:, :3].sin()
    (y if target else x)[7, 2] = value
    # The hyperbolic tangent of infinity is one, with a derivative that is none.
    inputs = ("grad_norm_sq", "rsc_ratio", *OUTPUTS) if math.isinf(value) else (*LOSS, *OUTPUTS)
    hit = dict.fromkeys(range(EPOCHS), LOSS if target else inputs)
    return with_fault(folder, partial(Regression, "wn"), hit=hit, data=(x, y), loss=nn.functional.mse_loss)


def poisoned_statistics(folder: Path, buffer: str, value: float) -> Outcome:
    """A running statistic of a BatchNorm. Loss, gradient and Hessian of the function that is trained do not use it."""
    check = Comparison()
    reference, bare = undisturbed("bn")
    module = partial(Classifier, "bn")
    users = lambda: [Broken(lambda m: getattr(m.net[1], buffer), value, (1,))]  # noqa: E731
    watched = fit(folder / "watched", [NormTheory()], module=module, users=users())
    check.training(watched, fit(folder / "bare", module=module, users=users()))
    rows, expected = watched.rows, reference.rows
    check.holds("epoch 1, batchnorm_epsilon is right, with a fault in it", rows[1] != expected[1])
    trained = [name for name in expected[1] if not name.startswith(RUNNING)]
    expected[1] = {name: expected[1][name] for name in trained}
    check.rows(rows, expected)
    check.resumed(watched, bare, lambda: [NormTheory()], module=module)
    return check.outcome


def zero_loss(folder: Path, epochs: tuple[int, ...]) -> Outcome:
    """L = 0 and ∇L = 0: R is 0/0, everything else is a number."""
    check = Comparison()
    module = partial(ScaledLoss, 0.0, epochs)
    watched, bare = fit(folder / "watched", [NormTheory()], module=module), fit(folder / "bare", module=module)
    check.training(watched, bare)
    rows = watched.rows
    for epoch in range(EPOCHS):
        found = rows[epoch]
        zero = epoch in epochs
        check.equal(f"epoch {epoch}, whether the loss is zero", found["loss"] == 0, zero)
        check.equal(f"epoch {epoch}, whether the gradient is zero", found["grad_norm_sq"] == 0, zero)
        check.equal(f"epoch {epoch}, whether R is a number", math.isnan(found["rsc_ratio"]), zero)
        check.equal(f"epoch {epoch}, whether λ_max is zero", found["hessian_lambda_max"] == 0, zero)
        check.holds(f"epoch {epoch}, λ_min of the kernel is not finite", math.isfinite(found["ntk_lambda_min"]))
    check.reports(watched, "normtheory/rsc_ratio is NaN")
    check.resumed(watched, bare, lambda: [NormTheory()], module=module)
    return check.outcome


def asked_to_stop(folder: Path) -> Outcome:
    """With on_error="raise" the fit ends, in the state in which a bare run is at that moment."""
    check = Comparison()
    module = partial(ScaledLoss, NAN, (1,))

    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                raise FloatingPointError

    watched = fit(folder / "watched", [HessianTopEigenvalue(on_error="raise")], module=module)
    bare = fit(folder / "bare", [Stop()], module=module)
    check.equal("what the fit ended with", type(watched.error), FloatingPointError)
    check.equal("the training up to there", watched.seen, bare.seen)
    check.equal("the epochs in the file", sorted(watched.rows), [0])
    return check.outcome


SINGLE = {
    MinWeightNorm: (),
    RSCRatio: (*LOSS, "mean_predictor_grad_norm_sq"),
    HessianTopEigenvalue: (),
    NTKLeastEigenvalue: ("ntk_lambda_max",),
    RademacherBound: (),
    ConvergenceCertificate: (),
}
# What is measured with running statistics.
RUNNING = ("ntk", "generalization", "population", "rademacher", "batchnorm", "layers/ntk", "layers/batchnorm")


def first_weight(module):
    return module.net[2].weight


def directions(module):
    return direction(module.net[0])


CASES: dict[str, Callable[[Path], Outcome]] = {
    **{
        f"loss {value} in epoch {epoch}": partial(scaled, factor=value, epochs=(epoch,))
        for value in (NAN, INF)
        for epoch in range(EPOCHS)
    },
    "loss -inf in epoch 1": partial(scaled, factor=-INF, epochs=(1,)),
    "loss nan in all epochs": partial(scaled, factor=NAN, epochs=(0, 1, 2)),
    **{
        f"loss nan in epoch 1, {callback.__name__} alone": partial(scaled, factor=NAN, epochs=(1,), ours=callback)
        for callback in SINGLE
    },
    "loss nan from epoch 1 on, weights lost": partial(
        with_fault,
        module=partial(Unguarded, NAN, (1,)),
        hit=dict.fromkeys((1, 2), (*LOSS, *OUTPUTS, "min_weight_norm")),
    ),
    **{
        f"input nan in epoch {epoch}": partial(
            with_fault, module=partial(Transferred, NAN, (epoch,)), hit={epoch: (*LOSS, *OUTPUTS)}
        )
        for epoch in range(EPOCHS)
    },
    "input sample nan": partial(poisoned_data, value=NAN, target=False),
    "input sample inf": partial(poisoned_data, value=INF, target=False),
    "target nan": partial(poisoned_data, value=NAN, target=True),
    "target inf": partial(poisoned_data, value=INF, target=True),
    **{
        f"weight {value} at the end of epoch {epoch}": partial(broken, find=first_weight, value=value, epochs=(epoch,))
        for value, epoch in ((NAN, 0), (NAN, 1), (INF, 1), (NAN, 2))
    },
    **{
        f"weight nan at the end of epoch 1, {callback.__name__} alone": partial(
            broken, find=first_weight, value=NAN, epochs=(1,), ours=callback
        )
        for callback in SINGLE
    },
    "weightnorm v = 0 at the end of epoch 1": partial(broken, find=directions, value=0.0, epochs=(1,)),
    "weightnorm hook v = 0 at the end of epoch 1": partial(
        broken, find=directions, value=0.0, epochs=(1,), net="wn-hook"
    ),
    "weightnorm v = nan at the end of epoch 1": partial(
        broken, find=directions, value=NAN, epochs=(1,), hit={1: (*LOSS, *OUTPUTS, "min_weight_norm")}
    ),
    "gradient nan in epoch 1": partial(
        with_fault, module=partial(NoGradient, (1,)), hit={1: ("grad_norm_sq", "rsc_ratio", *OUTPUTS)}
    ),
    **{
        f"{buffer} {value} at the end of epoch 1": partial(poisoned_statistics, buffer=buffer, value=value)
        for buffer, value in (("running_mean", NAN), ("running_mean", INF), ("running_var", NAN), ("running_var", -1.0))
    },
    "loss zero in epoch 1": partial(zero_loss, epochs=(1,)),
    "loss zero in epoch 0": partial(zero_loss, epochs=(0,)),
    "loss nan and on_error=raise": asked_to_stop,
}
