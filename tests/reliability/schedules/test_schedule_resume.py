"""A run that measures by steps and is resumed at any of them gives the rows of an uninterrupted one."""

import pytest
import pytorch_lightning as pl

from reliability.resume.resume_cases import CASES, EPOCHS, STEPS, STOPS, keepers, train
from reliability.schedules.witness import Witness, Written, different, first_difference, read

pytestmark = pytest.mark.filterwarnings("ignore")
SOME = [stop for stop in (("step", 2), ("step", 7), ("step", 2 * STEPS), ("validation", 0)) if stop in STOPS]
FIRST = 3  # batches of 8 hold the 20 samples of a probe that is copied


def steps_of(hook, number):
    """The steps that had been done when the checkpoint was saved."""
    return number if hook == "step" else (number + 1) * STEPS


def differences(case, n, folder, stops):
    """Stop a run in many places, and compare what the resumed ones measure, digit by digit."""

    def rows(name, checkpoint=None, more=()):
        callbacks = CASES[case].callbacks(probe=20, every_n_steps=n)
        train(case, folder / name, checkpoint, callbacks=callbacks, more=more)
        return read(folder / name)[0]

    whole, found = rows("whole", more=keepers(folder / "saved")), []
    begin = FIRST if "iterable" in case else 1
    assert {step for each in whole.values() for step in each} == {
        step for step in range(begin, EPOCHS * STEPS + 1) if step % n == 0
    }
    for hook, number in stops:
        resumed = rows(f"{hook}{number}", folder / "saved" / hook / f"{number}.ckpt")
        for prefix, expected in whole.items():
            rest = {step: row for step, row in expected.items() if step > steps_of(hook, number)}
            if rest.keys() != resumed.get(prefix, {}).keys():
                found.append(f"{hook} {number}: steps {list(resumed.get(prefix, {}))} instead of {list(rest)}")
                continue
            found += [
                f"{hook} {number}, step {step}, {each}"
                for step, row in rest.items()
                for each in different(row, resumed[prefix][step])
            ]
    return found


@pytest.mark.parametrize(("case", "n"), [("BN's form", 2), ("plain chain, iterable", 3)])
def test_resuming_changes_no_row(tmp_path, case, n):
    assert differences(case, n, tmp_path, SOME[:2]) == []


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("case", ["WeightNorm and BatchNorm", "plain chain, iterable", "BN's form"])
def test_resuming_from_anywhere_changes_no_row(tmp_path, case, n):
    assert differences(case, n, tmp_path, STOPS if n == 7 else SOME) == []


@pytest.mark.slow
def test_each_callback_resumes(tmp_path):
    assert differences("WN's form", 3, tmp_path, SOME) == []


class Saved(pl.Callback):
    """Saves after one batch, also inside of an accumulation window, where Lightning's own callback does not."""

    def __init__(self, path, epoch, batch):
        self.path, self.place = path, (epoch, batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.place:
            trainer.save_checkpoint(self.path)


def resumed(case, folder, checkpoint, *, accumulate=1, **schedule):
    """A run from a checkpoint: what a callback must not change, and the rows of ours if there is a schedule."""
    folder.mkdir()
    witness = Witness(Written(folder))
    callbacks = CASES[case].callbacks(probe=20, **schedule) if schedule else []
    options = {"accumulate_grad_batches": accumulate, "logger": witness.logger, "log_every_n_steps": 1}
    train(case, folder, checkpoint, callbacks=callbacks, more=[witness], **options)
    return witness.seen + witness.logger.users(), read(folder)[0].get("normtheory", {})


@pytest.mark.slow
@pytest.mark.parametrize("case", ["WeightNorm and BatchNorm", "plain chain, iterable"])
def test_a_run_resumed_inside_an_accumulation_window(tmp_path, case):
    """Lightning does not save gradients, so the training goes on otherwise than it would have. It is still undisturbed,
    and measured by steps as by epochs."""
    # Three batches, in windows of two and of one: two steps in an epoch.
    middle = tmp_path / "middle.ckpt"
    callbacks = CASES[case].callbacks(probe=20, every_n_steps=1)
    more = [Saved(middle, 1, 0)]
    train(case, tmp_path / "whole", callbacks=callbacks, more=more, accumulate_grad_batches=2)
    bare, _ = resumed(case, tmp_path / "bare", middle, accumulate=2)
    watched, rows = resumed(case, tmp_path / "steps", middle, accumulate=2, every_n_steps=2)
    _, expected = resumed(case, tmp_path / "epochs", middle, accumulate=2, every_n_epochs=1)
    assert first_difference(bare, watched) == ""
    assert list(rows) == list(expected) == [4, 6, 8]
    assert [different(expected[step], rows[step]) for step in rows] == [[], [], []]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3, 7])
def test_training_resumed_within_an_epoch_is_not_disturbed(tmp_path, n):
    case = "WeightNorm and BatchNorm"
    callbacks = CASES[case].callbacks(probe=20, every_n_steps=n)
    train(case, tmp_path / "whole", more=keepers(tmp_path / "saved"), callbacks=callbacks)
    checkpoint = tmp_path / "saved" / "step" / "5.ckpt"
    bare, _ = resumed(case, tmp_path / "bare", checkpoint)
    watched, rows = resumed(case, tmp_path / "watched", checkpoint, every_n_steps=n)
    assert first_difference(bare, watched) == ""
    assert list(rows) == [step for step in range(6, EPOCHS * STEPS + 1) if step % n == 0]
