"""LIN, Theorem 3.2."""

from lightning_normtheory.architecture.chain import Chain
from lightning_normtheory.record.theorem_status import NOT_YET, TheoremStatus
from lightning_normtheory.theorems.verdicts.chains import (
    check_activation,
    check_gaussian,
    check_one_output,
    check_trained,
)
from lightning_normtheory.theorems.verdicts.facts import Facts, Judge, Run, status
from lightning_normtheory.theorems.verdicts.rsc import check_layers

__all__ = ["lin_ball", "linearity"]


def linearity(facts: Facts, run: Run | None) -> TheoremStatus:
    """Judge LIN, Theorem 3.2: smooth activations, a linear output, factors 1/√fan-in and a start of N(0, 1).

    The theorem is asymptotic in the width, so it cannot be generalized to other networks. It is about a ball of
    parameters, whatever the training is that stays in it.
    """
    judge, problem = Judge("network"), facts.problem
    judge.check("a chain of layers with a linear output", problem.chain if isinstance(problem.chain, str) else "")
    if isinstance(problem.chain, Chain):
        check_layers(judge, facts, needed=True)
        links = problem.chain.links
        layers = {link.affine.origin.name.removesuffix(".weight"): (link.affine.weight, 1.0) for link in links}
        check_gaussian(judge, "W_0 ~ N(0, 1)", layers, needed=True)
        width, inputs = problem.chain.head.affine.weight.shape[1], links[0].affine.weight.shape[1]
        narrow = "" if width > inputs else f"the width {width} is not above the {inputs} inputs"
        judge.check("m > d (Lemma G.1)", narrow, f"{width} > {inputs}")
        judge.unknown("m → ∞", f"asymptotic: the layers have {width} units, and no constant is given")
    check_activation(judge, problem, one_needed=True, lipschitz=False)
    check_one_output(judge, problem, needed=True)
    check_trained(judge, facts, needed=True)
    return status("LIN, Theorem 3.2 (constant kernel)", judge, None if run is None else lin_ball(run))


def lin_ball(run: Run) -> Judge:
    """Judge the run: it must stay in a ball, of any radius."""
    judge = Judge("run")
    judge.unknown("‖θ − θ₀‖ ≤ R for a fixed R", "any R will do, in the limit" if run.values else NOT_YET)
    return judge
