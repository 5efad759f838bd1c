"""Mistakes are reported at fit start, with the remedy; only a wrong argument stops a fit."""

import math
import re
import warnings
from contextlib import nullcontext

import pytest
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import HessianTopEigenvalue, MinWeightNorm, NormTheory, NTKLeastEigenvalue, RSCRatio

from support.lit import Classifier, Stream, as_dict, loader, rows, tensors, trainer

ALL = [MinWeightNorm, RSCRatio, HessianTopEigenvalue, NormTheory]
NEEDS_DATA = [RSCRatio, HessianTopEigenvalue, NormTheory]
MAIN = {callback: "normtheory/rsc_ratio" for callback in ALL}
MAIN[HessianTopEigenvalue] = "normtheory/hessian_lambda_max"


class Manual(Classifier):
    def __init__(self, net="wn"):
        super().__init__(net)
        self.automatic_optimization = False
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


def cross_entropy(module, batch):
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


class Counts(Classifier):
    """Counts its steps on the class, which snapshots do not restore."""

    steps = 0

    def optimizer_step(self, *args, **kwargs):
        Counts.steps += 1
        return super().optimizer_step(*args, **kwargs)


@pytest.fixture(autouse=True)
def _fresh_count():
    Counts.steps = 0


def assert_refused(callback, module, data, match, error=ValueError):
    """Assert that the fit stops with a message before the first step."""
    fit = trainer([callback])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=match):
            fit.fit(module, data)
    assert Counts.steps == 0


