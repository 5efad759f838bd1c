"""The table at the end of a fit."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from lightning_normtheory.callbacks import NormTheory, RSCRatio
from lightning_normtheory.record.history import History, Row, read_histories
from lightning_normtheory.record.theorem_status import NOT_YET, Assumption, TheoremStatus
from lightning_normtheory.view.readings.reasons import missing
from lightning_normtheory.view.readings.theorems import judged_assumptions, theorem_lines
from lightning_normtheory.view.terminal.epochs import theorems
from lightning_normtheory.view.terminal.fit_summary import end_table

from support.lit import Classifier, loader, trainer

NAN = math.nan


def history(*metrics, prefix="normtheory", settings=({"probe": 10**6, "samples": 512},), **others):
    """One row for each dict of metrics."""
    rows = [Row(epoch, 10 * epoch, float(epoch), dict(each), {}) for epoch, each in enumerate(metrics)]
    path = Path("normtheory.jsonl")
    return History(path, "demo/1", prefix, settings=list(settings), rows=rows, **others)


def cells(text, label):
    """What stands in the line of a quantity: its numbers, and what the theory says."""
    (line,) = [line for line in text.splitlines() if line.startswith(label)]
    return re.split(r"\s{3,}", line)[1:]


FULL = {
    "min_weight_norm": 0.533,
    "rsc_ratio": 0.0229,
    "certificate_alpha": -3.0,
    "certificate_rate_measured": 0.95,
    "certificate_own_rate": 0.99,
    "certificate_beta": 66.8,
    "certificate_hessian_bound": 40.0,
    "hessian_lambda_max": 8.97,
    "hessian_lambda_max_converged": 0.0,
    "hessian_edge": 10.0,
    "predictor_hessian_norm": 1.5,
    "ntk_lambda_min": 0.00122,
    "ntk_lambda_min_floor": 3e-7,
    "ntk_threshold": 0.25,
    "ntk_change_max": 0.34,
    "generalization_gap": 0.0176,
    "generalization_bound": 6.2e5,
    "generalization_bound_vacuous": 1.0,
    "rademacher_bound": 12.0,
    "rademacher_x_norm": 1.0,
    "seconds": 1.55,
}
THEOREMS = (
    TheoremStatus("WN, Theorem 5.1 (optimization)", "generalized", ("a bias",)),
    TheoremStatus("WN, Theorem 6.1 (generalization)", "applies"),
    TheoremStatus("BN, Theorem 2.1 (two-layer ReLU)", "does not apply", ("no BatchNorm",)),
)


def test_the_sharper_bound_and_lower_bounds_are_shown_as_such():
    low = {"predictor_hessian_norm": 1.5, "predictor_hessian_norm_converged": 0.0}
    weak = {"progressive_error_bound": 5.17, "progressive_error_bound_sharper": 2.31}
    text = end_table(history({**low, **weak}, {**low, **weak, "predictor_hessian_norm_converged": 1.0}))
    assert cells(text, "max ‖∇²f‖") == ["≥ 1.50", "1.50"]
    assert cells(text, "progressive error bound") == ["2.31", "2.31", "(vacuous)"]
    text = end_table(history({**weak, "progressive_error_bound_sharper": 0.99}))
    assert cells(text, "progressive error bound") == ["0.990"]


def test_what_is_due_seldom_and_was_always_missing_was_never_measured():
    rows = [Row(epoch, epoch, 0.0, {"loss": 1.0}, {}) for epoch in range(3)]
    reasons = {"hessian_lambda_max_lower": "one batch", "rsc_ratio": "no loss"}
    rows[0] = rows[0]._replace(reasons=reasons)
    found = {one.why: one.phrase for one in missing(History(Path(), "demo", "normtheory", rows=rows))}
    assert found == {"one batch": "never measured", "no loss": "in 1 of 3 epochs"}


def test_everything_at_once():
    first = {**FULL, "min_weight_norm": 0.5326, "hessian_lambda_max": 1.16, "generalization_gap": 0.0012}
    assert end_table(history(first, FULL, theorems=THEOREMS)).splitlines() == [
        "normtheory: 2 epochs measured on 512 samples, 3.1 s",
        "                          first      last   theory",
        "w_min                    0.5326    0.5330",
        "R = ‖∇L‖²/L              0.0229    0.0229",
        "α of strong convexity     -3.00     -3.00   no guarantee",
        "L⁺/L per step            0.9500    0.9500   guaranteed 0.99",
        "λ_max of the Hessian       1.16      8.97   2/η = 10, β = 66.8, not converged",
        "max ‖∇²f‖                  1.50      1.50   H̄ = 40",
        "λ_min of the kernel     0.00122   0.00122   floor 3e-07, below threshold 0.25",
        "ΔK                        0.340     0.340",
        "generalization gap      0.00120    0.0176   bound 6.2e+05 (vacuous)",
        "Rademacher bound           12.0      12.0   max ‖x‖ = 1",
        "theorems that apply: WN, Theorem 6.1",
        "bounds shown in a generalized form: WN, Theorem 5.1",
    ]


FITS = (
    TheoremStatus("WN, Theorem 5.1 (optimization)", "fits"),
    TheoremStatus("RSC, Theorems 5.1 to 5.3 (optimization)", "fits"),
    TheoremStatus("BN, Theorem 2.1 (two-layer ReLU)", "does not apply", ("no BatchNorm",)),
)


def judged(*flags):
    """A run of which WN's theorem is judged by these flags, and RSC's never holds."""
    rows = [
        Row(
            epoch,
            epoch,
            0.0,
            {"loss": 1.0, "theorem__wn_5_1": flag, "theorem__rsc_5_1": 0.0},
            {},
            reasons={"theorem__rsc_5_1": "α = -3"} | ({} if flag else {"theorem__wn_5_1": f"α = -{epoch + 1}"}),
        )
        for epoch, flag in enumerate(flags)
    ]
    return end_table(History(Path(), "demo/1", "normtheory", theorems=FITS, rows=rows)).splitlines()[-2:]


def test_a_theorem_applies_where_network_and_run_fit():
    others = "network fits, run does not: RSC, Theorems 5.1 to 5.3 (α = -3)"
    assert judged(1.0, 1.0) == ["theorems that apply: WN, Theorem 5.1", others]
    assert judged(0.0, 1.0, 1.0) == ["theorems that apply: WN, Theorem 5.1 (in epochs 1 to 2)", others]
    assert judged(1.0, 0.0, 1.0) == ["theorems that apply: WN, Theorem 5.1 (in epoch 0, epoch 2)", others]
    failing = "network fits, run does not: WN, Theorem 5.1 (α = -2); RSC, Theorems 5.1 to 5.3"
    assert judged(0.0, 0.0) == [failing, "    (α = -3)"]


def test_what_was_not_measured_has_no_line():
    text = end_table(history({"rsc_ratio": 1.0}, {"rsc_ratio": 2.0}))
    assert [line.split("  ")[0] for line in text.splitlines()[2:]] == ["R = ‖∇L‖²/L"]
    assert "   theory" not in text
    assert "theorems" not in text


def test_nothing_measured_gives_nothing():
    assert end_table(history()) == ""
    skipped = end_table(history({"skipped": 1.0}, {"skipped": 1.0}))
    assert skipped.splitlines()[0] == "normtheory: nothing was measured within max_overhead, 2 skipped"
    assert end_table(history({})) == ""  # an epoch of another prefix


def test_one_epoch_is_one_column():
    text = end_table(history({**FULL, "skipped": 0.0}))
    assert text.splitlines()[0].startswith("normtheory: 1 epoch measured on")
    assert text.splitlines()[1].split() == ["epoch", "0", "theory"]
    assert cells(text, "w_min") == ["0.5330"]
    assert cells(text, "max ‖∇²f‖") == ["1.50", "H̄ = 40"]


def test_skipped_epochs_are_counted_apart():
    text = end_table(history({**FULL, "skipped": 0.0}, {"skipped": 1.0}, {}, {**FULL, "skipped": 0.0}))
    assert text.splitlines()[0] == "normtheory: 2 epochs measured on 512 samples, 1 skipped, 3.1 s"


def test_a_limit_with_momentum_stands_in_place_of_2_over_eta():
    row = {"hessian_lambda_max": 12.0, "hessian_edge": 10.0, "hessian_stability_limit": 19.0}
    assert cells(end_table(history(row)), "λ_max") == ["12.0", "limit = 19"]


@pytest.mark.parametrize(("optimizers", "word"), [(("SGD",), " (crossed)"), (("Adam",), ""), ((), " (crossed)")])
def test_a_limit_that_is_crossed_is_called_so_if_it_is_the_optimizers(optimizers, word):
    row = {"hessian_lambda_max": 12.0, "hessian_edge": 10.0}
    assert cells(end_table(history(row, optimizers=optimizers)), "λ_max") == ["12.0", f"2/η = 10{word}"]


def test_a_kernel_within_its_rounding_is_called_so():
    row = {"ntk_lambda_min": 1e-8, "ntk_lambda_min_floor": 3e-7}
    assert cells(end_table(history(row)), "λ_min") == ["1.00e-08", "below floor 3e-07"]


def test_a_bound_that_says_something_is_not_called_vacuous():
    row = {"generalization_gap": 0.1, "generalization_bound": 0.4, "generalization_bound_vacuous": 0.0}
    assert cells(end_table(history(row)), "generalization") == ["0.100", "bound 0.4"]


def test_nan_is_a_dash_with_a_word():
    text = end_table(history({"rsc_ratio": 1.0, "rademacher_bound": NAN}, {"rsc_ratio": NAN, "rademacher_bound": 1.0}))
    assert cells(text, "R =") == ["1.00", "–", "NaN"]
    assert cells(text, "Rademacher") == ["–", "1.00", "NaN at first"]


def test_a_reason_stands_below_the_table():
    run = history({"rsc_ratio": 1.0, "loss": 2.0}, {"rsc_ratio": NAN, "loss": -2.0})
    below, long = "the loss is below zero", "RuntimeError: " + "no such kernel, " * 100
    run.rows[1] = run.rows[1]._replace(reasons={"rsc_ratio": below, "loss_ratio": below})
    run.rows[:] = [row._replace(reasons={**row.reasons, "ntk_lambda_min": long}) for row in run.rows]
    text = end_table(run)
    assert cells(text, "R =") == ["1.00", "–", "NaN: see below"]
    lines = text.splitlines()
    assert "– R = ‖∇L‖²/L, L_t/L_{t−1} in 1 of 2 epochs: the loss is below zero." in lines
    start = next(
        i for i, line in enumerate(lines) if line.startswith("– λ_min of the kernel: RuntimeError: no such kernel")
    )
    assert len(lines[start : start + 3]) == len(lines[start:]) == 3  # however long it is
    assert lines[-1].endswith(" …")
    assert all(len(line) <= 80 for line in lines)


def test_a_bound_that_is_nan_is_not_shown():
    row = {"hessian_lambda_max": 1.0, "hessian_edge": NAN, "certificate_beta": NAN}
    assert cells(end_table(history(row)), "λ_max") == ["1.00"]


def test_infinity_has_its_sign():
    row = {"rademacher_bound": math.inf, "certificate_alpha": -math.inf}
    text = end_table(history(row))
    assert cells(text, "Rademacher") == ["∞"]
    assert cells(text, "α") == ["-∞", "no guarantee"]


def test_the_alpha_of_the_mean_gradient_is_told_where_it_is_the_better_guarantee():
    found = [
        cells(end_table(history({"certificate_alpha": alpha, "rsc_alpha": other})), "α")[1:]
        for alpha, other in ((-3.0, 2.0), (-3.0, -1.0), (5.0, 2.0), (-3.0, math.nan))
    ]
    assert found == [["from ‖ḡ‖² 2"], ["no guarantee"], [], ["no guarantee"]]


def test_what_came_once_is_the_last_value_only():
    text = end_table(history({"rsc_ratio": 1.0}, {"rsc_ratio": 1.0, "ntk_change_max": 0.5}))
    assert re.fullmatch(r"ΔK +0\.500", text.splitlines()[-1])
    assert text.splitlines()[-1].endswith("0.500")
    assert len(text.splitlines()[-1]) == len(text.splitlines()[-2])


def test_the_comparison_belongs_to_the_epoch_of_the_last_value():
    rows = {"hessian_lambda_max": 1.0, "hessian_edge": 5.0}, {"rsc_ratio": 1.0, "hessian_edge": 7.0}
    assert cells(end_table(history(*rows)), "λ_max") == ["1.00", "2/η = 5"]


def test_callbacks_with_different_probes_name_none():
    text = end_table(history(FULL, settings=[{"samples": 512}, {"samples": 64}]))
    assert text.splitlines()[0] == "normtheory: 1 epoch measured, 1.6 s"
    assert end_table(history(FULL, settings=[])).splitlines()[0] == "normtheory: 1 epoch measured, 1.6 s"


def test_the_theorems_of_a_network_without_any():
    assert end_table(history(FULL, theorems=THEOREMS[2:])).endswith("theorems that apply: none")


def test_a_prefix_of_the_users_stands_in_front():
    assert end_table(history(FULL, prefix="层")).startswith("层: 1 epoch")


@pytest.mark.parametrize("width", [50, 60, 70, 80, 120])
def test_no_line_is_longer_than_the_terminal(width):
    text = end_table(history(FULL, FULL, theorems=THEOREMS), width)
    # The table's only character without a width of its own is the bar above H.
    assert max(len(line.replace("\u0304", "")) for line in text.splitlines()) <= width
    for phrase in (
        "no guarantee",
        "2/η = 10,",
        "β = 66.8,",
        "not converged",
        "floor 3e-07,",
        "bound 6.2e+05 (vacuous)",
    ):
        assert phrase in text
    values = [line for line in text.splitlines() if line.startswith(("w_min", "ΔK"))]
    assert len({len(line) for line in values}) == 1


def test_numbers_stand_below_each_other():
    lines = end_table(history(FULL, FULL)).splitlines()
    ends = {re.match(r"(.*?\S) {3,}\S+ {3,}(\S+)", line).end() for line in lines[2:]}
    assert ends == {lines[1].index("last") + len("last")}


def test_a_run_by_steps_is_counted_in_measurements():
    missing = {"ntk_lambda_min": "no predictor was found"}
    rows = [Row(0, step, 0.0, FULL, {}, reasons=missing) for step in (500, 12000)]
    run = History(
        Path(), "demo/1", "normtheory", [{"samples": 512}], rows=[*rows, Row(0, 12500, 0.0, {"skipped": 1.0}, {})]
    )
    by_steps = dataclasses.replace(run, axis="step")
    text = end_table(by_steps)
    assert text.startswith("normtheory: 2 measurements up to step 12000 on 512 samples, 1 skipped, 3.1 s\n")
    assert "– λ_min of the kernel: no predictor was found." in text
    assert "epoch" not in text
    once = end_table(dataclasses.replace(by_steps, rows=rows[:1]))
    assert once.startswith("normtheory: 1 measurement up to step 500 on ")
    assert once.splitlines()[1].split() == ["step", "500", "theory"]


def test_a_real_fit(tmp_path):
    callbacks = [NormTheory(probe=16, ntk_samples=8), RSCRatio(probe=16, prefix="other")]
    trainer(callbacks, max_epochs=3, default_root_dir=tmp_path).fit(Classifier("wn"), loader(), loader(16))
    (path,) = tmp_path.rglob("normtheory.jsonl")
    ours, other = read_histories(path)
    text = end_table(ours)
    assert text.startswith("normtheory: 3 epochs measured on 16 samples, ")
    for label, name in {"w_min": "min_weight_norm", "λ_max": "hessian_lambda_max", "λ_min": "ntk_lambda_min"}.items():
        first, last = (row.metrics[name] for row in (ours.rows[0], ours.rows[-1]))
        assert [float(number) for number in cells(text, label)[:2]] == pytest.approx([first, last], rel=6e-3)
    assert "generalization gap" in text
    assert "theorems that apply: " in text
    assert len(text.splitlines()) <= 14
    assert [line.split("  ")[0] for line in end_table(other).splitlines()[2:]] == ["R = ‖∇L‖²/L"]
    assert end_table(other).startswith("other: 3 epochs")


def test_what_is_not_checked_is_named_in_the_line_of_theorems_that_apply():
    name = "theorem__dgm_4_1"
    width = Assumption("m = Ω(n⁴ log(n/δ)/λ₀⁴)", "network", "cannot be checked", "no constant is given")
    status = TheoremStatus("DGM, Theorem 4.1 (two-layer ReLU, α ≤ 1)", "fits", (), (width,))
    why = "not checked: η‖Λ‖ ≤ 1/3 (Theorem C.1) (η‖Λ‖ = 0.1 on 4 samples only)"
    rows = [
        Row(0, 1, 0.0, {"loss": 1.0, name: 0.0}, {}, reasons={name: "max ‖v − v₀‖ = 2 is above R_v = 1"}),
        Row(1, 2, 0.0, {"loss": 1.0, name: 1.0}, {}, reasons={name: why}),
    ]
    (line,) = theorem_lines(History(Path(), "demo/1", "normtheory", theorems=(status,), rows=rows))
    assert line[1:] == ["DGM, Theorem 4.1 (in epoch 1; not checked: m = Ω(n⁴ log(n/δ)/λ₀⁴), η‖Λ‖ ≤ 1/3)"]


NAMES = ("α > 0 (A3.1)", "η < 2/β", "v within ρ₁ of v_0 (A3.2)")
LATER = tuple(Assumption(name, "run", "cannot be checked", NOT_YET) for name in NAMES)


def states(flag, reason, verdict="fits", static=()):
    name = "theorem__wn_5_1"
    metrics = {"wn_alpha": 0.5, "rho_1": 0.25} | ({} if flag is None else {name: flag})
    rows = [Row(0, 1, 0.0, metrics, {}, reasons={name: reason} if reason else {})]
    status = TheoremStatus("WN, Theorem 5.1", verdict, (), (*static, *LATER))
    found = judged_assumptions(History(Path(), "", "", theorems=(status,), rows=rows), status)
    return [(each.state, each.found) for each in found[len(static) :]]


def test_what_is_measured_in_training_is_replaced_by_what_was_measured():
    held = [("holds", "α of WN = 0.5"), ("holds", ""), ("holds", "ρ₁ = 0.25")]
    assert states(1.0, "") == held
    step = ("fails", "the paper's ηβ = 6.32, not below 2")
    assert states(0.0, step[1]) == [held[0], step, held[2]]
    partly = "not checked: α > 0 (A3.1) (the paper's α = 0.5, but measured on 4 of 8 samples)"
    unchecked = ("cannot be checked", "the paper's α = 0.5, but measured on 4 of 8 samples")
    assert states(1.0, partly) == [unchecked, *held[1:]]
    assert states(0.0, f"{step[1]}; {partly}") == [unchecked, step, held[2]]
    momentum = Assumption("gradient descent", "run", "fails", "momentum of 0.9")
    assert states(0.0, "momentum of 0.9", static=(momentum,)) == held
    old = states(0.0, "α = -3")  # as written by another version: nothing is said to hold
    assert [state for state, _ in old] == ["cannot be checked"] * 3


@pytest.mark.parametrize("verdict", ["generalized", "does not apply"])
def test_the_run_is_not_judged_if_the_network_part_fails(verdict):
    why = "not judged, since the network part fails"
    unknown = "cannot be checked"
    assert states(None, "", verdict) == [
        (unknown, f"α of WN = 0.5; {why}"),
        (unknown, why),
        (unknown, f"ρ₁ = 0.25; {why}"),
    ]


def test_the_text_report_has_the_words_of_the_end_table():
    name = "theorem__wn_5_1"
    rows = [
        Row(0, 1, 0.0, {name: 1.0}, {}),
        Row(1, 2, 0.0, {name: 0.0}, {}, reasons={name: "the paper's α = -2; not checked: η < 2/β (…)"}),
    ]
    status = TheoremStatus("WN, Theorem 5.1 (optimization)", "fits", ("the run: momentum", "not checked: a"))
    text = theorems(History(Path(), "", "", theorems=(status, *THEOREMS[1:]), rows=rows))
    assert text.splitlines() == [
        "WN, Theorem 5.1 (optimization)    applies in epoch 0",
        "    not checked: a; epoch 0: the run fits; epoch 1: the run does not fit (the",
        "    paper's α = -2)",
        "WN, Theorem 6.1 (generalization)  applies",
        "BN, Theorem 2.1 (two-layer ReLU)  does not apply",
        "    no BatchNorm",
    ]
