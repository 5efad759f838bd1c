"""`NTKLeastEigenvalue`: warnings, failures, wrong options."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NTKLeastEigenvalue

from support.kernel_fits import NTK, Seeded, fit
from support.lit import FEATURES, loader, tensors


def test_a_singular_kernel_is_named_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured = fit(NTKLeastEigenvalue(outputs="full", on_error="raise"), Seeded(), data=loader(50, shuffle=False))
    messages = [str(w.message) for w in caught if "rank is at most" in str(w.message)]
    assert len(messages) == 1
    assert "fewer samples" in messages[0]
    assert abs(measured[1][f"{NTK}lambda_min"]) <= measured[1][f"{NTK}lambda_min_floor"]
    assert measured[1][f"{NTK}condition_number"] == math.inf


def test_parameters_without_structure_are_named_once():
    class Bilinear(Seeded):
        def __init__(self):
            super().__init__("plain")
            self.layer = nn.Bilinear(FEATURES, FEATURES, FEATURES)

        def forward(self, x):
            return self.net(self.layer(x, x))

    with pytest.warns(UserWarning, match=r"in some parameters: layer.weight\.") as caught:
        fit(NTKLeastEigenvalue(on_error="raise"), Bilinear())
    assert sum("sample by sample" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize(
    "option",
    [
        {"samples": 0},
        {"samples": 2.5},
        {"outputs": "all"},
        {"directions": 0},
        {"directions": 2, "outputs": "sum"},
    ],
    ids=str,
)
def test_bad_options_stop_before_the_fit(option):
    with pytest.raises(ValueError, match="Expected"):
        NTKLeastEigenvalue(**option)


def test_a_failure_does_not_stop_the_run():
    class Breaks(Seeded):
        def forward(self, x):
            if self.trainer.current_epoch == 1 and len(x) == 20:
                raise RuntimeError("no memory")
            return self.net(x)

    with pytest.warns(UserWarning, match="ntk_lambda_min failed and is logged as NaN: RuntimeError: no memory"):
        measured = fit(NTKLeastEigenvalue(), Breaks(), epochs=3)
    assert math.isnan(measured[1][f"{NTK}lambda_min"])
    assert measured[2][f"{NTK}lambda_min"] > 0


def test_equal_inputs_with_different_labels_are_named():
    x, y = tensors(20)
    data = DataLoader(TensorDataset(torch.cat([x, x]), torch.cat([y, (y + 1) % 3])), 8)
    with pytest.warns(UserWarning, match="20 samples are duplicates. Remove them"):
        fit(NTKLeastEigenvalue(on_error="raise"), Seeded(), data=data)


def test_samples_that_see_each_other_are_named_once():
    class Centered(Seeded):
        def forward(self, x):
            return self.net(x - x.mean(0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(NTKLeastEigenvalue(on_error="raise"), Centered(), epochs=3)
    assert sum("samples interact" in str(w.message) for w in caught) == 1