def assert_left_out(callback, module, data, match):
    """Assert that the fit goes on without some diagnostics, and that one warning says why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = trainer([callback], max_epochs=1)
        fit.fit(module, data)
    (message,) = [str(w.message) for w in caught if "leaves out" in str(w.message)]
    assert re.search(match, message, re.DOTALL), message
    assert message.count("\n") < 3
    assert fit.current_epoch == 1
    return fit, message


def test_no_normalized_layer():
    fit, _ = assert_left_out(
        MinWeightNorm(), Counts("plain"), loader(), "has none.*Add torch.nn.utils.parametrizations.weight_norm"
    )
    assert "normtheory/min_weight_norm" not in fit.callback_metrics


def test_no_normalized_layer_is_no_obstacle_to_the_others():
    trainer([RSCRatio(on_error="raise")], max_epochs=1).fit(Classifier("plain"), loader())
    with pytest.warns(UserWarning, match="NormTheory leaves out min_weight_norm.*has none"):
        trainer([NormTheory(on_error="raise")], max_epochs=1).fit(Classifier("plain"), loader())


def test_batchnorm_without_a_known_feeding_layer_says_why():
    class First(Counts):
        def __init__(self):
            super().__init__("plain")
            self.net.insert(0, nn.BatchNorm1d(6))

    assert_left_out(MinWeightNorm(), First(), loader(), "BatchNorm 'net.0': it is fed by the argument 'x'")


def test_batchnorm_without_a_known_feeding_layer_beside_others():
    class Partly(Classifier):
        def __init__(self):
            super().__init__("bn")
            self.net.insert(0, nn.BatchNorm1d(6))

    with pytest.warns(
        UserWarning,
        match="1 BatchNorm layers normalize no layer's output.*'net.0': it is fed by the argument 'x'",
    ):
        trainer([MinWeightNorm()], max_epochs=1).fit(Partly(), loader())
    assert set(rows()[0]) == {
        "normtheory/min_weight_norm",
        "normtheory_layers/weight_norm__net_1",
        "normtheory/seconds",
    }


@pytest.mark.parametrize("callback", NEEDS_DATA)
def test_manual_optimization_needs_no_loss(callback):
    """The loss is what the step hands to manual_backward; the same function given by hand gives the same numbers."""
    found = []
    for arguments in ({}, {"loss": cross_entropy}):
        torch.manual_seed(0)
        module = Manual()
        fit = trainer([callback(on_error="raise", **arguments)], max_epochs=1)
        fit.fit(module, loader())
        assert module.steps == 7  # only the user's own steps
        found.append(float(fit.callback_metrics[MAIN[callback]]))
    assert math.isfinite(found[0])
    assert found[0] == found[1]


def test_manual_optimization_does_not_matter_without_data():
    trainer([MinWeightNorm(on_error="raise")], max_epochs=1).fit(Manual(), loader())
    assert math.isfinite(rows()[0]["normtheory/min_weight_norm"])


def test_a_step_on_the_iterator_needs_a_loss():
    class Iterates(Counts):
        def training_step(self, dataloader_iter):
            return cross_entropy(self, next(dataloader_iter)[0])

    example = r"Pass loss=lambda module, batch: criterion\(module\(batch\[0\]\), batch\[1\]\), predict="
    assert_left_out(RSCRatio(), Iterates("wn"), loader(), f"dataloader_iter.*{example}")


class DictBatches(Counts):
    def training_step(self, batch, batch_idx):
        return cross_entropy(self, (batch["image"], batch["label"]))


class Functional(DictBatches):
    """Computes its loss without a call of forward or of a submodule."""

    def training_step(self, batch, batch_idx):
        first, _, last = self.net
        hidden = nn.functional.linear(batch["image"], first.weight, first.bias).tanh()
        return nn.functional.cross_entropy(nn.functional.linear(hidden, last.weight, last.bias), batch["label"])


def test_without_a_predictor_the_loss_is_measured():
    fit, message = assert_left_out(
        NormTheory(on_error="raise"),
        Functional("wn"),
        loader(collate_fn=as_dict),
        r"leaves out ntk_lambda_min, linearity_b, rademacher_bound, progressive_error_bound\..*"
        r"no call of forward or of a submodule.*Pass predict=lambda module, batch: module\(batch\['image'\]\)\."
        r" A batch is a dict \{'image': Tensor \(8, 6\)",
    )
    assert "loss=" not in message
    measured = (
        "rsc_ratio",
        "loss",
        "grad_norm_sq",
        "hessian_lambda_max",
        "min_weight_norm",
        "certificate_rate_measured",
    )
    for name in measured:
        assert math.isfinite(fit.callback_metrics[f"normtheory/{name}"])
    assert "normtheory/mean_predictor_grad_norm_sq" not in fit.callback_metrics


@pytest.mark.parametrize(
    ("predict", "match"),
    [
        (lambda module, batch: {"logits": module(batch[0])}, r"Expected a tensor.*but got a dict"),
        (lambda module, batch: module(batch[0]).argmax(1), r"floating-point outputs .* but got torch.int64"),
        (lambda module, batch: module(batch[0], 3), "passed as predict= failed"),
        (lambda module, batch: module(batch["x"]), "passed as predict= failed"),
    ],
)
def test_a_predictor_that_fails(predict, match):
    assert_refused(RSCRatio(predict=predict), Counts("wn"), loader(), match)


@pytest.mark.parametrize(
    ("result", "match", "stopped"),
    [
        (lambda self, batch: None, "return the loss", False),
        (lambda self, batch: {"objective": 1.0}, "return the loss", True),
        (lambda self, batch: self(batch[0]).sum(1), r"scalar loss, but got a tensor of shape \(8,\)", True),
    ],
)
def test_a_step_without_a_usable_loss(result, match, stopped):
    class Strange(Counts):
        def training_step(self, batch, batch_idx):
            return result(self, batch)

    # Lightning itself stops at a step that returns something else than a loss.
    stops = pytest.raises((MisconfigurationException, RuntimeError), match=r"training_step|scalar outputs")
    with stops if stopped else nullcontext():
        assert_left_out(RSCRatio(), Strange("wn"), loader(), match)


def test_an_iterable_dataset_is_tried_on_its_first_batch():
    data = DataLoader(Stream(), 8, collate_fn=as_dict)
    assert_left_out(NTKLeastEigenvalue(), Functional("wn"), data, "leaves out ntk_lambda_min")


@pytest.mark.parametrize(
    ("choice", "match"), [(3, "returns 1"), ("head", "chooses none of"), (lambda module: [], "none")]
)
def test_parameters_that_choose_nothing(choice, match):
    assert_refused(RSCRatio(parameters=choice), Counts("wn"), loader(), match)


@pytest.mark.parametrize("callback", NEEDS_DATA)
@pytest.mark.parametrize("empty", ["no samples", "all dropped"])
def test_an_empty_loader(callback, empty):
    data = (
        loader(n=5, batch_size=8, drop_last=True) if empty == "all dropped" else DataLoader(TensorDataset(*tensors(0)))
    )
    assert_refused(callback(), Counts("wn"), data, "empty.*Check the dataset")


def test_no_training_asked_for_is_no_mistake():
    for nothing in ({"max_epochs": 0}, {"limit_train_batches": 0}):
        fit = trainer([NormTheory()], **nothing)
        fit.fit(Classifier("wn"), loader())
        assert fit.global_step == 0


@pytest.mark.parametrize("callback", ALL)
def test_unknown_arguments(callback):
    with pytest.raises(TypeError, match=r"has no argument 'every_n_epoch'. Did you mean 'every_n_epochs'"):
        callback(every_n_epoch=2)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"every_n_epochs": 0}, "positive integer, but got 0"),
        ({"probe": -3}, "positive integer, but got -3"),
        ({"batch_stats": "running"}, "True, False or None, but got 'running'"),
        ({"prefix": "a/b"}, "without slash or dot.*'a/b'"),
        ({"on_error": "ignore"}, "'warn' or 'raise', but got 'ignore'"),
        ({"loss": 3}, "function of"),
        ({"parameters": 1.5}, "index of an optimizer, name patterns, or a function"),
        ({"parameters": True}, "index of an optimizer, name patterns, or a function"),
    ],
)
def test_arguments_are_checked_at_once(arguments, match):
    with pytest.raises((ValueError, TypeError), match=match):
        RSCRatio(**arguments)


def test_two_callbacks_with_the_same_names():
    with pytest.raises(RuntimeError, match="state_key"):
        trainer([RSCRatio(), RSCRatio(probe=32)])
    trainer([RSCRatio(), RSCRatio(probe=32, prefix="small")])


def test_namesakes_with_different_arguments_are_noticed():
    with pytest.warns(UserWarning, match="RSCRatio and NormTheory measure normtheory/.* another prefix="):
        trainer([RSCRatio(probe=8), NormTheory()], max_epochs=1).fit(Classifier("wn"), loader())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer([MinWeightNorm(), RSCRatio(), NormTheory()], max_epochs=1).fit(Classifier("wn"), loader())
    assert not [w for w in caught if "another prefix=" in str(w.message)]


def test_lazy_layers_are_refused_before_they_are_disturbed():
    class Lazy(Counts):
        def __init__(self):
            super().__init__("wn")
            self.net.append(nn.LazyLinear(3))

    assert_refused(RSCRatio(), Lazy(), loader(), "still lazy. Run one batch through the model first")


def test_a_loss_of_one_entry_is_a_scalar():
    class OneEntry(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).reshape(1)

    fit = trainer([RSCRatio(on_error="raise")], max_epochs=1)
    fit.fit(OneEntry("wn"), loader())
    assert math.isfinite(fit.callback_metrics["normtheory/rsc_ratio"])


def test_a_subclass_may_take_more_arguments():
    class Mine(RSCRatio):
        def __init__(self, note="", **arguments):
            super().__init__(**arguments)

    assert Mine(note="a", probe=8).probe.samples == 8


class FrozenBatchNorm(Counts):
    """Trains a BatchNorm net on single samples, with BatchNorm in eval mode."""

    def on_train_epoch_start(self):
        self.net[1].eval()


def test_batches_of_one_sample_under_batchnorm():
    single = loader(batch_size=1)
    fit = trainer([RSCRatio(on_error="raise")], max_epochs=1)
    fit.fit(FrozenBatchNorm("bn"), single)  # each BatchNorm in the mode in which it is trained
    assert math.isfinite(fit.callback_metrics["normtheory/rsc_ratio"])
    assert_left_out(RSCRatio(batch_stats=True), FrozenBatchNorm("bn"), single, "more than 1 value per channel")


def test_running_statistics_that_do_not_exist():
    class NoRunning(Counts):
        def __init__(self):
            super().__init__("bn")
            self.net[1] = nn.BatchNorm1d(8, track_running_stats=False)

    assert_refused(
        RSCRatio(batch_stats=False), NoRunning(), loader(), "'net.1' keeps none.*Use batch_stats=True or None"
    )
