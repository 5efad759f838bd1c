"""How often the host waits for the device: counted, so that it does not grow unseen."""

import warnings

import pytest
import torch
from torch import nn

from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.hessian.eigenvalues import leading_eigenpairs
from lightning_normtheory.hessian.operator import hessian_operator
from lightning_normtheory.measuring.preserve import preserve_state

from support.accelerator import device as standin
from support.accelerator import on_device
from support.accelerator.trainer import arguments
from support.lit import FEATURES, Classifier, loader, nets, tensors, trainer


def waits(seen) -> int:
    return sum(seen.counts.values())


@on_device("cuda", "mps")
def test_lanczos_waits_once_for_each_product(device):
    torch.manual_seed(0)
    model, (x, y) = nets()["wn"]().to(device), (each.to(device) for each in tensors(16))
    found = {}
    with hessian_operator(model, nn.functional.cross_entropy, [(x, y)]) as hessian:
        options = {"method": "lanczos", "which": "algebraic", "tol": 1e-12}
        leading_eigenpairs(hessian, 1, max_hvps=1, **options)  # finds out how the device rounds
        for products in (4, 5, 6, 7):  # without a restart
            _ = hessian.gradient  # the solver forgets it
            with standin.synchronizations() as seen:
                leading_eigenpairs(hessian, 1, max_hvps=products, **options)
            found[products] = waits(seen)
    assert [found[products] - found[4] for products in (5, 6, 7)] == [1, 2, 3]


@on_device("cuda", "mps")
def test_a_reset_of_the_model_waits_once_however_large_it_is(device):
    found = []
    for depth in (1, 6):
        layers = [nn.Linear(FEATURES, FEATURES) for _ in range(depth)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(FEATURES)).to(device)
        with preserve_state(model) as reset_state, standin.synchronizations() as seen:
            reset_state()
        found.append(waits(seen))
    assert found == [1, 1]


class Counting(NormTheory):
    def _measure(self, trainer, pl_module):
        with standin.synchronizations("/lightning_normtheory/") as self.seen:
            return super()._measure(trainer, pl_module)


# Of the second measurement of three batches, in all diagnostics: a tenth more than there are.
MOST = {"wn": 440, "bn": 475}


@on_device("cuda")
@pytest.mark.parametrize("net", MOST)
def test_a_measurement_waits_no_more_often_than_it_did(device, net, tmp_path):
    torch.manual_seed(0)
    callback = Counting(on_error="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = trainer([callback], max_epochs=2, default_root_dir=tmp_path, **arguments())
        fit.fit(Classifier(net), loader(48, 16), loader(16, 16, shuffle=False))
    assert waits(callback.seen) <= MOST[net], callback.seen.places.most_common(40)
