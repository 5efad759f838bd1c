"""BN, Theorems 2.1 and 2.2."""

import math
from collections.abc import Callable

import torch

from lightning_normtheory.record.theorem_status import TheoremStatus
from lightning_normtheory.theorems.papers.bn_form import BatchNormForm
from lightning_normtheory.theorems.papers.bn_margin import class_signs
from lightning_normtheory.theorems.problem import Problem
from lightning_normtheory.theorems.verdicts.chains import check_gaussian
from lightning_normtheory.theorems.verdicts.facts import NOT_SHOWN, Facts, Judge, Run, status

__all__ = ["bn_descent", "bn_steps", "two_layer_batch_norm", "two_layer_batch_norm_descent"]

_TRAINED, _MARGIN = "a, c and V are trained", "γ_a + γ_c > 0 (Assumption 1.2)"
_WIDTH = "m within [2²⁹ε_N³ ln^{3/2}(5nt/δ)/γ², δ exp(d/8)]"
_ONES, _V, _A = "c = 1 at the start", "V_0 ~ N(0, 1/d)", "a_0 ~ N(0, 1/m)"


def two_layer_batch_norm(facts: Facts, run: Run | None) -> TheoremStatus:
    """Judge BN, Theorem 2.1, whose printed constants differ from those of the paper's proof."""
    judge, of_run = _judges(facts, run, bn_steps)
    judge.unknown("i.i.d. samples", NOT_SHOWN)
    notes = ["the printed constants differ from those of the paper's proof"]
    return status("BN, Theorem 2.1 (two-layer ReLU)", judge, of_run, notes)


def two_layer_batch_norm_descent(facts: Facts, run: Run | None) -> TheoremStatus:
    """Judge BN, Theorem 2.2. It is unproved: that is an assumption, so that no verdict is without it."""
    judge, of_run = _judges(facts, run, bn_descent)
    judge.unknown("a proof", "as printed, unproved: its eq. (6) rests on Lemma F.1, which is false")
    return status("BN, Theorem 2.2 (gradient descent)", judge, of_run)


def _judges(facts: Facts, run: Run | None, judge_steps: Callable[[Run], Judge]) -> tuple[Judge, Judge | None]:
    """Judge network and run, as far as that is possible for a network that does not have BN's form."""
    judge, form = Judge("network"), facts.batchnorm
    if isinstance(form, str):
        _check_other(judge, form, facts)
    else:
        judge.check("BN's network (Section 1.3)", "", f"m = {len(form.v)}, ε_N = {form.epsilon_n:.3g}")
        _check_network(judge, form, facts)
        _check_start(judge, form)
    return judge, None if run is None else judge_steps(run)


def _check_other(judge: Judge, why: str, facts: Facts) -> None:
    """Check what can be checked of a network that does not have BN's form."""
    judge.check("BN's network (Section 1.3)", why)
    _check_loss(judge, facts.problem)
    judge.check("no dropout", facts.dropped)
    if facts.targets is None or facts.targets.dim() == 0:
        judge.unknown("y = ±1", "the labels are not known")
    else:
        two = class_signs(facts.targets, len(facts.targets)) is not None
        part = facts.part(len(facts.targets))
        judge.check_samples(part, "y = ±1", "" if two else "the labels do not have two classes")
    for name in ("‖x̄_i‖ ≤ 1", _TRAINED, _MARGIN, _WIDTH, _ONES, _V, _A):
        judge.unknown(name, "examined only for BN's network")


