"""Resuming with arguments that differ from the checkpoint's warns and drops what no longer fits."""

import inspect
import warnings

import pytest

from lightning_normtheory.callbacks import (
    DiagnosticCallback,
    NormTheory,
    RSCRatio,
)
from lightning_normtheory.callbacks.samples.probe import Probe

from reliability.resume.resume_cases import CASES, fit
from support.lit import CALLBACKS


def half_square(module, batch):
    return (module(batch[0]) - batch[1]).square().mean() / 2


def doubled(module, batch):
    return 2 * module(batch[0])


# Another value than the default for every argument of every callback, but for the prefix: see below.
OTHERS = {
    "probe": 30,
    "every_n_epochs": 3,
    "every_n_steps": 7,
    "loss": half_square,
    "predict": doubled,
    "batch_stats": True,
    "on_error": "raise",
    "max_overhead": 0.5,
    "parameters": 0,
    "tol": 0.5,
    "max_hvps": 7,
    "hvps": 14,
    "trace_hvps": 14,
    "layers": True,
    "memory": "low",
    "predictor_samples": 3,
    "samples": 9,
    "outputs": "sum",
    "delta": 0.3,
    "x_norm": 2.0,
    "hessian_tol": 0.5,
    "ntk_samples": 9,
    "ntk_outputs": "full",
    "directions": 4,
    "ntk_directions": 4,
    "method": "lanczos",
    "hessian_method": "power",
}
ARGUMENTS = [
    (callback, name)
    for callback in CALLBACKS
    for name in {name: 0 for c in (callback, DiagnosticCallback) for name in inspect.signature(c.__init__).parameters}
    if name not in ("self", "prefix", "args", "kwargs")
]


def messages_of(state, callback):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback.load_state_dict(state)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("callback", "argument"), ARGUMENTS, ids=lambda each: getattr(each, "__name__", each))
def test_every_argument_that_is_another_one_is_named(callback, argument):
    state = callback().state_dict()
    assert messages_of(state, callback()) == []
    changed = callback(**{argument: OTHERS[argument]})
    (message,) = [each for each in messages_of(state, changed) if "in the checkpoint and is" in each]
    assert message.startswith(f"{callback.__name__}: ")
    assert argument in message


def test_another_seed_of_the_probe_is_named():
    messages = messages_of(RSCRatio(Probe(20)).state_dict(), RSCRatio(Probe(20, seed=1)))
    assert any("seed was 0 in the checkpoint and is 1 now" in message for message in messages)


def test_a_setting_that_no_longer_exists_is_named():
    state = RSCRatio().state_dict()
    state["settings"]["forgotten"] = 1
    assert messages_of(state, RSCRatio()) == ["RSCRatio: forgotten was 1 in the checkpoint and is None now."]


CASE = "BN's form, all in one"
LOSSES = {"loss_ratio", "certificate_rate_measured"}
KERNEL = {"ntk_change", "ntk_change_max"}
# argument: (its other value, the metrics that have nothing to compare with at first, whether BN's start is another)
DROPPED = {
    "nothing": (None, set(), False),
    "probe": (16, LOSSES | KERNEL, True),
    "loss": (half_square, LOSSES, False),
    "predict": (doubled, KERNEL, True),
    "parameters": (0, LOSSES | KERNEL, True),
    "batch_stats": (True, LOSSES | KERNEL, False),
    "ntk_samples": (6, KERNEL, False),
    "ntk_outputs": ("sum", KERNEL, False),
    "ntk_directions": (1, KERNEL, False),
    "hessian_method": ("power", set(), False),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from reliability.resume.resume_cases import keepers

    folder = tmp_path_factory.mktemp("before")
    fit(CASE, folder / "run", more=keepers(folder), epochs=1)
    return folder / "epoch" / "0.ckpt"


@pytest.mark.parametrize("argument", DROPPED)
def test_what_was_measured_otherwise_is_not_compared_with(tmp_path, checkpoint, argument):
    value, dropped, another_start = DROPPED[argument]
    (callback,) = CASES[CASE].callbacks(**{"probe": 20, **({} if argument == "nothing" else {argument: value})})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(CASE, tmp_path, checkpoint, callbacks=[callback], epochs=3)
    compared = {f"normtheory/{name}" for name in LOSSES | KERNEL}
    assert compared - found[1].keys() == {f"normtheory/{name}" for name in dropped}
    assert compared <= found[2].keys()
    # BN's form is that of a start: after the first steps the network has a shift, and there is none any more.
    assert ("normtheory/batchnorm_displacement_v" in found[1]) is not another_start
    said = " ".join(str(w.message) for w in caught if "discarding" in str(w.message))
    assert all(f"{name}" in said for name in dropped - {"ntk_change_max"})
    assert bool(said) == bool(dropped)


def test_another_prefix_is_another_callback(tmp_path, checkpoint):
    with pytest.warns(UserWarning, match="NormTheory{'prefix': 'normtheory'}"):
        found = fit(CASE, tmp_path, checkpoint, callbacks=[NormTheory(20, prefix="other")], epochs=2)
    # It starts where the run was resumed.
    assert {"other/loss_ratio", "other/ntk_change"} <= found[1].keys()


def test_a_kernel_of_other_samples_is_not_compared_with(tmp_path, checkpoint, monkeypatch):
    """With the same arguments, as when the dataset is another one."""
    from reliability.resume import resume_cases

    draw = resume_cases.samples
    monkeypatch.setattr(resume_cases, "samples", lambda *a, **k: tuple(-each for each in draw(*a, **k)))
    with pytest.warns(UserWarning, match="ntk_change is not logged: probe samples differ from the checkpoint"):
        found = fit(CASE, tmp_path, checkpoint, epochs=3)
    assert "normtheory/ntk_change" not in found[1]
    assert "normtheory/ntk_change" in found[2]
