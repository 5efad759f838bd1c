"""In every precision, compiled, checkpointed, channels last, half frozen: the same training, the right numbers."""

import math

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_normtheory.callbacks import NormTheory, RSCRatio

from reliability.precision_cases import CASES, SLOW, ReentrantCheckpointed, data, dense, outcome, run
from support.lit import Classifier, loader, rows, trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_training_is_bitwise_the_same_and_the_numbers_are_those_of_its_weights(case, tmp_path):
    assert outcome(case, tmp_path).differences == ()


def test_the_comparison_notices_a_change_of_layout():
    class Careless(RSCRatio):
        def on_train_epoch_end(self, trainer, pl_module):
            for p in pl_module.parameters():
                p.data = p.data.contiguous()

    assert run("channels last", []).seen != run("channels last", [Careless()]).seen


def test_half_precision_on_a_processor_is_bfloat16():
    """As Lightning has it: there is no scaler whose state could change."""
    fit = trainer(precision="16-mixed")
    assert fit.precision == "bf16-mixed"
    assert getattr(fit.precision_plugin, "scaler", None) is None


def test_reentrant_checkpoints_are_refused_with_a_reason():
    torch.manual_seed(0)
    module = ReentrantCheckpointed(dense())
    with pytest.warns(UserWarning, match="use_reentrant=False"):
        trainer([NormTheory()], max_epochs=1).fit(module, DataLoader(data(images=False), 8))
    assert math.isnan(rows()[0]["normtheory/rsc_ratio"])
    assert rows()[0]["normtheory/min_weight_norm"] > 0


def test_a_module_without_trained_parameters_is_left_alone():
    class Frozen(Classifier):
        def configure_optimizers(self):
            return None

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)

    module = Frozen("wn")
    module.requires_grad_(False)
    with pytest.warns(UserWarning, match="RSCRatio leaves out rsc_ratio. .* has no trainable parameter"):
        trainer([RSCRatio()], max_epochs=1).fit(module, loader())
