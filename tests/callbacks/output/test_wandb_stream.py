"""Definitions, settings and tables for W&B, with a client that only records the calls."""

import random
import warnings
from types import SimpleNamespace
from unittest import mock

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lightning_normtheory.callbacks import MinWeightNorm, NormTheory, RSCRatio
from lightning_normtheory.callbacks.output import wandb

from support.lit import Classifier, loader, rows, trainer
from support.neutral_cases import Recorder

pytestmark = pytest.mark.filterwarnings("ignore")
LAYERS = {"net.0": {"weight_norm": 0.5, "ntk_share": float("nan")}, "net.3": {"ntk_share": 0.25}}


def wandb_logger(kind=pl.loggers.WandbLogger, **arguments):
    """A logger whose run only records the calls."""
    experiment = mock.Mock(["define_metric", "config", "log", "id"], id="x")
    experiment.config = mock.MagicMock(wraps=dict(arguments.pop("config", {})))
    return kind(project="demo", experiment=experiment, **arguments)


def defined(logger):
    return [call.args[0] for call in logger.experiment.define_metric.call_args_list]


def short_fit(logger, *callbacks, **options):
    fit = trainer(callbacks or [MinWeightNorm(on_error="raise")], logger=logger, **options)
    fit.fit(Classifier("bn"), loader())
    return fit


def test_a_disabled_run_is_left_in_peace():
    log = pl.loggers.WandbLogger(project="demo", mode="disabled")
    fit = short_fit(log, NormTheory(on_error="raise"))
    wandb.log_layer_table(fit, LAYERS, epoch=2)
    assert fit.current_epoch == 3
    log.experiment.finish()


def test_each_name_is_defined_once_by_whichever_callback_is_first():
    log = wandb_logger()
    short_fit(log, NormTheory(on_error="raise"), RSCRatio(on_error="raise"))
    names = defined(log)
    assert "normtheory/seconds" in names
    assert len(names) == len(set(names))


def test_a_second_fit_defines_nothing_again_in_the_same_run():
    log = wandb_logger()
    short_fit(log)
    before = defined(log)
    short_fit(log)
    assert defined(log) == before != []


def test_a_name_that_appears_later_is_defined_then():
    log = wandb_logger()
    fit = short_fit(log)
    before = defined(log)
    wandb.define(fit, {"normtheory/rsc_ratio": "rsc_ratio", "normtheory/seconds": "seconds"})
    assert defined(log) == [*before, "normtheory/rsc_ratio"]


def test_the_prefix_of_the_logger_belongs_to_the_names():
    log = wandb_logger(prefix="mine")
    short_fit(log)
    log.experiment.define_metric.assert_any_call(
        "mine-normtheory/min_weight_norm", step_metric="mine-epoch", summary="min,last"
    )
    logged = {name for call in log.experiment.log.call_args_list for name in call.args[0]}
    assert {*defined(log), "mine-epoch"} <= logged


def test_metrics_by_steps_have_the_global_step_as_their_axis_also_if_a_callback_measures_them_by_epochs():
    log = wandb_logger(prefix="mine")
    fit = SimpleNamespace(is_global_zero=True, loggers=[log])
    for names, axis in ((("loss", "seconds"), "epoch"), (("rsc_ratio", "seconds"), "step"), (("seconds",), "epoch")):
        wandb.define(fit, {f"normtheory/{name}": name for name in names}, axis=axis)
    calls = [(call.args[0], call.kwargs["step_metric"]) for call in log.experiment.define_metric.call_args_list]
    assert calls == [
        ("mine-normtheory/loss", "mine-epoch"),
        ("mine-normtheory/seconds", "mine-epoch"),
        ("mine-normtheory/rsc_ratio", "trainer/global_step"),
        ("mine-normtheory/seconds", "trainer/global_step"),
    ]


def test_a_layer_with_a_star_in_its_name_defines_no_pattern():
    log = wandb_logger()
    fit = short_fit(log)
    before = defined(log)
    wandb.define(fit, {"normtheory_layers/weight_norm__a*": "layers/weight_norm__a*"})
    assert defined(log) == before


def test_a_fast_dev_run_defines_nothing():
    log = wandb_logger()
    short_fit(log, fast_dev_run=True)
    assert defined(log) == []
    assert not log.experiment.config.update.called


def test_two_loggers_of_two_runs_or_of_one():
    logs = [wandb_logger(), wandb_logger()]
    short_fit(logs)
    assert defined(logs[0]) == defined(logs[1]) != []
    log = wandb_logger()
    short_fit([log, pl.loggers.WandbLogger(project="demo", experiment=log.experiment)])
    assert len(defined(log)) == len(set(defined(log)))


class Derived(lightning.pytorch.loggers.WandbLogger):
    """A logger derived by a user."""


class WandbLogger(pl.loggers.CSVLogger):
    """Has the name, but is no WandbLogger."""

    @property
    def experiment(self):
        raise AssertionError("this logger is none of our business")