def _check_network(judge: Judge, form: BatchNormForm, facts: Facts) -> None:
    largest = float(form.x_centered.norm(dim=1).max())
    far = f"‖x̄‖ of the centered inputs reaches {largest:.3g}, but may be at most 1" if largest > 1.001 else ""
    part = facts.part(len(form.x_centered))
    judge.check_samples(part, "‖x̄_i‖ ≤ 1", far, f"at most {largest:.3g}")
    _check_loss(judge, facts.problem)
    trained = {id(p) for p in facts.problem.trained.values()}
    own = {"v": form.network.hidden.weight, "c": form.network.norm.weight, "a": form.network.head.weight}
    frozen = [name for name, tensor in own.items() if tensor is not None and id(tensor) not in trained]
    judge.check(_TRAINED, f"not trained: {', '.join(frozen)}" if frozen else "")
    judge.check("no dropout", facts.dropped)
    judge.check_samples(part, "y = ±1", "" if facts.signs is not None else "the labels do not have two classes")
    if facts.margin is not None:
        none = "" if facts.margin > 0 else "the margin γ_a + γ_c at initialization is 0"
        judge.check_samples(part, _MARGIN, none, f"{facts.margin:.3g}")
    else:
        judge.unknown(_MARGIN, "the margin is known only for two classes")
    found, width = facts.batchnorm_theorem, len(form.v)
    if found is not None:
        allowed = f"at least {found.width_lower:.2g} and at most {found.width_upper:.2g}"
        wrong = f"no width fits: {allowed}" if found.width_lower > found.width_upper else ""
        wrong = wrong or ("" if found.width_ok else f"the width is {width}, but must be {allowed}")
        judge.check(_WIDTH, wrong, str(width))
    else:
        judge.unknown(_WIDTH, f"m = {width}, and γ is not known or 0")


def _check_loss(judge: Judge, problem: Problem) -> None:
    loss = problem.loss
    other = loss if isinstance(loss, str) else "" if loss.name == "logistic" else "the loss is not the logistic loss"
    if not other and not isinstance(loss, str) and not math.isclose(loss.scale, 1, rel_tol=1e-3):
        other = f"the loss is {loss.scale:.3g} times the logistic loss"
    judge.check("logistic loss ln(1 + exp(−yf))", other)


def _check_start(judge: Judge, form: BatchNormForm) -> None:
    width, d = form.v.shape
    ones = bool(torch.allclose(form.c.detach(), torch.ones_like(form.c), rtol=1e-3))
    judge.check(_ONES, "" if ones else "c is not 1 at the start")
    check_gaussian(judge, _V, {"V": (form.v, d**-0.5)}, needed=True)
    check_gaussian(judge, _A, {"a": (form.a, width**-0.5)}, needed=True)


def bn_steps(run: Run) -> Judge:
    """Judge SGD of one pass over fresh samples, one in each step, with the statistics of all samples."""
    judge = Judge("run")
    judge.check("steps θ − η∇ℓ_i", run.optimizer)
    one = "" if run.batch == 1 else f"steps on {run.batch or 'an unknown number of'} samples, not on one"
    judge.check("SGD: one sample in each step", one)
    judge.check("μ and Σ of the whole training set", run.batches and f"BatchNorm has those of the batch: {run.batches}")
    again = f"pass {run.epoch} over the same samples" if run.epoch > 1 else ""
    judge.check("fresh samples: one pass", again)
    _check_rate(judge, run)
    return judge


def bn_descent(run: Run) -> Judge:
    """Judge gradient descent on the whole training set, with its statistics."""
    judge = Judge("run")
    judge.check("steps θ − η∇L", run.optimizer)
    judge.check("GD: the whole training set in each step", run.batches)
    _check_rate(judge, run)
    return judge


def _check_rate(judge: Judge, run: Run) -> None:
    name = "η = 1/(28ε_Nγ^{2/3}m^{1/3})"
    if run.asked_rate is None or run.rate is None:
        judge.unknown(name, "η is not known" if run.rate is None else "the margin is not known")
    else:
        equal = math.isclose(run.rate, run.asked_rate, rel_tol=1e-2)
        judge.check(name, "" if equal else f"η is {run.rate:.3g}, not {run.asked_rate:.3g}", f"{run.rate:.3g}")
