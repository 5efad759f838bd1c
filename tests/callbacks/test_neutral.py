"""Training with the callbacks is bitwise equal to training without them."""

import threading
from functools import cache

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn

from lightning_normtheory.callbacks import HessianTopEigenvalue, HessianTrace, MinWeightNorm, NormTheory, RSCRatio
from lightning_normtheory.measuring.snapshot import Snapshot

from support.lit import CLASSES, FEATURES, Classifier, loader, trainer
from support.neutral_cases import CASES, run

# Cases in which second derivatives meet what the step or the loader does. The rest is slow, and measured alike.
QUICK = ("weightnorm", "batchnorm", "weights written in the step", "lstm dropout", "iterable", "dict batches")


@cache
def run_bare(case):
    return run(case, [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_training_is_bitwise_the_same(case):
    bare = run_bare(case)
    watched = run(case, [NormTheory(on_error="raise", **CASES[case][2])])
    assert len(bare) == len(watched)
    for position, (a, b) in enumerate(zip(bare, watched)):
        assert a == b, f"first difference in record {position} of {len(bare)}"


@pytest.mark.filterwarnings("ignore")
def test_queues_of_a_loaders_workers_are_never_set_back(monkeypatch):
    """A message that a thread sends meanwhile would be lost, or sent again, and the loader would wait forever."""
    visited, remember = set(), Snapshot._remember

    def note(self, value):
        visited.add(type(value))
        return remember(self, value)

    monkeypatch.setattr(Snapshot, "_remember", note)
    run("iterable, 2 workers", [NormTheory(on_error="raise", **CASES["iterable, 2 workers"][2])])
    assert torch.nn.Linear in visited
    assert not {each for each in visited if "Loader" in each.__name__ or "Fetcher" in each.__name__}
    assert threading.Condition not in visited


def test_the_comparison_notices_a_disturbance():
    class Careless(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            torch.rand(1)

    assert run("batchnorm", []) != run("batchnorm", [Careless()])


def test_metrics_that_the_module_completes_at_the_end_of_its_epoch():
    """Compare without the Recorder, which reads the logged values in both runs."""

    class Late(Classifier):
        def __init__(self):
            super().__init__("wn")
            self.total = torchmetrics.SumMetric()

        def training_step(self, batch, batch_idx):
            self.total.update(1.0)
            self.log("total", self.total, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.total.update(1000.0)

    def total(callbacks):
        fit = trainer(callbacks, max_epochs=1)
        fit.fit(Late(), loader())
        return float(fit.callback_metrics["total"])

    assert total([]) == total([NormTheory(on_error="raise")]) == 1007


def test_several_callbacks_at_once():
    together = [MinWeightNorm(), RSCRatio(on_error="raise", probe=16), NormTheory(prefix="other", on_error="raise")]
    assert run("batchnorm", []) == run("batchnorm", together)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_curvature_in_low_memory_of_the_predictor_and_its_trace(case):
    """Cover the options that `NormTheory` does not use: forward passes in every product, vmap, Lanczos."""
    options = {"method": "lanczos", "memory": "low", "predictor_samples": 3, "max_hvps": 4}
    trace = HessianTrace(hvps=12, layers=True, on_error="raise", **CASES[case][2])
    assert run_bare(case) == run(case, [HessianTopEigenvalue(on_error="raise", **options, **CASES[case][2]), trace])


class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, CLASSES))

    forward, training_step, validation_step = Classifier.forward, Classifier.training_step, Classifier.validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


def test_the_other_package():
    CASES["other package"] = (Module, loader, {}, {})
    try:
        bare = run("other package", [], lightning.pytorch)
        assert bare == run("other package", [NormTheory(on_error="raise")], lightning.pytorch)
    finally:
        del CASES["other package"]


def test_a_failing_diagnostic_leaves_no_trace():
    def fails(module, batch):
        module.net[0].weight.data.zero_()
        module.train(False)
        torch.rand(3)
        fails.calls += 1
        if fails.calls > 1:  # the first call is the trial at fit start
            raise RuntimeError("on purpose")
        return module(batch[0])

    fails.calls = 0
    with pytest.warns(UserWarning, match="on purpose"):
        watched = run("batchnorm", [RSCRatio(predict=fails)])
    assert watched == run("batchnorm", [])


def test_loggers_see_no_trial_of_the_step(tmp_path):
    class Talkative(Classifier):
        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_scalar("direct", 1.0, self.global_step)
            self.logger.log_metrics({"metrics": 1.0})
            return super().training_step(batch, batch_idx)

    class Experiment:
        def __init__(self):
            self.calls = 0

        def add_scalar(self, *args):
            self.calls += 1

    class Log(pl.loggers.logger.DummyLogger):
        def __init__(self):
            super().__init__()
            self.metrics, self.inner = [], Experiment()
            self.save_dir_, self._version = str(tmp_path), 0

        experiment = property(lambda self: self.inner)
        save_dir = property(lambda self: self.save_dir_)

        def log_metrics(self, metrics, step=None):
            self.metrics.append((sorted(metrics), step))

    def calls(callbacks):
        log = Log()
        torch.manual_seed(0)
        trainer(callbacks, logger=log).fit(Talkative(), loader())
        return log.inner.calls, [m for m in log.metrics if m[0] == ["metrics"]]

    assert calls([]) == calls([NormTheory(on_error="raise")])