def test_loggers_of_both_packages_are_recognized_and_others_are_not_touched(tmp_path):
    logs = [wandb_logger(kind) for kind in (pl.loggers.WandbLogger, lightning.pytorch.loggers.WandbLogger, Derived)]
    fit = SimpleNamespace(is_global_zero=True, loggers=[WandbLogger(tmp_path), *logs])
    wandb.define(fit, {"normtheory/loss": "loss"})
    assert [defined(log) for log in logs] == [["normtheory/loss"]] * 3


def test_a_trainer_of_the_other_package():
    class Net(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Classifier("bn").net

        forward, configure_optimizers, lr = Classifier.forward, Classifier.configure_optimizers, 0.05

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    log = wandb_logger(lightning.pytorch.loggers.WandbLogger)
    trainer([MinWeightNorm(on_error="raise")], package=lightning.pytorch, logger=log).fit(Net(), loader())
    assert "normtheory/min_weight_norm" in defined(log)


def test_the_config_is_written_once_by_each_callback():
    log = wandb_logger()
    short_fit(log, MinWeightNorm(on_error="raise"), RSCRatio(on_error="raise"))
    assert log.experiment.config.update.call_count == 2
    assert set(log.experiment.config.get("normtheory")) == {"MinWeightNorm", "RSCRatio", "versions"}


def test_a_run_that_fails_does_not_keep_the_other_from_its_definitions():
    logs = [wandb_logger(), wandb_logger()]
    logs[0].experiment.define_metric.side_effect = ConnectionError("gone")
    short_fit(logs, MinWeightNorm())
    assert "normtheory/min_weight_norm" in defined(logs[1])


def test_a_client_that_fails_is_reported_once_and_training_goes_on():
    log = wandb_logger()
    log.experiment.define_metric.side_effect = ConnectionError("gone")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = short_fit(log, MinWeightNorm())
    assert fit.current_epoch == 3
    (message,) = {str(warning.message) for warning in caught if "gone" in str(warning.message)}
    assert len([warning for warning in caught if "gone" in str(warning.message)]) == 1
    assert "training continues without it" in message
    assert sorted(rows()) == [0, 1, 2]


def test_a_client_that_fails_stops_a_run_that_asks_for_it():
    log = wandb_logger()
    log.experiment.define_metric.side_effect = ConnectionError("gone")
    with pytest.raises(ConnectionError, match="gone"):
        short_fit(log, MinWeightNorm(on_error="raise"))


def test_a_hyperparameter_of_our_name_is_not_overwritten():
    log = wandb_logger(config={"normtheory": True})
    with pytest.raises(ValueError, match=r"nothing under 'normtheory'.*but got True.*another name"):
        short_fit(log)


def test_the_table_of_layers_has_a_gap_where_a_quantity_is_not_measured():
    log = wandb_logger(prefix="mine")
    fit = short_fit(log)
    log.experiment.log.reset_mock()
    wandb.log_layer_table(fit, LAYERS, epoch=2, prefix="some")
    (call,) = log.experiment.log.call_args_list
    assert call.kwargs == {}  # with step= the row would be dropped
    logged = call.args[0]
    table = logged.pop("mine-some_layers/table")
    assert logged == {"mine-epoch": 2, "trainer/global_step": 20}
    assert table.columns == ["layer", "weight_norm", "ntk_share"]
    first, last = table.data
    assert first == pytest.approx(["net.0", *LAYERS["net.0"].values()], nan_ok=True)
    assert last == ["net.3", None, 0.25]


def test_no_table_without_layers():
    log = wandb_logger()
    fit = short_fit(log)
    before = log.experiment.log.call_count
    wandb.log_layer_table(fit, {}, epoch=2)
    assert log.experiment.log.call_count == before


class Drawing:
    """A client that draws from every generator in every call."""

    id = "x"

    def __init__(self):
        self.config = mock.Mock()
        self.config.get.return_value = {}

    def define_metric(self, name, **arguments):
        random.random(), np.random.rand(), torch.rand(1)
        random.seed(5)

    def log(self, metrics):
        pass


def test_generators_do_not_notice_what_the_client_draws():
    def recorded(*callbacks):
        recorder = Recorder()
        pl.seed_everything(0)
        short_fit(pl.loggers.WandbLogger(project="demo", experiment=Drawing()), *callbacks, recorder)
        return recorder.seen

    assert recorded() == recorded(NormTheory(on_error="raise"))


def test_training_with_the_real_client_is_bitwise_the_same(tmp_path):
    class Table(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            wandb.log_layer_table(trainer, LAYERS, epoch=trainer.current_epoch)

    def recorded(*callbacks):
        recorder = Recorder()
        log = pl.loggers.WandbLogger(project="demo", save_dir=tmp_path)
        pl.seed_everything(0)
        short_fit(log, *callbacks, recorder)
        log.experiment.finish()
        return recorder.seen

    assert recorded() == recorded(NormTheory(on_error="raise"), Table())
