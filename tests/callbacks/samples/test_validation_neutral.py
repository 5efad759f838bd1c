"""Reading the validation samples leaves the training bitwise the same."""

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from support.gap_cases import GapCallback, fit, unseen
from support.lit import CLASSES, FEATURES, Augmented, Classifier, Stream, rows, trainer
from support.neutral_cases import OtherRecorder, Recorder, generators, state


def noisy_stream():
    return DataLoader(Stream(20), 8)


def noisy_set(**kwargs):
    return DataLoader(Augmented(20), 8, **kwargs)


class Counted(Classifier):
    """Counts how often its validation loader is created; its training depends on the validated data."""

    def __init__(self, data):
        super().__init__("bn-dropout")
        self.data, self.asked, self.seen = data, 0, 0.0

    def val_dataloader(self):
        self.asked += 1
        return self.data()

    def validation_step(self, batch, batch_idx):
        self.seen += float(batch[0].sum()) + float(torch.rand(1))
        super().validation_step(batch, batch_idx)


NEUTRAL = {
    "plain": (unseen, {}),
    "augmentation": (noisy_set, {}),
    "augmentation, shuffled": (lambda: noisy_set(shuffle=True), {}),
    "augmentation, worker": (lambda: noisy_set(num_workers=1, persistent_workers=True), {}),
    "iterable": (noisy_stream, {}),
    "no sanity check": (noisy_set, {"num_sanity_val_steps": 0}),
    "every second epoch": (noisy_set, {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}),
    "within the epoch": (noisy_stream, {"val_check_interval": 0.5}),
    "reloaded": (noisy_set, {"reload_dataloaders_every_n_epochs": 1}),
    "no validation": (noisy_set, {"limit_val_batches": 0}),
    "overfit": (noisy_set, {"overfit_batches": 2}),
}


def record_of(case, callbacks, package=pl):
    data, arguments = NEUTRAL[case]
    package.seed_everything(1)
    recorder = Recorder()
    run = trainer([*callbacks, recorder], **arguments)
    module = Counted(data)
    run.fit(module, noisy_set(shuffle=True))
    recorder.note(state(run, module), generators(), module.asked)
    return recorder.seen, module.asked


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", NEUTRAL)
def test_training_is_bitwise_the_same(case):
    bare, asked = record_of(case, [])
    callback = GapCallback(probe=12, on_error="raise")
    watched, asked_when_watched = record_of(case, [callback])
    assert asked == asked_when_watched
    assert len(bare) == len(watched)
    for position, (a, b) in enumerate(zip(bare, watched)):
        assert a == b, f"first difference in record {position} of {len(bare)}"
    assert ("normtheory/gap" in rows()[2]) == (case != "no validation")


def test_the_set_is_left_as_it_was_and_read_once():
    data = Augmented(20)
    python = data.own["python"].getstate()
    found = fit(None, DataLoader(data, 8, num_workers=1), epochs=3)  # only the probe is read in this process
    assert (data.asked, data.cache, data.own["python"].getstate()) == ([], {}, python)
    assert len(found.samples) == 20


def test_the_other_package():
    class Module(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

        forward, training_step = Classifier.forward, Classifier.training_step
        validation_step = Classifier.validation_step

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.05)

    def run(callbacks):
        lightning.pytorch.seed_everything(1)
        recorder = OtherRecorder()
        trainer([*callbacks, recorder], package=lightning.pytorch).fit(Module(), noisy_set(), noisy_set())
        return recorder.seen

    assert run([]) == run([GapCallback(on_error="raise")])
    assert "normtheory/gap" in rows()[2]
