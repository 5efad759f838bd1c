"""RSC, Theorems 5.1 to 5.3."""

import math

from lightning_normtheory.architecture.chain import Chain
from lightning_normtheory.linalg.precision import to_float64
from lightning_normtheory.record.theorem_status import NOT_YET, TheoremStatus
from lightning_normtheory.theorems.verdicts.chains import (
    OF_CHAINS,
    check_activation,
    check_descent,
    check_gaussian,
    check_input_norm,
    check_one_output,
    check_square_loss,
    check_step,
    check_trained,
    check_value,
)
from lightning_normtheory.theorems.verdicts.facts import Facts, Judge, Run, status

__all__ = ["check_layers", "restricted_strong_convexity", "rsc_iterates"]

_START, _UNIT = "W_0 ~ N(0, σ₀²) with one σ₀ (Assumption 2)", "‖v_0‖ = 1 (Assumption 2)"
_DIRECTION, _WIDE = "v_0 is a random direction (Assumption 2)", "m ≥ d (Lemma A.1)"
# The properties of the layers, by the beginnings of their differences in `Problem.rsc_differences`.
_LAYERS = {
    "fully connected layers without WeightNorm": ("WeightNorm", "applied at", "pooling"),
    "no biases": ("a bias",),
    "a factor 1/√fan-in in every layer": ("no factor",),
    "one width m": ("hidden layers of different",),
}


def restricted_strong_convexity(facts: Facts, run: Run | None) -> TheoremStatus:
    """Judge RSC, Theorems 5.1 to 5.3: Assumptions 1, 2 and, for the run, 4."""
    judge, problem = Judge("network"), facts.problem
    judge.check("f is a chain of layers", problem.chain if isinstance(problem.chain, str) else "")
    notes: list[str] = []
    if isinstance(problem.chain, Chain):
        check_layers(judge, facts, needed=False)
        notes = _check_start(judge, problem.chain)
    else:
        for name in (*_LAYERS, _START, _UNIT, _DIRECTION, _WIDE):
            judge.unknown(name, OF_CHAINS)
    check_activation(judge, problem)
    if isinstance(problem.chain, Chain):
        inputs = problem.chain.links[0].affine.weight.shape[1]
        check_input_norm(judge, facts, math.sqrt(inputs), f"√{inputs}")
    else:
        judge.unknown("‖x_i‖ = √d (Assumption 2)", "d is not known without a chain of layers")
    check_square_loss(judge, problem)
    check_one_output(judge, problem)
    check_trained(judge, facts)
    theorem = "RSC, Theorems 5.1 to 5.3 (optimization)"
    return status(theorem, judge, None if run is None else rsc_iterates(run), notes)


def check_layers(judge: Judge, facts: Facts, *, needed: bool) -> None:
    """Check each property of the layers of RSC and LIN."""
    differences = facts.problem.rsc_differences
    for name, beginnings in _LAYERS.items():
        judge.check(name, [each for each in differences if each.startswith(beginnings)], needed=needed)


def _check_start(judge: Judge, chain: Chain) -> list[str]:
    """Check Assumption 2 about the weights, and m ≥ d, which Lemma A.1 uses; return remarks."""
    hidden, head = chain.links[:-1], chain.head.affine
    together = math.sqrt(
        sum(float(to_float64(link.affine.weight).square().sum()) for link in hidden)
        / max(sum(link.affine.weight.numel() for link in hidden), 1)
    )
    layers = {link.affine.origin.name.removesuffix(".weight"): (link.affine.weight, together) for link in hidden}
    check_gaussian(judge, _START, layers, needed=False, sigma="that of all hidden layers")
    different = "" if math.isclose(head.row, 1, rel_tol=1e-3) else f"the largest ‖v_h‖ is {head.row:.3g}, not 1"
    judge.check(_UNIT, different, f"{head.row:.3g}", needed=False)
    width, inputs = head.weight.shape[1], (hidden[0] if hidden else chain.head).affine.weight.shape[1]
    direction = {"v": (head.weight, head.row / math.sqrt(width))}
    check_gaussian(judge, _DIRECTION, direction, needed=False)
    narrow = "" if width >= inputs else f"the width {width} is below the {inputs} inputs"
    judge.check(_WIDE, narrow, f"{width} ≥ {inputs}", needed=False)
    sigma_1 = 2 * together * (1 + math.sqrt(math.log(max(width, 1)) / (2 * width)))
    if sigma_1 > 1:
        return [f"σ₁ = {sigma_1:.3g} is above 1, which Remark 4.1 calls undesirable"]
    return []


def rsc_iterates(run: Run) -> Judge:
    """Judge Assumption 4. ρ and ρ₁ are those of the run, so that (A4.2) holds for ρ < √m."""
    judge = Judge("run")
    check_descent(judge, run)
    check_value(judge, run, "α > 0 (A4.1)", "rsc_alpha", "α", above=0.0)
    check_step(judge, run, "rsc_beta")
    name = "θ in the spectral ball around θ₀ (A4.2)"
    radius = run.values.get("rho")
    if radius is None:
        judge.unknown(name, NOT_YET if not run.values else "ρ is not known for this network")
    else:
        judge.check(name, "" if math.isfinite(radius) else "ρ is not finite", f"ρ = {radius:.3g}, as measured")
    return judge
