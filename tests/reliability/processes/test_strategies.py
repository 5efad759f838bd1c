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

from lightning_normtheory.callbacks import HessianTopEigenvalue, MinWeightNorm, NormTheory, RSCRatio
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.processes import Processes
from lightning_normtheory.model.layers import batch_norm_layers

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


def start(callback, world_size, module=None):
    fit = SimpleNamespace(world_size=world_size, callbacks=[callback], strategy=None)
    callback.on_fit_start(fit, module or Synchronized())
    return [diagnostic.key for diagnostic in callback._active]


@pytest.mark.parametrize("callback", [RSCRatio, HessianTopEigenvalue, NormTheory])
@pytest.mark.parametrize("batch_stats", [None, True])
def test_synchronized_layers_are_measured_with_running_statistics_and_a_warning(callback, batch_stats):
    chosen = callback(batch_stats=batch_stats)
    with pytest.warns(
        UserWarning, match=r"net.1 \(SyncBatchNorm\) with running statistics: torch.*sync_batchnorm"
    ) as said:
        start(chosen, 2)
    assert len([each for each in said if "SyncBatchNorm" in str(each.message)]) == 1
    assert chosen._notes()["measured"]["batch_stats"] == "running (SyncBatchNorm)"


def test_synchronized_layers_without_running_statistics_are_refused():
    module = Synchronized()
    module.net[1] = nn.SyncBatchNorm(8, track_running_stats=False)
    with pytest.raises(ValueError, match=r"SyncBatchNorm 'net.1' with, but it keeps none.*track_running_stats=True"):
        start(RSCRatio(), 2, module)


@pytest.mark.filterwarnings("error:.*SyncBatchNorm")
@pytest.mark.parametrize(("batch_stats", "world_size"), [(False, 2), (None, 1)])
def test_no_warning_of_synchronized_layers_in_one_process_or_as_asked(batch_stats, world_size):
    assert "rsc_ratio" in start(RSCRatio(batch_stats=batch_stats), world_size)
    assert start(MinWeightNorm(), 2) == ["min_weight_norm"]  # which runs no batches


@pytest.mark.parametrize(("count", "training"), [(1, True), (2, False)])
def test_synchronized_layers_are_in_eval_mode_while_several_processes_measure(count, training):
    module, processes = Synchronized(), Processes()
    processes.count = count
    with preserve_state(module, batch_stats=True, processes=processes) as reset_state:
        reset_state()
        assert [layer.training for layer in batch_norm_layers(module).values()] == [training]
    assert module.net[1].training
