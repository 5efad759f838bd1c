"""The figures of the recipes: the numbers in their tables, from files as runs leave them."""

import csv
import math
import subprocess
import sys

import matplotlib
import pytest
import yaml
from matplotlib.image import imread
from pytorch_lightning import LightningModule

from lightning_normtheory.callbacks import RSCRatio, record
from lightning_normtheory.dyadic import dyadic_linear_margin
from lightning_normtheory.recipes.figures import FIGURES, draw
from lightning_normtheory.recipes.recipe import Recipe
from lightning_normtheory.recipes.runs import read_run

from lit import Classifier, loader, trainer

NAN = math.nan


@pytest.fixture
def run(tmp_path):
    """Writes the files of a run and reads them back: metrics are epoch → metrics, names without a / are the user's."""
    numbers = iter(range(1000))

    def write(model, epochs, data=None, seed=0, **trainer):
        folder = tmp_path / "runs" / str(next(numbers))
        folder.mkdir(parents=True)
        config = {
            "seed_everything": seed,
            "trainer": {
                "max_epochs": 5,
                "logger": {"class_path": "WandbLogger", "init_args": {"save_dir": str(folder)}},
                "callbacks": [{"class_path": "NormTheory", "init_args": {"probe": 512, "prefix": "normtheory"}}],
                **trainer,
            },
            "model": {"class_path": "my.Net", "init_args": model},
            "data": {"class_path": "my.Data", "init_args": data or {}},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        for epoch, metrics in dict(enumerate(epochs) if isinstance(epochs, list) else epochs).items():
            row = {
                "epoch": epoch,
                "step": 10 * (epoch + 1),
                "metrics": {k if "/" in k else f"normtheory/{k}": v for k, v in metrics.items() if k not in USERS},
                "user_metrics": {k: v for k, v in metrics.items() if k in USERS},
            }
            record.append(folder / "normtheory.jsonl", {"run": "demo"}, row)
        return read_run(folder)

    return write


USERS = ("train_loss", "val_accuracy", "learning_rate")


def recipe(figure):
    return Recipe(paper="WN, Figure 1", data="noise", time="1 s", figure=figure, reported="It grows.")


def table(figure, runs):
    """(panel, curve, x) → the row of the table, whose file `test_the_file_of_numbers` looks at."""
    rows = FIGURES[figure](runs).table
    found = {(row["panel"], row["curve"], row["x"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def y(row):
    return row["y"]


def two_errors(*values):
    mean = sum(values) / len(values)
    return 2 * math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


# -- reading ---------------------------------------------------------------------------------------------------------


def test_settings_are_named_as_on_the_command_line(run):
    settings = run({"width": 8, "sizes": [1, [2]], "act": {"class_path": "torch.nn.Tanh"}}, [{"loss": 1.0}]).settings
    assert settings["model.width"] == 8
    assert settings["model.sizes"] == (1, (2,))
    assert settings["model.act"] == "Tanh"
    assert settings["trainer.callbacks.0.probe"] == 512
    assert settings["seed_everything"] == 0
    assert not any("init_args" in name or "class_path" in name for name in settings)


def test_rows_of_an_epoch_are_merged_and_the_last_counts(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {width: 8}")
    for epoch, value in ((1, 5.0), (0, 1.0), (0, NAN)):  # resumed, and one value that is not a number
        line = {"epoch": epoch, "step": epoch, "metrics": {"normtheory/loss": value}, "user_metrics": {"val": value}}
        record.append(tmp_path / "normtheory.jsonl", {}, line)
    rows = read_run(tmp_path).rows
    assert [row["epoch"] for row in rows] == [0, 1]
    assert math.isnan(rows[0]["normtheory/loss"])
    assert rows[1] == {"epoch": 1, "step": 1, "val": 5.0, "normtheory/loss": 5.0}


class Dated(Classifier):
    """Logs the epoch."""

    def training_step(self, batch, batch_idx):
        self.log("train_epoch", float(self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        LightningModule.log(self, "val_epoch", float(self.current_epoch))


def test_a_real_run_has_every_number_in_its_own_epoch(tmp_path):
    """Also what another callback measures, which the rows of the first one repeat, an epoch late and in float32."""
    fit = trainer([RSCRatio(), RSCRatio(prefix="softmax")], num_sanity_val_steps=0)
    fit.fit(Dated(), loader(), loader(shuffle=False))
    (record.folder(fit) / "config.yaml").write_text("seed_everything: 0")
    rows = read_run(tmp_path).rows
    assert [row["train_epoch"] for row in rows] == [row["val_epoch"] for row in rows] == [0, 1, 2]
    assert [row["softmax/loss"] for row in rows] == [row["normtheory/loss"] for row in rows]


def test_no_run_several_runs_no_settings(tmp_path, run):
    with pytest.raises(ValueError, match=r"Expected one normtheory\.jsonl .* none"):
        read_run(tmp_path)
    first = run({}, [{"loss": 1.0}]).folder
    run({}, [{"loss": 1.0}])
    with pytest.raises(ValueError, match=r"but there is 2: .*0, .*1\."):
        read_run(tmp_path)
    (first / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"Expected .*config\.yaml"):
        read_run(first)


# -- numbers ---------------------------------------------------------------------------------------------------------


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
    ((_, _, crossover),) = (key for key in found if key[1] == "alpha*")
    assert crossover == pytest.approx(2.0)  # 4/α² = 1
    assert (kernels, "alpha = 1", 1.0) in found


def test_without_a_crossing_the_crossover_is_the_theorems(run):
    found = table("regimes", [run({"alpha": 0.5}, regime(0.5, (1.0,), 4.0, ntk_lambda_0=9.0, ntk_mu_0=1.0))])
    assert ("least eigenvalue", "alpha*", 3.0) in found
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
    """Other settings that vary make curves of their own, unless they follow from what is on the axis."""

    def margins(*settings):
        return [run(model, [{"batchnorm_gamma_a": 1.0 + i}]) for i, model in enumerate(settings)]

    apart = margins({"width": 8, "init": 1}, {"width": 8, "init": 2}, {"width": 16, "init": 1})
    assert {curve for _, curve, _ in table("margin", apart)} == {"gamma_a, init 1", "gamma_a, init 2"}
    following = margins({"width": 8, "lr": 0.1}, {"width": 16, "lr": 0.2})
    assert {curve for _, curve, _ in table("margin", following)} == {"gamma_a"}
    nets = [run({"width": 8, "act": {"class_path": f"torch.nn.{act}"}}, [{"loss": 1.0}]) for act in ("ReLU", "Tanh")]
    assert {curve for _, curve, _ in table("overview", nets)} == {"ReLU", "Tanh"}


# -- files -----------------------------------------------------------------------------------------------------------

EVERYTHING = {
    "loss": 1.0,
    "loss_ratio": 0.9,
    "min_weight_norm": 0.5,
    "rsc_ratio": 2.0,
    "hessian_lambda_max": 3.0,
    "hessian_edge": 4.0,
    "ntk_lambda_min": 0.1,
    "ntk_direction_lambda_min": 0.2,
    "ntk_length_lambda_min": 0.3,
    "ntk_threshold": 0.05,
    "ntk_change_max": 0.2,
    "softmax/ntk_change_max": 0.2,
    "mean_predictor_grad_norm_sq": 4.0,
    "batchnorm_gamma_a": 0.1,
    "batchnorm_gamma_c": 0.2,
    "train_loss": 1.0,
    "val_accuracy": 0.5,
    "learning_rate": 0.1,
}
MODEL = {"width": 8, "alpha": 0.5, "norm": "batch"}
NOTHING = dict.fromkeys(EVERYTHING, NAN)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("figure", FIGURES)
def test_whatever_there_is_is_drawn(figure, run):
    for epochs in ([EVERYTHING], [EVERYTHING, NOTHING, EVERYTHING], {0: EVERYTHING, 7: EVERYTHING}, [EVERYTHING] * 70):
        runs = [run(MODEL, epochs, {"d": 4}, seed=seed) for seed in (0, 1)]
        FIGURES[figure](runs[:1]).figure.draw_without_rendering()
        FIGURES[figure](runs).figure.draw_without_rendering()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf])
def test_values_that_have_no_logarithm(figure, factor, run):
    squares = {"mean_predictor_grad_norm_sq": 0.0}
    odd = {name: factor * value for name, value in EVERYTHING.items()} | squares
    FIGURES[figure]([run(MODEL, [EVERYTHING, odd, EVERYTHING], {"d": 4})]).figure.draw_without_rendering()
    if math.isfinite(factor):
        FIGURES[figure]([run(MODEL, [odd, odd], {"d": 4})]).figure.draw_without_rendering()


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("epochs", [[{"other": 1.0}], [NOTHING]], ids=["not measured", "NaN"])
def test_runs_without_what_a_figure_needs(figure, epochs, run, tmp_path):
    with pytest.raises(
        ValueError, match=rf"The figure '{figure}' needs .*normtheory/.*none of the 1 runs .*Measured: "
    ):
        draw(recipe(figure), "fig", [run(MODEL, epochs, {"d": 4})], tmp_path)


def test_no_such_figure_and_no_runs(run, tmp_path):
    with pytest.raises(ValueError, match=r"no figure 'pie'\. Set recipe\.figure to one of overview, weightnorm"):
        draw(recipe("pie"), "fig", [run(MODEL, [EVERYTHING])], tmp_path)
    with pytest.raises(ValueError, match="at least one run to draw 'fig'"):
        draw(recipe("overview"), "fig", [], tmp_path)


@pytest.mark.parametrize("figure", ["weightnorm", "regimes", "linearity"])
def test_equal_runs_give_equal_files_whatever_the_users_style(figure, run, tmp_path):
    runs = [run({**MODEL, "width": m}, [EVERYTHING] * 2, {"d": 4}, seed=seed) for m in (8, 16) for seed in (0, 1)]
    one = draw(recipe(figure), "fig", runs, tmp_path / "a")
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "none", "savefig.dpi": 30}):
        before = dict(matplotlib.rcParams)
        two = draw(recipe(figure), "fig", runs[::-1], tmp_path / "b")
        assert dict(matplotlib.rcParams) == before
    for a, b in zip(one, two):
        assert a.read_bytes() == b.read_bytes(), a.name


def test_the_file_of_numbers(run, tmp_path):
    runs = [run({"width": 8}, [{"loss": loss, "rsc_ratio": NAN}], seed=seed) for seed, loss in enumerate((1.0, 1.5))]
    paths = draw(recipe("overview"), "fig", runs, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["fig.png", "fig.svg", "fig.csv", "fig.txt"]
    with paths[2].open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row == {"panel": "loss", "curve": "run", "x": "0", "y": "1.25", "error": "0.5", "seeds": "2"}


def test_figures_have_the_size_of_a_page(run, tmp_path):
    runs = [run(MODEL, [EVERYTHING] * 2)]
    sizes = {"weightnorm": (540, 1350), "margin": (540, 840), "practice": (810, 1350)}
    for figure, size in sizes.items():
        assert imread(draw(recipe(figure), "fig", runs, tmp_path)[0]).shape[:2] == size


def test_rounding_does_not_fill_a_panel(run):
    """And no axis is labelled with an offset."""
    (axes,) = FIGURES["overview"]([run(MODEL, [{"min_weight_norm": 0.5 + 1e-7 * e} for e in range(5)])]).figure.axes
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(1e-4, rel=1e-3)
    axes.figure.draw_without_rendering()
    assert axes.yaxis.get_offset_text().get_text() == ""


def test_the_caption_tells_what_varies_and_what_the_paper_saw(run, tmp_path):
    runs = [
        run({"width": m, "depth": 2}, [{"loss": 1.0 + seed}], {"limit": None, "root": f"/data/{m}"}, seed=seed)
        for m in (64, 8)
        for seed in (0, 1, 2)
    ]
    draw(recipe("overview"), "wn", runs, tmp_path)
    caption = " ".join((tmp_path / "wn.txt").read_text(encoding="utf-8").split())
    assert caption.startswith("wn: WN, Figure 1, on noise. After each epoch: (a) the loss on the probe.")
    assert "two standard errors" in caption
    assert "Varied: model.width 8, 64." in caption
    assert "model.depth 2" in caption
    assert "trainer.max_epochs 5" in caption
    assert "trainer.callbacks.0.probe 512" in caption
    assert "Runs: 6, with 3 seeds for each setting (0, 1, 2)." in caption
    assert caption.endswith("The paper reports: It grows.")
    assert "/data" not in caption
    assert str(tmp_path) not in caption
    draw(recipe("overview"), "wn", runs[:1], tmp_path)
    caption = (tmp_path / "wn.txt").read_text(encoding="utf-8")
    assert "Runs: 1, with seed 0." in caption
    assert "Varied" not in caption
    assert "standard errors" not in caption


def test_no_window_and_no_global_state():
    """In a fresh interpreter, since another test may have loaded pyplot."""
    code = "import sys, lightning_normtheory.recipes.figures; print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
