"""The figures of the recipes: the numbers in their tables, from files as runs leave them."""

import math
from dataclasses import replace

import pytest

from lightning_normtheory.recipes.figures import FIGURES
from lightning_normtheory.theorems.papers.dyadic import dyadic_linear_margin

from support.recipes.figure_cases import NAN, table, two_errors, writer, y


@pytest.fixture
def run(tmp_path):
    return writer(tmp_path)


def test_overview_averages_seeds_and_leaves_out_empty_panels(run):
    runs = [
        run({"width": 8}, [{"loss": 1.0, "rsc_ratio": 3.0}, {"loss": 0.5}], seed=0),
        run({"width": 8}, [{"loss": 2.0, "rsc_ratio": NAN}, {"loss": 0.7}], seed=1),
        run({"width": 8}, {1: {"loss": 0.9}}, seed=2),
        run({"width": 16}, {0: {"loss": 4.0}, 3: {"loss": 1.0}}),
    ]
    found = table("overview", runs)
    first, second = found["loss", "width 8", 0], found["loss", "width 8", 1]
    assert (y(first), first["seeds"]) == (1.5, 2)
    assert first["error"] == pytest.approx(two_errors(1.0, 2.0))
    assert y(second) == pytest.approx(0.7)
    assert second["error"] == pytest.approx(two_errors(0.5, 0.7, 0.9))
    alone = found["R", "width 8", 0]
    assert (y(alone), alone["error"], alone["seeds"]) == (3.0, None, 1)
    assert {panel for panel, _, _ in found} == {"loss", "R"}
    assert sorted(x for panel, curve, x in found if (panel, curve) == ("loss", "width 16")) == [0, 3]


@pytest.mark.parametrize("figure", ["overview", "weightnorm"])
def test_a_run_by_steps_gives_every_run_the_axis_of_steps(figure, run):
    runs = [run({"width": width}, [{"min_weight_norm": 1.0}, {"min_weight_norm": 2.0}]) for width in (8, 16)]
    runs[1] = replace(runs[1], axis="step")
    drawing = FIGURES[figure](runs)
    assert drawing.figure.axes[0].get_xlabel() == "step"
    assert {row["x"] for row in drawing.table} == {10, 20}
    assert "epoch" not in drawing.caption


def test_overview_draws_the_edge_once_or_for_each(run):
    def with_edges(*edges):
        values = [{"hessian_lambda_max": 1.0, "hessian_edge": edge} for edge in edges]
        return [run({"width": width}, [value]) for width, value in zip((8, 16), values)]

    assert [curve for _, curve, _ in table("overview", with_edges(10.0, 10.0))][2:] == ["limit"]
    found = table("overview", with_edges(10.0, 20.0))
    assert y(found["lambda_max", "limit, width 16", 0]) == 20.0


