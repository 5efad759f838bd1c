"""WN, Theorems 5.1 and 6.1."""

import math

from lightning_normtheory.architecture.chain import Chain
from lightning_normtheory.record.theorem_status import NOT_YET, TheoremStatus
from lightning_normtheory.theorems.verdicts.chains import (
    OF_CHAINS,
    PARTLY,
    check_activation,
    check_descent,
    check_input_norm,
    check_one_output,
    check_square_loss,
    check_step,
    check_trained,
    check_value,
)
from lightning_normtheory.theorems.verdicts.facts import NOT_SHOWN, Facts, Judge, Run, status

__all__ = ["weight_norm_generalization", "weight_norm_optimization", "wn_iterates", "wn_radius"]

_LENGTHS = "lengths g = 1/√m, not trained"
_LINEAR, _UNIT = "a linear output vᵀh without WeightNorm", "‖v_0‖ = 1 (Assumption 2)"
# The properties of WN's hidden layers, by the beginnings of their differences in `Problem.weight_norm_differences`.
_HIDDEN = {
    "WeightNorm in every hidden layer": ("no WeightNorm", "not one length", "applied at", "a factor"),
    _LENGTHS: ("trained lengths", "lengths g"),
    "one width m": ("hidden layers of different",),
}


def weight_norm_optimization(facts: Facts, run: Run | None) -> TheoremStatus:
    """Judge WN, Theorem 5.1: Assumptions 1, 2 and, for the run, 3."""
    judge, problem = Judge("network"), facts.problem
    judge.check("f is a chain of layers", problem.chain if isinstance(problem.chain, str) else "")
    _check_network(judge, facts)
    check_activation(judge, problem)
    check_input_norm(judge, facts, 1.0, "1")
    check_square_loss(judge, problem)
    check_one_output(judge, problem)
    check_trained(judge, facts)
    of_run = None if run is None else wn_iterates(run)
    return status("WN, Theorem 5.1 (optimization)", judge, of_run)


def _check_network(judge: Judge, facts: Facts) -> None:
    chain = facts.problem.chain
    if isinstance(chain, str):
        for name in (*_HIDDEN, "no biases", _LINEAR, _UNIT):
            judge.unknown(name, OF_CHAINS)
        return
    differences = facts.problem.weight_norm_differences
    without = [each for each in differences if each.startswith(("no WeightNorm", "not one length"))]
    for name, beginnings in _HIDDEN.items():
        found = [each for each in differences if each.startswith(beginnings)]
        if name == _LENGTHS and without and not found:
            judge.unknown(name, "; ".join(without))
        else:
            judge.check(name, found, needed=False)
    biases = [each for each in differences if each.startswith("a bias")]
    if chain.head.affine.bias is not None:
        biases.append("the output layer has a bias")
    judge.check("no biases", biases, needed=False)
    _check_head(judge, chain)


def _check_head(judge: Judge, chain: Chain) -> None:
    """Compare the output layer with WN's: linear, no WeightNorm, a unit vector at initialization."""
    head = chain.head
    found = []
    if head.affine.origin.kind == "weight_norm":
        found.append("the output layer has WeightNorm")
    if not math.isclose(head.before, 1, rel_tol=1e-3):
        found.append("the input of the output layer has a factor")
    judge.check(_LINEAR, found, needed=False)
    largest = head.affine.row * abs(head.after)
    different = "" if math.isclose(largest, 1, rel_tol=1e-3) else f"the largest ‖v_h‖ is {largest:.3g}, not 1"
    judge.check(_UNIT, different, f"{largest:.3g}", needed=False)


def wn_iterates(run: Run) -> Judge:
    """Judge Assumption 3. ρ₁ and ρ₂ are those of the run, so that the second halves of (A3.2) and (A3.3) hold."""
    judge = Judge("run")
    check_descent(judge, run)
    check_value(judge, run, "α > 0 (A3.1)", "wn_alpha", "α", above=0.0)
    check_step(judge, run, "wn_beta")
    _check_radius(judge, run, "v within ρ₁ of v_0 (A3.2)")
    return judge


def _check_radius(judge: Judge, run: Run, name: str) -> None:
    radius = run.values.get("rho_1")
    if radius is None:
        judge.unknown(name, NOT_YET if not run.values else "ρ₁ is not known for this network")
    else:
        judge.check(name, "" if math.isfinite(radius) else "ρ₁ is not finite", f"ρ₁ = {radius:.3g}, as measured")


def weight_norm_generalization(facts: Facts, run: Run | None) -> TheoremStatus:
    """Judge WN, Theorem 6.1. Our bound, of `network_complexity`, is for other networks and losses, too."""
    judge, problem = Judge("network"), facts.problem
    judge.check("a class with a known complexity", problem.complexity if isinstance(problem.complexity, str) else "")
    judge.check("f is a chain of layers", problem.chain if isinstance(problem.chain, str) else "", needed=False)
    _check_network(judge, facts)
    check_activation(judge, problem, smooth_needed=False)
    shifted = [f"φ(0) of {phi.name} is {phi.at_zero:.3g}, not 0" for phi in problem.activations if phi.at_zero != 0]
    if shifted or problem.recognized:
        judge.check("φ(0) = 0", shifted, needed=False)
    else:
        judge.unknown("φ(0) = 0", PARTLY)
    check_input_norm(judge, facts, 1.0, "1")
    check_square_loss(judge, problem, needed=False)
    _check_targets(judge, facts)
    check_one_output(judge, problem)
    judge.unknown("i.i.d. samples", NOT_SHOWN)
    return status("WN, Theorem 6.1 (generalization)", judge, None if run is None else wn_radius(run))


def wn_radius(run: Run) -> Judge:
    """Judge the run for Theorem 6.1, which asks only for a ball of output weights."""
    judge = Judge("run")
    _check_radius(judge, run, "v within ρ₁ of v_0")
    return judge


def _check_targets(judge: Judge, facts: Facts) -> None:
    loss = facts.problem.loss
    if isinstance(loss, str) or not loss.is_square:
        judge.unknown("|y| ≤ 1", "the targets of another loss")
        return
    large = f"|y| reaches {loss.largest_target:.3g}, above 1" if loss.largest_target > 1 else ""
    part = facts.part(facts.examined)
    judge.check_samples(part, "|y| ≤ 1", large, f"{loss.largest_target:.3g}", needed=False)
