"""The files of a figure: drawn of whatever there is, the same each time, and what the caption tells."""

import csv
import math
import subprocess
import sys

import matplotlib
import pytest
from matplotlib.image import imread

from lightning_normtheory.recipes.figures import FIGURES, draw
from lightning_normtheory.recipes.recipe import Recipe

from support.recipes.figure_cases import NAN, writer


@pytest.fixture
def run(tmp_path):
    return writer(tmp_path)


def recipe(figure):
    return Recipe(paper="WN, Figure 1", data="noise", time="1 s", figure=figure, reported="It grows.")


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


# matplotlib 3.10.0 warns about what its own parser of formulas calls.
_THEIRS = ["ignore::DeprecationWarning"] if matplotlib.__version__ == "3.10.0" else []
ours_are_errors = pytest.mark.filterwarnings("error", *_THEIRS)


@ours_are_errors
@pytest.mark.parametrize("figure", FIGURES)
def test_whatever_there_is_is_drawn(figure, run):
    for epochs in ([EVERYTHING], [EVERYTHING, NOTHING, EVERYTHING], {0: EVERYTHING, 7: EVERYTHING}, [EVERYTHING] * 70):
        runs = [run(MODEL, epochs, {"d": 4}, seed=seed) for seed in (0, 1)]
        for seeds in (1, 2):
            drawing = FIGURES[figure](runs[:seeds])
            drawing.figure.draw_without_rendering()
            measured = [row for row in drawing.table if row["seeds"]]
            assert measured
            assert {row["seeds"] for row in measured} == {seeds}


@ours_are_errors
@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf])
def test_values_that_have_no_logarithm(figure, factor, run):
    squares = {"mean_predictor_grad_norm_sq": 0.0}
    odd = {name: factor * value for name, value in EVERYTHING.items()} | squares
    drawing = FIGURES[figure]([run(MODEL, [EVERYTHING, odd, EVERYTHING], {"d": 4})])
    drawing.figure.draw_without_rendering()
    assert any(row["seeds"] and row["y"] > 0 for row in drawing.table)  # the others are still there
    if math.isfinite(factor):
        drawing = FIGURES[figure]([run(MODEL, [odd, odd], {"d": 4})])
        drawing.figure.draw_without_rendering()
        assert drawing.table


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
    """And no axis is labeled with an offset."""
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
    assert caption.startswith(
        "wn: WN, Figure 1, on noise. After each epoch: (a) L, the mean loss on the probe, dropout off."
    )
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
