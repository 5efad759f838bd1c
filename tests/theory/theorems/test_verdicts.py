"""Each assumption of each theorem: where only this one fails, the verdict names it and does not say "applies"."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_normtheory import applicable_theorems, empirical_ntk
from lightning_normtheory.theorems.descent import dgm_condition
from lightning_normtheory.theorems.initialization import why_not_gaussian
from lightning_normtheory.theorems.papers.bn_form import batchnorm_form
from lightning_normtheory.theorems.papers.dgm import dgm_form
from lightning_normtheory.theorems.problem import network_problem
from lightning_normtheory.theorems.verdicts.facts import Facts, Run
from lightning_normtheory.theorems.verdicts.table import judge_run, judge_theorems

from support.theory.theorem_cases import DGMNetwork, square, unit_samples
from support.theory.verdict_cases import (
    BN_CASES,
    CASES,
    RATE,
    WIDTH,
    Residual,
    bn,
    dgm,
    gaussian,
    lin,
    rsc,
    run_with,
    valued,
    wn,
)


def judged(case, key, run=True):
    rows = applicable_theorems(case.net, case.x, case.y, case.loss, case.run if run else None)
    return next(row for row in rows if row.key == key)


def failing(row):
    return [each for part in ("network", "run") for each in row.failing(part)]


@pytest.mark.parametrize("key", ["wn_5_1", "wn_6_1", "rsc_5_1", "dgm_4_1", "dgm_4_2", "lin_3_2"])
def test_a_network_and_a_run_that_fit(key):
    made = {"wn_5_1": wn, "wn_6_1": wn, "rsc_5_1": rsc, "lin_3_2": lin, "dgm_4_1": dgm}
    case = made[key]() if key in made else dgm(alpha=3.0)
    row = judged(case, key)
    assert failing(row) == []
    assert row.verdict == "applies"
    unchecked = {each.name.split(" ")[0] for each in row.unchecked}
    assert (
        unchecked
        == {
            "wn_5_1": set(),
            "wn_6_1": {"i.i.d."},
            "rsc_5_1": set(),
            "dgm_4_1": {"‖y‖_∞", "m"},
            "dgm_4_2": {"‖y‖_∞", "m"},
            "lin_3_2": {"m", "‖θ"},
        }[key]
    )
    assert judged(case, key, run=False).verdict == "fits"  # without a run nothing applies


IDS = [f"{key}-{name}-{found}" for key, _, name, found in CASES]


@pytest.mark.parametrize(("key", "make", "name", "found"), CASES, ids=IDS)
def test_the_only_assumption_that_fails_is_named(key, make, name, found):
    row = judged(make(), key)
    (wrong,) = failing(row)
    assert wrong.name.startswith(name)
    assert found in wrong.found
    assert any(found in reason for reason in row.reasons)
    assert row.verdict != "applies"
    assert row.verdict == ("fits" if wrong.part == "run" else "does not apply" if wrong.needed else "generalized")


@pytest.mark.parametrize(("make", "name", "found"), BN_CASES, ids=[case[1] or "as asked" for case in BN_CASES])
def test_bn_never_applies_and_the_assumption_is_named(make, name, found):
    row = judged(make(), "bn_2_1")
    assert row.verdict == "does not apply"
    others = [each for each in failing(row) if not each.name.startswith((WIDTH, RATE))]
    assert [each.name[: len(name)] for each in others] == ([name] if name else [])
    assert all(found in each.found for each in others)


def test_what_bn_asks_beside_the_width():
    """The width and the step are the only two that fail: no run in PyTorch reaches the width."""
    assert [each.name.split(" ")[0] for each in failing(judged(bn(), "bn_2_1"))] == ["m", "η"]
    case = bn()
    asked = float(judged(case, "bn_2_1").failing("run")[0].found.split("not ")[1])
    assert [each.name[:8] for each in failing(judged(run_with(case, rate=asked), "bn_2_1"))] == ["m within"]


def test_theorem_2_2_of_bn_is_never_without_the_note_that_it_is_unproved():
    row = judged(bn(), "bn_2_2")
    assert [each.name for each in row.unchecked] == ["a proof"]
    wide = tuple(each for each in row.assumptions if each.part == "network" and each.state != "fails")
    found = judge_run(row._replace(verdict="fits", reasons=(), assumptions=wide), Run(rate=0.1, asked_rate=0.1))
    assert found.verdict == "applies"
    assert any("as printed, unproved" in reason for reason in found.reasons)
    assert judge_run(row._replace(assumptions=wide), Run(batches="batches of 4")).verdict == "fits"


def test_what_cannot_be_checked_is_named_and_does_not_hold():
    partly = judged(run_with(wn(), probe="measured on 4 of 8 samples"), "wn_5_1")
    assert [each.name for each in partly.unchecked] == ["α > 0 (A3.1)"]
    assert "the paper's α = 0.1, but measured on 4 of 8 samples" in partly.unchecked[0].found
    few = judged(rsc(net=gaussian(width=32)), "rsc_5_1")
    assert {each.name for each in few.unchecked} == {
        "W_0 ~ N(0, σ₀²) with one σ₀ (Assumption 2)",
        "v_0 is a random direction (Assumption 2)",
    }
    longer = judged(run_with(wn(), rate=2.0), "wn_5_1")  # than the step to which α and β belong
    assert [(each.name, each.found[:20]) for each in longer.unchecked] == [("η < 2/β", "the paper's ηβ = 1.6")]
    unmeasured = judged(run_with(wn(), values={"loss": 1.0}), "wn_5_1")
    assert [each.name for each in unmeasured.unchecked] == ["α > 0 (A3.1)", "η < 2/β", "v within ρ₁ of v_0 (A3.2)"]
    assert judged(run_with(wn(), values={}), "wn_5_1").verdict == "fits"  # before the first measurement


@pytest.mark.parametrize(
    ("key", "make", "names"),
    [
        ("wn_6_1", wn, ["‖x_i‖ = 1 (Assumption 2)", "|y| ≤ 1"]),
        ("rsc_5_1", rsc, ["‖x_i‖ = √3 (Assumption 2)"]),
        ("dgm_4_1", dgm, ["‖x_i‖ ≤ 1 (Assumption 1)", "no two samples are parallel (Assumption 1)"]),
        ("bn_2_1", bn, ["‖x̄_i‖ ≤ 1", "y = ±1", "γ_a + γ_c > 0 (Assumption 1.2)"]),
    ],
)
def test_what_holds_on_some_samples_cannot_be_checked_for_all(key, make, names):
    case = make()
    problem = network_problem(case.net, case.x, case.y, case.loss)
    outputs = case.net(case.x)
    forms = [form(case.net, case.x, outputs) for form in (dgm_form, batchnorm_form)]
    for n, expected in ((8, []), (100, names)):
        rows = judge_theorems(Facts(problem, *forms, case.y, samples=n, examined=8))
        row = next(row for row in rows if row.key == key)
        assert [
            each.name for each in row.unchecked if "8 of 100" in each.found and "width" not in each.name
        ] == expected


def test_what_fails_on_some_samples_fails_for_all():
    case = wn()
    problem = replace(network_problem(case.net, case.x, case.y, case.loss), x_norms=(2.0, 2.0))
    (wrong,) = judge_theorems(Facts(problem, samples=100, examined=8))[0].failing("network")
    assert wrong.found == "‖x‖ is 2, not 1"


def test_remark_4_1_is_a_note():
    row = judged(rsc(net=gaussian(sigma=1.0)), "rsc_5_1")
    assert row.verdict == "applies"
    assert any("undesirable" in reason for reason in row.reasons)
    assert not any("undesirable" in reason for reason in judged(rsc(), "rsc_5_1").reasons)


def test_exp_is_smooth_with_unbounded_derivatives():
    class Exp(nn.Module):
        def forward(self, x):
            return x.exp()

    row = judged(lin(net=gaussian(sigma=1.0, head="normal", activation=Exp)), "lin_3_2")
    assert [each.found for each in failing(row)] == ["the activation exp has unbounded derivatives"]


def test_the_step_of_a_scaled_loss_is_rescaled():
    """η‖Λ‖ of DGM's loss; a mean over 8 samples steps 2/8 as far, so its η may be 4 times as large."""
    row = judged(run_with(dgm(loss=square), rate=1.3), "dgm_4_1")
    step = next(each for each in row.assumptions if each.name.startswith("η‖Λ‖"))
    assert (step.state, step.found) == ("holds", "η‖Λ‖ = 0.325")


