"""Several processes with a whole model each, connected by torch.distributed; whatever else is refused, and says why."""

from types import SimpleNamespace

import pytest
from pytorch_lightning.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import nn

from lightning_normtheory.callbacks import HessianTopEigenvalue, MinWeightNorm, NormTheory, NTKLeastEigenvalue, RSCRatio

from support.lit import CLASSES, FEATURES, Classifier


def trainer_of(strategy, world_size=1):
    """With a strategy that is not set up: its real class, which needs other machines than this."""
    return SimpleNamespace(strategy=strategy.__new__(strategy), world_size=world_size)


@pytest.mark.parametrize("callback", [MinWeightNorm, NormTheory])
@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy])
def test_divided_weights_are_refused_before_anything_is_set_up(callback, strategy):
    class Mine(strategy):
        """One that a user has derived."""

    for each in (strategy, Mine):
        message = rf"{each.__name__} divides its weights.*{callback.__name__}.*strategy='ddp'.*weights of a checkpoint"
        with pytest.raises(ValueError, match=message):
            callback().setup(trainer_of(each, 2), Classifier("wn"), "fit")


def test_the_other_package_is_recognized_too():
    import lightning.pytorch.strategies as strategies

    with pytest.raises(ValueError, match="FSDPStrategy divides"):
        NormTheory().setup(trainer_of(strategies.FSDPStrategy), Classifier("wn"), "fit")


def test_processes_that_are_not_connected_are_refused():
    with pytest.raises(ValueError, match=r"connected by torch.distributed, but DDPStrategy runs 2 that are not"):
        NormTheory().setup(trainer_of(DDPStrategy, 2), Classifier("wn"), "fit")


def test_one_process_and_other_stages_are_no_matter():
    for strategy, world_size, stage in ((SingleDeviceStrategy, 1, "fit"), (FSDPStrategy, 2, "validate")):
        assert NormTheory().setup(trainer_of(strategy, world_size), Classifier("wn"), stage) is None


class Synchronized(Classifier):
    def __init__(self):
        super().__init__("plain")
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.SyncBatchNorm(8), nn.ReLU(), nn.Linear(8, CLASSES))


def start(callback, world_size):
    fit = SimpleNamespace(world_size=world_size, callbacks=[callback], strategy=None)
    callback.on_fit_start(fit, Synchronized())
    return [diagnostic.key for diagnostic in callback._active]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("callback", [RSCRatio, HessianTopEigenvalue, NormTheory])
@pytest.mark.parametrize("batch_stats", [None, True])
def test_synchronized_batch_statistics_are_refused(callback, batch_stats):
    with pytest.raises(ValueError, match=r"'net.1' is a SyncBatchNorm.*\(batch_stats=False\)"):
        start(callback(batch_stats=batch_stats), 2)


@pytest.mark.filterwarnings("ignore")
def test_synchronized_layers_with_running_statistics_are_accepted():
    assert "rsc_ratio" in start(NormTheory(batch_stats=False), 2)
    assert start(NTKLeastEigenvalue(), 2) == ["ntk_lambda_min"]  # which uses them by itself
    assert start(MinWeightNorm(), 2) == ["min_weight_norm"]
    assert "rsc_ratio" in start(NormTheory(), 1)  # alone it is a BatchNorm like any other
