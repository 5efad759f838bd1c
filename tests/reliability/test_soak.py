"""Nothing grows in long runs, and what would grow is found."""

import mmap
import sys
import threading
import warnings
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from reliability.soak import COUNTED, MEMORY_LIMIT, MODELS, grown, long_fit, read, soak, soak_one, unlike

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
MODEL = next(iter(MODELS))


def first_of(names):
    """One of each kind in the default run; all are in cd tests && python -m reliability, too."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_no_epoch_leaves_anything_behind_and_training_is_that_of_the_bare_run(tmp_path, model):
    outcome, _ = soak_one("epochs", model, 15, tmp_path)
    assert outcome == (15 * (len(COUNTED) + 1), ())


@pytest.mark.slow
@pytest.mark.parametrize("callbacks", ["the same callbacks", "new callbacks"])
def test_no_fit_leaves_anything_behind(tmp_path, callbacks):
    outcome, _ = soak_one(callbacks, MODEL, 8, tmp_path)
    assert outcome == (8 * len(COUNTED), ())


@pytest.mark.slow
def test_a_long_run_of_each_kind(tmp_path):
    """The command runs 200 epochs."""
    outcome, figures = soak(60, tmp_path)
    assert outcome.differences == ()
    assert len(figures) == 5


class Leaking(pl.Callback):
    """Leaves one of everything behind in every epoch."""

    def __init__(self):
        self.kept, self.end = [], threading.Event()

    def on_train_epoch_end(self, trainer, pl_module):
        waiting = threading.Thread(target=self.end.wait)
        waiting.start()
        pages = mmap.mmap(-1, 2**20)  # not from what the process has freed before
        pages.write(b"x" * 2**20)
        self.kept += [Path("leak").open("w"), torch.zeros(1), pages, waiting]  # noqa: SIM115
        pl_module.register_forward_hook(lambda *_: None)
        warnings.filterwarnings("ignore", message=f"number {len(self.kept)}")


@pytest.mark.slow
def test_what_grows_is_found(tmp_path):
    leaking = Leaking()
    try:
        with warnings.catch_warnings():
            long_fit(MODEL, 12, tmp_path / "run.jsonl", [leaking])
    finally:
        leaking.end.set()
    found = {line.partition(" grow")[0] for line in grown(read(tmp_path / "run.jsonl"))}
    assert found == {"file descriptors", "threads", "objects", "tensors", "hooks", "warning filters", "memory"}


class Drawing(pl.Callback):
    """Draws one number more than the bare run in epoch 1."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            torch.rand(1)


@pytest.mark.slow
def test_a_run_that_is_disturbed_is_found(tmp_path):
    bare, disturbed = tmp_path / "bare.jsonl", tmp_path / "disturbed.jsonl"
    long_fit(MODEL, 3, bare, [])
    long_fit(MODEL, 3, disturbed, [Drawing()])
    assert unlike(read(disturbed), read(bare)) == [1, 2]


def rows(**columns):
    """Rounds in which nothing changes but these."""
    still = dict.fromkeys((*COUNTED, "memory"), [7] * 20)
    return [dict(zip((*COUNTED, "memory"), values)) for values in zip(*{**still, **columns}.values())]


def test_one_object_in_six_rounds_is_growth_and_what_is_made_once_is_not():
    assert grown(rows()) == []
    assert grown(rows(objects=[i // 6 for i in range(20)])) == ["objects grow: 0, 1, 2"]
    assert grown(rows(objects=[7] * 13 + [18] * 7)) == []
    assert grown(rows(memory=[0] * 10 + [MEMORY_LIMIT + 2**20] * 10)) == ["memory grows by 3.0 MB"]


@pytest.mark.slow
def test_a_process_that_fails_is_a_difference(tmp_path):
    outcome, figures = soak_one("epochs", "no such model", 3, tmp_path)
    assert (outcome.compared, figures) == (0, {})
    assert "KeyError: 'no such model'" in outcome.differences[0]