def test_a_gaussian_start_passes_and_others_do_not():
    """200 Gaussian tensors of 4 sizes pass; uniform, truncated, heavy-tailed and shifted ones do not."""
    generator = torch.Generator().manual_seed(0)
    for n in (200, 300, 2000, 20000):
        for _ in range(50):
            z = 0.3 * torch.randn(n, generator=generator)
            assert why_not_gaussian(z, 0.3) == ("", True)
            assert why_not_gaussian(z) == ("", True)
        z = torch.randn(10 * n, generator=generator)
        others = [
            torch.rand(n, generator=generator) - 0.5,
            z[z.abs() < 2][: max(n, 1000)],
            torch.randn(max(n, 2000), generator=generator) ** 3,
            torch.randn(n, generator=generator).sign(),
            torch.randn(n, generator=generator) + 1,
        ]
        assert all(why_not_gaussian(other)[0] for other in others)
    assert why_not_gaussian(torch.zeros(300))[0]
    assert why_not_gaussian(torch.tensor([math.nan] * 300))[0]
    assert why_not_gaussian(torch.randn(20, generator=generator)) == ("", False)


def test_the_number_of_cases():
    assert len(CASES) + len(BN_CASES) >= 60
    names = {(key, name) for key, _, name, _ in CASES}
    for key, make in (("wn_5_1", wn), ("wn_6_1", wn), ("rsc_5_1", rsc), ("dgm_4_1", dgm), ("lin_3_2", lin)):
        checked = [each.name for each in judged(make(), key).assumptions if each.state == "holds"]
        without = {each for each in checked if not any(each.startswith(name) for of, name in names if of == key)}
        # A network outside of every class with a known complexity is no chain either.
        assert without <= {"a class with a known complexity", "f is a chain of layers"}


