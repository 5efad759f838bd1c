"""`HessianTopEigenvalue`: the edge of stability."""

import math

import pytest
import torch

from lightning_normtheory.callbacks import HessianTopEigenvalue

from support.hessian_fits import LAMBDA, Descent
from support.lit import fit, loader, trainer


def test_two_over_the_learning_rate_and_the_distance_to_it():
    row = fit(HessianTopEigenvalue(on_error="raise"), Descent(lr=0.1), epochs=1)[0]
    assert row["normtheory/hessian_edge"] == pytest.approx(20.0)
    assert row["normtheory/hessian_edge_distance"] == pytest.approx(20.0 - row[LAMBDA])
    assert "normtheory/hessian_stability_limit" not in row


def test_momentum_has_a_limit_of_its_own():
    row = fit(HessianTopEigenvalue(on_error="raise"), Descent(lr=0.1, momentum=0.9), epochs=1)[0]
    assert row["normtheory/hessian_edge"] == pytest.approx(20.0)
    assert row["normtheory/hessian_stability_limit"] == pytest.approx(38.0)
    assert row["normtheory/hessian_stability_limit_distance"] == pytest.approx(38.0 - row[LAMBDA])


def test_parameter_groups_have_an_edge_each():
    def groups(module):
        first, last = module.net[0].parameters(), module.net[2].parameters()
        return torch.optim.SGD([{"params": first, "name": "back.bone"}, {"params": last, "lr": 0.5}], lr=0.1)

    row = fit(HessianTopEigenvalue(on_error="raise"), Descent("plain", groups), epochs=1)[0]
    edges = {name.split("/")[1]: value for name, value in row.items() if "edge" in name}
    assert edges == {
        "hessian_edge": 4.0,
        "hessian_edge_distance": pytest.approx(4.0 - row[LAMBDA]),
        "hessian_edge__back_bone": 20.0,
        "hessian_edge_distance__back_bone": pytest.approx(20.0 - row[LAMBDA]),
        "hessian_edge__SGD1": 4.0,
        "hessian_edge_distance__SGD1": pytest.approx(4.0 - row[LAMBDA]),
    }


def test_the_edge_is_that_of_the_step_to_come():
    """Lightning has stepped the scheduler before: this is the rate of the next step from the measured weights."""

    def scheduled(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    measured = fit(HessianTopEigenvalue(on_error="raise"), Descent("wn", scheduled), epochs=3)
    assert [row["normtheory/hessian_edge"] for row in measured.values()] == pytest.approx([40.0, 80.0, 160.0])


def test_the_limit_is_the_smallest_of_all_groups():
    def groups(module):
        first, last = module.net[0].parameters(), module.net[2].parameters()
        return torch.optim.SGD([{"params": first, "weight_decay": 1e-4}, {"params": last, "lr": 0.5}], lr=0.1)

    row = fit(HessianTopEigenvalue(on_error="raise"), Descent("plain", groups), epochs=1)[0]
    assert row["normtheory/hessian_stability_limit"] == 4.0


def test_when_a_measurement_fails_nothing_of_the_last_one_stays():
    class Fails(Descent):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.current_epoch == 1 else loss

    run = trainer([HessianTopEigenvalue()], max_epochs=2)
    with pytest.warns(UserWarning, match="finite loss"):
        run.fit(Fails(momentum=0.9), loader())
    ours = {name: float(value) for name, value in run.callback_metrics.items() if "hessian" in name}
    assert ours.pop("normtheory/hessian_edge") == pytest.approx(20.0)
    assert ours.pop("normtheory/hessian_stability_limit") == pytest.approx(38.0)
    assert "normtheory/hessian_stability_limit_distance" in ours
    assert all(math.isnan(value) for value in ours.values())
