"""Several quantities of one Hessian."""

import math
import warnings

import pytest

from lightning_normtheory.callbacks import DiagnosticCallback
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.measurement.curvature import HessianRequest

from support.lit import Classifier, loader, rows, trainer


class Asking(Diagnostic):
    """Requests a quantity of the Hessian; can be told to fail."""

    metrics = ()

    def __init__(self, key, fails=False):
        self.key, self.fails, self.operators = key, fails, []

    def hessian_request(self):
        return HessianRequest(self.evaluate)

    def evaluate(self, hessian):
        self.operators.append(id(hessian.gradient))
        if self.fails:
            raise ValueError("on purpose")
        return float((hessian @ hessian.gradient).norm())

    def measure(self, measurement):
        answer = measurement.curvature.answer(self.key)
        assert measurement.curvature.answer(self.key) is answer
        return {self.key: answer.value}


def asked(*diagnostics):
    callback = DiagnosticCallback(probe=16)
    callback.make_diagnostics = lambda: list(diagnostics)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer([callback], max_epochs=1).fit(Classifier("wn"), loader())
    return rows()[0]


def test_requests_of_several_diagnostics_share_one_gradient_graph():
    first, second = Asking("first"), Asking("second")
    row = asked(first, second)
    assert row["normtheory/first"] == row["normtheory/second"] > 0
    assert first.operators == second.operators
    assert len(first.operators) == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_a_request_that_fails_leaves_the_other_ones_their_answers(failing):
    row = asked(Asking("first", failing == 0), Asking("second", failing == 1))
    names = ["normtheory/first", "normtheory/second"]
    assert math.isfinite(row[names[1 - failing]])
    assert math.isnan(row.get(names[failing], math.nan))