def test_dgm_condition_is_not_met_by_rounding():
    held = 0
    for seed in range(20):
        x = unit_samples(6, 50, seed)
        x[1] = x[0]
        net = DGMNetwork(50, 64, 1.0)
        kernel = empirical_ntk(net, x)
        held += dgm_condition(dgm_form(net, x, net(x)), kernel.lambda_min, kernel.floor).holds
    assert held == 0


def test_a_run_is_needed_to_apply():
    assert {row.verdict for row in applicable_theorems(wn().net, wn().x, wn().y, wn().loss)} <= {
        "fits",
        "generalized",
        "does not apply",
    }
    assert judged(valued(wn(), wn_alpha=math.nan), "wn_5_1").verdict != "applies"


def test_dgms_radii_cannot_be_checked_if_they_are_not_measured_or_of_a_part():
    for case, found in (
        (run_with(dgm(), values={"loss": 1.0}), "not measured"),
        (run_with(dgm(), kernel_samples=4), "max ‖v − v₀‖ = 0.0001, R_v = 0.001"),
        (valued(dgm(), dgm_radius_g=math.nan), "not measured"),
    ):
        row = judged(case, "dgm_4_1")
        (radii,) = [each for each in row.unchecked if each.name.startswith("‖v_k")]
        assert found in radii.found
        assert row.verdict == "applies"
    far = run_with(valued(dgm(), weightnorm_displacement_v=0.01), kernel_samples=4)
    assert judged(far, "dgm_4_1").verdict == "fits"  # the radius of all samples is not larger


def test_each_assumption_about_layers_is_judged_on_its_own():
    """Without WeightNorm there are no lengths, but there are biases."""
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    for key in ("wn_5_1", "wn_6_1"):
        states = {each.name: each for each in judged(wn(net=net), key).assumptions}
        assert states["no biases"].state == "fails"
        assert states["no biases"].found == "a bias (0, 2); the output layer has a bias"
        assert states["WeightNorm in every hidden layer"].state == "fails"
        lengths = states["lengths g = 1/√m, not trained"]
        assert (lengths.state, lengths.found) == ("cannot be checked", "no WeightNorm (0, 2)")


