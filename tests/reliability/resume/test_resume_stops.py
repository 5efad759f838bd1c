"""Wherever a run is stopped, and whatever it is resumed with, the numbers are those of an uninterrupted one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import OnExceptionCheckpoint
from pytorch_lightning.loggers import CSVLogger

from lightning_normtheory.callbacks.ntk_least_eigenvalue import NTKLeastEigenvalueDiagnostic

from reliability.resume.resume_cases import CASES, LAST_STEPS, STEPS, STOPS, differences, fit, keepers, outcome, rows

# The end of an epoch, a validation before it, the middle of the first epoch, and the last step of an epoch.
SOME = [stop for stop in (("epoch", 1), ("validation", 0), ("step", 2), ("step", STEPS)) if stop in STOPS]
CHEAP = ("BN's form", "BN's form, iterable", "plain chain, iterable", "every second epoch, all in one")


@pytest.mark.parametrize("case", CHEAP)
def test_resuming_changes_no_number(tmp_path, case):
    found = outcome(case, tmp_path, SOME)
    assert found.differences == ()
    assert found.compared > 100


def test_each_callback_resumes(tmp_path):
    assert outcome("WN's form", tmp_path, [("epoch", 2)]).differences == ()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_resuming_from_anywhere_changes_no_number(tmp_path, case):
    assert outcome(case, tmp_path, STOPS).differences == ()


CASE = "BN's form, all in one"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, its checkpoints and its rows."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "saved", fit(CASE, folder / "run", more=keepers(folder / "saved"))


def from_epoch(first, found):
    return {epoch: row for epoch, row in found.items() if epoch >= first}


@pytest.mark.slow
def test_another_process_resumes(tmp_path, whole):
    saved, expected = whole
    # With other hashes of strings, which fingerprints must not depend on.
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("resume_cases.py")
    command = [sys.executable, str(program), CASE, str(tmp_path), str(saved / "epoch" / "1.ckpt")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert differences(from_epoch(2, expected), rows(tmp_path)) == []


def test_the_same_callbacks_resume(tmp_path, whole):
    saved, expected = whole
    callbacks = CASES[CASE].make_callbacks()
    fit(CASE, tmp_path / "other", callbacks=callbacks, epochs=1)
    resumed = fit(CASE, tmp_path / "resumed", saved / "epoch" / "1.ckpt", callbacks=callbacks)
    assert differences(from_epoch(2, expected), resumed) == []


def test_resuming_twice(tmp_path, whole):
    saved, expected = whole
    fit(CASE, tmp_path / "second", saved / "step" / "2.ckpt", more=keepers(tmp_path / "saved"), epochs=3)
    third = fit(CASE, tmp_path / "third", tmp_path / "saved" / "step" / f"{2 * STEPS + 1}.ckpt")
    assert differences(from_epoch(2, expected), third) == []


def test_the_state_loads_without_executing_code(whole):
    saved, _ = whole
    state = torch.load(saved / "validation" / "2.ckpt", weights_only=True)["callbacks"]
    (ours,) = [value for key, value in state.items() if key.startswith("NormTheory")]
    assert sum(len(chunk) for chunk in ours["probe"]["chunks"][0]) == 20


def test_a_checkpoint_that_is_saved_after_a_validation_of_its_own(tmp_path, whole):
    _, expected = whole
    (callback,) = CASES[CASE].make_callbacks()
    fit(CASE, tmp_path / "first", callbacks=[callback], more=[Validated(tmp_path / "validated.ckpt")], epochs=2)
    resumed = fit(CASE, tmp_path / "second", tmp_path / "validated.ckpt")
    assert differences(from_epoch(2, expected), resumed) == []


class Validated(pl.Callback):
    """Saves after the fit, when a validation has been set up beside."""

    def __init__(self, path):
        self.path = path

    def on_fit_end(self, trainer, pl_module):
        for callback in trainer.callbacks:
            callback.setup(trainer, pl_module, "validate")
        trainer.save_checkpoint(self.path)


class Break(pl.Callback):
    """Ends a run from within."""

    def __init__(self, kind, step):
        self.kind, self.step = kind, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            raise self.kind("on purpose")


def broken_off(case, folder, *more):
    """The checkpoint of a run that does not reach its end. Its rows go where those of the resumed one will."""
    with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)):
        fit(case, folder, more=[*more, Kept(folder)], logger=CSVLogger(folder, "log", 0))
    return folder / "on_exception.ckpt"


class Kept(OnExceptionCheckpoint):
    def teardown(self, trainer, *arguments, **more):
        pass  # Lightning's own removes the file once a fit has been wound up in order


@pytest.mark.parametrize(("kind", "step"), [(RuntimeError, 1), (KeyboardInterrupt, 5), (KeyboardInterrupt, 6)])
def test_the_file_of_a_run_that_broke_off_and_went_on_is_that_of_a_whole_one(tmp_path, whole, kind, step):
    _, expected = whole
    if step % STEPS == 0 and not LAST_STEPS:
        pytest.skip("this Lightning trains the last step once more")
    checkpoint = broken_off(CASE, tmp_path, Break(kind, step))
    fit(CASE, tmp_path, checkpoint, logger=CSVLogger(tmp_path, "log", 0))
    assert differences(expected, rows(tmp_path)) == []


@pytest.mark.parametrize("case", [CASE, "plain chain, iterable"])
def test_a_measurement_that_was_interrupted_is_made_again(tmp_path, monkeypatch, case):
    measure, calls = NTKLeastEigenvalueDiagnostic.measure, []

    def interrupted(self, view):
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, view)

    expected = fit(case, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(NTKLeastEigenvalueDiagnostic, "measure", interrupted)
        checkpoint = broken_off(case, tmp_path / "stopped")
    assert sorted(rows(tmp_path / "stopped")) == [0]
    fit(case, tmp_path / "stopped", checkpoint, logger=CSVLogger(tmp_path / "stopped", "log", 0))
    assert differences(expected, rows(tmp_path / "stopped")) == []
