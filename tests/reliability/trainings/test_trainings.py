"""The bare callback on trainings in the idioms of other packages: it starts, changes nothing, and is right."""

import math
import warnings
from pathlib import Path

import pytest
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.record import jsonl

from reliability.trainings import games, representations, science, sequences, supervised
from reliability.trainings.training import double, expected, min_weight_norm, twin_of

TRAININGS = {
    name: training
    for module in (supervised, sequences, science, representations, games)
    for name, training in module.TRAININGS.items()
}
PROBE, KERNEL = 14, 10
OPTIONS = {"probe": PROBE, "ntk_samples": KERNEL, "hessian_tol": 1e-4, "on_error": "raise"}


def header(prefix):
    (path,) = Path().rglob("normtheory.jsonl")
    found = [line for line in jsonl.read(path) if "measured" in line and line["settings"]["prefix"] == prefix]
    return found[0]["measured"]


def assert_measured(logged, module, callback, training, player=None):
    """Compare everything that the last epoch logged with the dense reference in float64."""
    twin = twin_of(training, module)
    batches = [(double(batch.data), batch.samples) for batch in callback.probe.batches(0, 1)]
    predictor = player.predictor if player else module.expected_predictor
    right = expected(
        twin,
        batches,
        KERNEL,
        loss=getattr(twin, player.loss if player else "reference_loss"),
        outputs=getattr(twin, player.outputs if player else "reference_outputs") if predictor else None,
        owned=player.owned if player else "",
    )
    value = {name.partition("/")[2]: float(x) for name, x in logged.items() if name.startswith(callback.prefix + "/")}
    layers = [name for name in module.normalized if player is None or name.startswith(player.owned)]
    if layers:
        assert value["min_weight_norm"] == pytest.approx(min_weight_norm(module, layers), rel=1e-6)
    else:
        assert "min_weight_norm" not in value
    if player:
        owned = [layer for name, layer in module.named_modules() if name.startswith(player.owned)]
        assert ("batchnorm_epsilon" in value) == any(isinstance(layer, _BatchNorm) for layer in owned)
    # float32: 1e-7 for each operation, and a few hundred of them.
    assert value["loss"] == pytest.approx(right.loss, rel=1e-5, abs=1e-6)
    assert value["grad_norm_sq"] == pytest.approx(right.grad_norm_sq, rel=1e-4)
    if right.loss > 0:
        assert value["rsc_ratio"] == pytest.approx(right.grad_norm_sq / right.loss, rel=1e-4)
    else:
        assert math.isnan(value["rsc_ratio"])
    assert value["hessian_lambda_max_converged"] == 1
    error = value["hessian_lambda_max_residual"] + 1e-5 * right.hessian_norm
    assert value["hessian_lambda_max"] == pytest.approx(right.lambda_max, abs=error)
    if not predictor:
        assert not {"mean_predictor_grad_norm_sq", "ntk_lambda_min"} & value.keys()
        return
    assert value["mean_predictor_grad_norm_sq"] == pytest.approx(right.mean_predictor_grad_norm_sq, rel=1e-4)
    error = value["ntk_lambda_min_floor"] + 1e-6 * right.kernel_norm
    assert value["ntk_lambda_min"] == pytest.approx(right.kernel_lambda_min, abs=error)
    assert predictor in header(callback.prefix)["predictor"]


ONE_LOSS = [name for name, training in TRAININGS.items() if not training.module.players]
GAMES = [name for name in TRAININGS if name not in ONE_LOSS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ONE_LOSS)
def test_the_bare_callback_measures_what_is_trained(name):
    training, callback = TRAININGS[name], NormTheory(**OPTIONS)
    module, fit, watched = training.fit([callback])
    assert_measured(fit.callback_metrics, module, callback, training)
    assert watched == training.fit()[2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GAMES)
def test_every_player_is_measured_alone(name):
    training = TRAININGS[name]
    players = training.module.players
    callbacks = {
        key: NormTheory(**OPTIONS, parameters=player.parameters, prefix=f"normtheory_{key}")
        for key, player in players.items()
    }
    module, fit, watched = training.fit(list(callbacks.values()))
    for key, player in players.items():
        assert_measured(fit.callback_metrics, module, callbacks[key], training, player)
    assert watched == training.fit()[2]


@pytest.mark.parametrize("name", GAMES)
def test_without_a_choice_of_the_player_one_warning_asks_for_it(name):
    training = TRAININGS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, fit, watched = training.fit([NormTheory(**OPTIONS)])
    (asked,) = [str(warning.message) for warning in caught if "parameters=" in str(warning.message)]
    assert all(loss in asked for loss in module.handed)
    assert len(asked.splitlines()) <= 3
    logged = fit.callback_metrics
    assert "normtheory/loss" not in logged
    if module.normalized:
        assert logged["normtheory/min_weight_norm"] == pytest.approx(
            min_weight_norm(module, module.normalized), rel=1e-6
        )
    assert watched == training.fit()[2]


def test_the_table_is_complete():
    assert len(TRAININGS) >= 25