class Unknown(nn.Module):
    """An operation without a rule between two layers with biases."""

    def __init__(self, d=3):
        super().__init__()
        self.first, self.last = nn.Linear(d, 16).double(), nn.Linear(16, 1).double()

    def forward(self, x):
        return self.last(self.first(x).sort(dim=1).values)


def plain_network():
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)).double()


OWN = {"wn_5_1": wn, "wn_6_1": wn, "rsc_5_1": rsc, "dgm_4_1": dgm, "bn_2_1": bn, "bn_2_2": bn, "lin_3_2": lin}


def beginnings(row):
    """The names of the assumptions, up to numbers that only the theorem's own network has."""
    names = {"m" if each.name.startswith(("m = Ω", "the width")) else each.name for each in row.assumptions}
    return {name.replace("√3", "√d") for name in names}


@pytest.mark.parametrize("make", [Unknown, plain_network, lambda: Residual(gaussian())], ids=["opaque", "plain", "sum"])
@pytest.mark.parametrize("loss", [square, nn.functional.l1_loss])
@pytest.mark.parametrize("key", OWN)
def test_a_network_of_another_form_has_the_same_assumptions(key, make, loss):
    row = judged(wn(net=make(), loss=loss), key)
    assert beginnings(row) == beginnings(judged(OWN[key](), key))
    assert any(each.part == "run" for each in row.assumptions)


def test_nothing_is_said_to_hold_of_layers_that_are_not_recognized():
    for row in applicable_theorems(Unknown(), unit_samples(8, 3), wn().y, wn().loss):
        held = {each.name for each in row.assumptions if each.state == "holds"}
        assert held <= {
            "square loss",
            "L = (1/n)Σ_i(y_i − f(x_i))²",
            "one output",
            "no dropout",
            "|y| ≤ 1",
        } | {name for name in held if name.startswith("‖x_i‖")}


def test_what_holds_of_samples_and_loss_is_said_without_dgms_form():
    case = dgm(net=nn.Sequential(nn.Linear(50, 16), nn.ReLU(), nn.Linear(16, 1)).double())
    states = {each.name: each.state for each in judged(case, "dgm_4_1").assumptions}
    assert [name for name, state in states.items() if state == "fails"] == ["DGM's network (eq. (1.2))"]
    assert {"‖x_i‖ ≤ 1 (Assumption 1)", "d ≥ 50 (Assumption 2)", "square loss", "no dropout"} <= {
        name for name, state in states.items() if state == "holds"
    }


def test_the_number_of_outputs_is_named():
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 7)).double()
    for key in ("dgm_4_1", "bn_2_1"):
        row = judged(wn(net=net, y=torch.zeros(8, 7).double()), key)
        assert row.reasons[0] == "the model has 7 outputs, not one"


def test_reasons_say_what_their_numbers_are():
    def found(case, key):
        return failing(judged(case, key))[0].found

    assert found(valued(wn(), wn_alpha=-61.7), "wn_5_1") == "the paper's α = -61.7"
    assert found(run_with(wn(), rate=7.9), "wn_5_1") == "the paper's ηβ = 6.32, not below 2"
    net = gaussian()
    net[1].weight.data.mul_(2)
    assert found(rsc(net=net), "rsc_5_1").endswith(", that of all hidden layers")
    classes = torch.tensor([0.0, 1.0] * 4, dtype=torch.float64)[:, None]
    logistic = found(wn(y=classes, loss=nn.functional.binary_cross_entropy_with_logits), "wn_5_1")
    assert logistic == "the loss is a logistic loss, not the square loss"
    assert "no width fits: at least" in found(bn(width=16, d=3, x=unit_samples(8, 3) / 2), "bn_2_1")
    both = nn.Sequential(*lin().net)
    for index in (1, 4):
        nn.utils.parametrizations.weight_norm(both[index])
    assert "weights that are computed, by WeightNorm or otherwise (1, 4)" in found(lin(net=both), "lin_3_2")