def test_practice_has_a_curve_for_each_norm_and_no_stale_validation(run):
    epochs = [{"train_loss": 1.0 / (e + 1), "val_accuracy": 0.1 * (e // 2), "min_weight_norm": 0.5} for e in range(4)]
    runs = [run({"norm": norm}, epochs, check_val_every_n_epoch=2) for norm in ("weight", "batch")]
    found = table("practice", runs)
    assert sorted(x for panel, curve, x in found if (panel, curve) == ("accuracy", "batch")) == [1, 3]
    assert y(found["accuracy", "batch", 3]) == pytest.approx(0.1)
    assert y(found["train loss", "weight", 3]) == 0.25
    assert y(found["w_min", "weight", 0]) == 0.5


def test_weightnorm(run):
    epochs = [{"min_weight_norm": 0.5 + e, "rsc_ratio": 2.0 * e, "loss_ratio": 0.9} for e in range(3)]
    found = table("weightnorm", [run({"width": width}, epochs) for width in (64, 8)])
    assert y(found["w_min", "width 8", 2]) == 2.5
    assert y(found["R", "width 64", 1]) == 2.0
    assert y(found["loss ratio", "width 64", 1]) == 0.9
    assert len(found) == 2 * 3 * 3


def test_rsc_takes_roots_and_minima_of_each_run(run):
    def epochs(*norms):
        return [{"mean_predictor_grad_norm_sq": norm**2} for norm in norms]

    runs = [
        run({"width": 8, "scaling": "paper"}, epochs(3.0, 1.0, 2.0), seed=0),
        run({"width": 8, "scaling": "paper"}, epochs(3.0, 2.0, 1.5), seed=1),
        run({"width": 64, "scaling": "paper"}, epochs(5.0, NAN, 4.0)),
        run({"width": 8, "scaling": "pytorch"}, epochs(0.5)),
    ]
    found = table("rsc", runs)
    during, least = "norm of the mean gradient, paper", "least norm of the mean gradient"
    assert y(found[during, "width 8", 20]) == 1.5
    assert y(found["norm of the mean gradient, pytorch", "width 8", 10]) == 0.5
    assert math.isnan(y(found[during, "width 64", 20]))
    assert y(found[least, "paper", 8]) == (1.0 + 1.5) / 2  # not the minimum of the mean
    assert found[least, "paper", 8]["error"] == pytest.approx(two_errors(1.0, 1.5))
    assert y(found[least, "paper", 64]) == 4.0


def test_margins_are_those_of_the_first_row(run):
    runs = [
        run({"width": 8}, [{"batchnorm_gamma_a": a, "batchnorm_gamma_c": 1.0}, {"batchnorm_gamma_a": 9.0}], seed=seed)
        for seed, a in enumerate((2.0, 4.0, 3.0))
    ]
    found = table("margin", [*runs, run({"width": 64}, [{"batchnorm_gamma_a": 5.0}])])
    assert y(found["margin", "gamma_a", 8]) == 3.0
    assert found["margin", "gamma_a", 8]["error"] == pytest.approx(two_errors(2.0, 4.0, 3.0))
    assert y(found["margin", "gamma_c", 8]) == 1.0
    assert ("margin", "gamma_c", 64) not in found


def test_dyadic_margins_over_the_linear_one(run):
    runs = [run({"width": 8}, [{"batchnorm_gamma_a": 0.1, "batchnorm_gamma_c": 0.2}], {"d": d}) for d in (4, 9)]
    found = table("dyadic", runs)
    assert y(found["dyadic", "gamma_a", 4]) == pytest.approx(0.1 / dyadic_linear_margin(4))
    assert y(found["dyadic", "gamma_a", 9]) == pytest.approx(0.1 / dyadic_linear_margin(9))
    assert y(found["dyadic", "sqrt(d)/40", 9]) == pytest.approx(3 / 40)


def regime(alpha, losses, v, g=1.0, **more):
    threshold = v / 2 / alpha**2 if alpha <= 1 else g / 2
    return [
        {
            "ntk_direction_lambda_min": v / alpha**2 * (1 + e),
            "ntk_length_lambda_min": g,
            "ntk_lambda_min": (v / alpha**2 + g) * (3 - e),
            "ntk_threshold": threshold,
            "loss": loss,
            **more,
        }
        for e, loss in enumerate(losses)
    ]


def test_regimes_take_the_smallest_eigenvalues_and_find_the_crossover(run):
    runs = [run({"alpha": a}, regime(a, (1.0, 0.5), v=4.0)) for a in (0.5, 1.0, 8.0)]
    found = table("regimes", runs)
    kernels = "least eigenvalue"
    assert y(found[kernels, "lambda_min(V)/alpha^2", 0.5]) == 16
    assert y(found[kernels, "lambda_min(Lambda)", 0.5]) == 2 * 17
    assert [y(found[kernels, "threshold", a]) for a in (0.5, 1.0, 8.0)] == [8, 2, 0.5]
    ((_, _, crossover),) = (key for key in found if key[1] == "crossing")
    assert crossover == pytest.approx(2.0)  # 4/α² = 1
    assert (kernels, "alpha = 1", 1.0) in found


def test_without_a_crossing_the_crossover_is_the_theorems(run):
    found = table("regimes", [run({"alpha": 0.5}, regime(0.5, (1.0,), 4.0, ntk_lambda_0=9.0, ntk_mu_0=1.0))])
    assert ("least eigenvalue", "crossing", 3.0) in found
    assert {panel for panel, _, _ in found} == {"least eigenvalue"}  # one row has no contraction


def test_the_contraction_is_per_step_and_beside_the_theorems(run):
    losses = (1.0, 0.9**10, 0.9**10 * 0.7**10)  # the rows are ten steps apart
    runs = [
        run({"alpha": 2.0}, regime(2.0, losses, 4.0, learning_rate=0.01)),
        run({"alpha": 4.0}, regime(4.0, losses, 4.0)),
    ]
    found = table("regimes", runs)
    panel = "1 - contraction"
    assert y(found[panel, "1 - largest contraction", 2.0]) == pytest.approx(0.1)
    assert y(found[panel, "1 - mean contraction", 2.0]) == pytest.approx(0.2)
    assert y(found[panel, "eta * threshold", 2.0]) == pytest.approx(0.01 / 2)
    assert (panel, "eta * threshold", 4.0) not in found


def test_linearity_fits_a_power_of_large_widths(run):
    def epochs(change, **more):
        return [{"ntk_change_max": change / 2}, {"ntk_change_max": change, **more}]

    widths = (10, 100, 400, 1600)
    runs = [
        run({"width": m, "output": "linear"}, epochs(3 * m**-0.5 if m > 10 else 7.0, **{"softmax/ntk_change_max": 0.3}))
        for m in widths
    ]
    runs += [
        run({"width": m, "output": "swish"}, epochs(m**-0.1, **{"softmax/ntk_change_max": 9.0})) for m in (10, 100)
    ]
    found = table("linearity", runs)
    assert y(found["kernel change", "linear", 10]) == 7.0
    fits = {curve: row["exponent"] for (_, curve, _), row in found.items() if row["exponent"] is not None}
    assert fits == pytest.approx({"linear, fit": -0.5, "softmax, fit": 0.0, "swish, fit": -0.1}, abs=1e-12)
    assert y(found["kernel change", "linear, fit", 1600]) == pytest.approx(3 / 40)
    assert y(found["kernel change", "softmax", 100]) == 0.3


def test_linearity_against_the_bottleneck(run):
    runs = [run({"width": 1000, "bottleneck": b}, [{"ntk_change_max": 1.0 / b}]) for b in (2, 4, 8)]
    assert y(table("linearity", runs)["kernel change", "linear", 4]) == 0.25
    runs = [run({"width": m, "bottleneck": 2}, [{"ntk_change_max": 1.0 / m}]) for m in (10, 20)]
    assert y(table("linearity", runs)["kernel change", "linear", 20]) == 0.05


def test_only_seeds_are_averaged(run):
    """Other varying settings get separate curves, unless they follow from the setting on the axis."""

    def margins(*settings):
        return [run(model, [{"batchnorm_gamma_a": 1.0 + i}]) for i, model in enumerate(settings)]

    apart = margins({"width": 8, "init": 1}, {"width": 8, "init": 2}, {"width": 16, "init": 1})
    assert {curve for _, curve, _ in table("margin", apart)} == {"gamma_a, init 1", "gamma_a, init 2"}
    following = margins({"width": 8, "lr": 0.1}, {"width": 16, "lr": 0.2})
    assert {curve for _, curve, _ in table("margin", following)} == {"gamma_a"}
    nets = [run({"width": 8, "act": {"class_path": f"torch.nn.{act}"}}, [{"loss": 1.0}]) for act in ("ReLU", "Tanh")]
    assert {curve for _, curve, _ in table("overview", nets)} == {"ReLU", "Tanh"}
