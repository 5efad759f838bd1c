"""Random models: training is bitwise the same, and every number is what a dense reference says."""

import dataclasses

import pytest
import pytorch_lightning as pl
import torch

from lightning_normtheory.callbacks import NormTheory

from reliability.strange.strange_models import StrangeModel, strange_model
from reliability.strange.strange_trial import our_callbacks, try_model, try_this

pytestmark = pytest.mark.filterwarnings("ignore")
FEW, SEEDS, SOME, MANY = 12, 40, 160, 300


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.slow] * (s >= FEW)) for s in range(SEEDS)])
def test_a_strange_model_is_measured_exactly_and_left_alone(seed, tmp_path):
    outcome = try_model(seed, tmp_path)
    assert outcome.differences == ()
    assert outcome.compared > 40


@pytest.mark.slow
def test_many_strange_models_are_measured_exactly_and_left_alone(tmp_path):
    """``python -m reliability`` tries MANY."""
    differences = [words for seed in range(SEEDS, SOME) for words in try_model(seed, tmp_path).differences]
    assert differences == []


def test_the_models_are_strange():
    """Whatever the generator can draw, it does draw among the seeds of the long run."""
    plans = [strange_model(seed).plan for seed in range(MANY)]
    blocks = [block for plan in plans for block in plan.blocks]
    kinds = {"linear", "conv", "grouped", "transposed", "lstm", "gru", "attention"}
    assert {block.kind for block in blocks} == kinds
    assert {block.norm for block in blocks} == {"none", "hook", "parametrized", "batch", "layer", "group", "spectral"}
    weight_norms = [block for block in blocks if block.norm in ("hook", "parametrized")]
    assert {"out_proj", "in_proj_weight", "weight_hh_l0", "weight_ih_l0"} <= {block.tensor for block in weight_norms}
    assert {block.dim for block in weight_norms} == {0, 1, None, -1, -2}
    assert {block.frozen for block in blocks} == {"", "g", "v", "layer"}
    for flag in ("residual", "twice", "tied", "checkpointed"):
        assert any(getattr(block, flag) for block in blocks)
    for flag in (
        "manual",
        "dict_batches",
        "regularized",
        "zero_head",
        "outer",
        "remembers",
        "drop_last",
        "second_input",
    ):
        assert any(getattr(plan, flag) for plan in plans)
    assert {plan.returns for plan in plans} == {"tensor", "dict", "tuple"}
    assert not all(plan.twice_differentiable for plan in plans)


class Careless(pl.Callback):
    """Draws a random number."""

    def on_train_epoch_end(self, trainer, pl_module):
        torch.rand(1)


class Wrong(NormTheory):
    """One number is off by a ten-thousandth of itself."""

    name = "ntk_lambda_max"

    def _measure(self, *arguments):
        metrics = super()._measure(*arguments)
        metrics[self.name] *= 1 + 1e-4
        return metrics


class Talkative(NormTheory):
    """Logs a number that nobody knows."""

    def _measure(self, *arguments):
        return {**super()._measure(*arguments), "news": 1.0}


def test_the_trial_notices_a_disturbance(tmp_path):
    outcome = try_this(strange_model(1), lambda model: [*our_callbacks(model), Careless()], tmp_path)
    assert any("training differs" in words for words in outcome.differences)


@pytest.mark.parametrize("name", ["loss", "grad_norm_sq", "ntk_lambda_max", "ntk_change", "hessian_edge"])
def test_the_trial_notices_a_wrong_number(name, tmp_path):
    model = strange_model(1)

    def make(model):
        callback = Wrong(**{**model.plan.options, "probe": model.plan.probe, **model.arguments})
        callback.name = name
        return [callback]

    outcome = try_this(model, make, tmp_path)
    assert any(f"{name} is" in words for words in outcome.differences)


def test_the_trial_notices_a_number_that_nobody_has_looked_at(tmp_path):
    def make(model):
        return [Talkative(**{**model.plan.options, "probe": model.plan.probe, **model.arguments})]

    outcome = try_this(strange_model(1), make, tmp_path)
    assert [words.rpartition("}: ")[2] for words in outcome.differences] == [
        "news is 1.0, and nothing was compared with it"
    ]


def changed(seed: int, **changes) -> StrangeModel:
    model = strange_model(seed)
    return dataclasses.replace(model, plan=dataclasses.replace(model.plan, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dict_batches": True},
        {"second_input": 2, "join": "cat"},
        {"returns": "dict"},
        {"returns": "tuple"},
        {"manual": True},
        {"manual": True, "dict_batches": True, "returns": "dict"},
    ],
    ids=str,
)
def test_loss_and_outputs_are_found(changes, tmp_path):
    simple = {"dict_batches": False, "second_input": 0, "returns": "tensor", "manual": False}
    model = changed(2, **{**simple, **changes})
    assert model.arguments == {}
    outcome = try_this(model, our_callbacks, tmp_path)
    assert outcome.differences == ()
    assert outcome.compared > 40
