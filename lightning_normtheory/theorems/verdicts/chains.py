"""Assumptions that several theorems make about chains of layers, and about gradient descent."""

import math
from collections.abc import Mapping

from torch import Tensor

from lightning_normtheory.architecture.chain import Chain
from lightning_normtheory.record.theorem_status import NOT_YET
from lightning_normtheory.record.wording import join_names
from lightning_normtheory.theorems.initialization import why_not_gaussian
from lightning_normtheory.theorems.losses import KnownLoss
from lightning_normtheory.theorems.problem import Problem
from lightning_normtheory.theorems.verdicts.facts import Facts, Judge, Run

__all__ = [
    "OF_CHAINS",
    "PARTLY",
    "check_activation",
    "check_descent",
    "check_gaussian",
    "check_input_norm",
    "check_one_output",
    "check_square_loss",
    "check_step",
    "check_trained",
    "check_value",
    "other_loss",
    "unbounded_derivatives",
]

_CLOSE = 1e-3
_CONSTANT = "L = (1/n)Σ_i(y_i − f(x_i))²"
# Why a property of the layers cannot be checked.
OF_CHAINS = "known only for a chain of layers"
PARTLY = "not every operation of the network is recognized"


def unbounded_derivatives(problem: Problem) -> list[str]:
    """Return the activations without a bound of φ''."""
    infinite = {"exp": "has unbounded derivatives"}
    return [
        f"the activation {phi.name} {infinite.get(phi.name, 'is not smooth')}"
        for phi in problem.activations
        if math.isinf(phi.smoothness)
    ]


def check_activation(
    judge: Judge, problem: Problem, *, smooth_needed: bool = True, one_needed: bool = False, lipschitz: bool = True
) -> None:
    """Check that there is one activation, smooth and with |φ'| ≤ 1 (Assumption 1 of WN and RSC)."""
    phis = problem.activations
    names = join_names([phi.name for phi in phis]) or "none"

    def check(name: str, problems: list[str], value: str, needed: bool) -> None:
        if problems or problem.recognized:
            judge.check(name, problems, value, needed=needed)
        else:
            judge.unknown(name, PARTLY)

    check("φ is smooth: |φ''| ≤ β_φ", unbounded_derivatives(problem), names, smooth_needed)
    if lipschitz:
        steep = [f"|φ'| of {phi.name} reaches {phi.lipschitz:.4g}, above 1" for phi in phis if phi.lipschitz > 1]
        check("φ is 1-Lipschitz: |φ'| ≤ 1", steep, "", False)
    different = [f"the activations {names} are different"] if len(phis) > 1 else []
    check("one φ in all layers", different, names, one_needed)
    if measured := [phi.name for phi in phis if phi.measured]:
        judge.unknown("the constants of φ", f"the constants of {join_names(measured)} are measured, not derived")


def check_trained(judge: Judge, facts: Facts, *, needed: bool = False) -> None:
    """Check that all weights are trained, under WeightNorm the directions, without dropout."""
    chain, trained = facts.problem.chain, {id(p) for p in facts.problem.trained.values()}
    if isinstance(chain, Chain):
        frozen = []
        for link in chain.links:
            origin = link.affine.origin
            own = origin.tensors[1:] if origin.kind == "weight_norm" else origin.tensors
            if any(id(tensor) not in trained for tensor in own):
                frozen.append(origin.name.removesuffix(".weight"))
        problem = f"not trained: {join_names(frozen)}" if frozen else ""
        judge.check("every layer is trained", problem, needed=needed)
    else:
        judge.unknown("every layer is trained", OF_CHAINS)
    judge.check("no dropout", facts.dropped)


def check_input_norm(judge: Judge, facts: Facts, value: float, name: str) -> None:
    problem = facts.problem
    low, high = problem.x_norms
    measured = f"{high:.3g}" if math.isclose(low, high, rel_tol=_CLOSE) else f"between {low:.3g} and {high:.3g}"
    different = "" if problem.inputs_have_norm(value) else f"‖x‖ is {measured}, not {name}"
    part = facts.part(facts.examined)
    judge.check_samples(part, f"‖x_i‖ = {name} (Assumption 2)", different, measured, needed=False)


def other_loss(loss: KnownLoss | str) -> str:
    """Say that a loss is not the square loss; empty if it is.

    Example:
        >>> other_loss(KnownLoss("logistic")), other_loss(KnownLoss("square"))
        ('the loss is a logistic loss, not the square loss', '')
    """
    if isinstance(loss, str):
        return loss
    name = {"logistic": "logistic loss"}.get(loss.name, loss.name.replace("_", " "))
    return "" if loss.is_square else f"the loss is a {name}, not the square loss"


def check_square_loss(judge: Judge, problem: Problem, *, needed: bool = True) -> None:
    """Check for L = (1/n)Σ_i(y_i − f(x_i))², and then for its constant."""
    loss = problem.loss
    if isinstance(loss, str) or not loss.is_square:
        judge.check("square loss", other_loss(loss), needed=needed or isinstance(loss, str))
        judge.unknown(_CONSTANT, "not a square loss, or an unknown one")
        return
    judge.check("square loss", "")
    usual = math.isclose(loss.scale, 1, rel_tol=_CLOSE) and not loss.summed
    summed = f"a sum over batches of {loss.summed} samples, " if loss.summed else ""
    scaled = "" if usual else f"the loss is {summed}{loss.scale:.3g} times the theorem's loss"
    judge.check(_CONSTANT, scaled, needed=False)


def check_one_output(judge: Judge, problem: Problem, *, needed: bool = False) -> None:
    more = f"the model has {problem.outputs} outputs, not one" if problem.outputs > 1 else ""
    judge.check("one output", more, needed=needed)


def check_gaussian(
    judge: Judge, name: str, layers: Mapping[str, tuple[Tensor, float | None]], *, needed: bool, sigma: str = ""
) -> None:
    """Check that each of the named weights is a Gaussian start, given σ or ``None``; ``sigma``: what σ is."""
    problems, few = [], []
    for layer, (weight, std) in layers.items():
        problem, enough = why_not_gaussian(weight, std)
        if problem:
            problem += f", {sigma}" if sigma and problem.startswith("the standard deviation") else ""
            problems.append(f"the start of {layer} is not Gaussian: {problem}")
        elif not enough:
            few.append(layer)
    if few and not problems:
        judge.unknown(name, f"{join_names(few)} has too few weights to tell")
    else:
        judge.check(name, problems, needed=needed)


def check_descent(judge: Judge, run: Run) -> None:
    """Check that every step is gradient descent on the whole training set."""
    judge.check("gradient descent θ − η∇L", run.optimizer, "" if run.rate is None else f"η = {run.rate:.3g}")
    judge.check("steps on the whole training set", run.batches)


def check_step(judge: Judge, run: Run, metric: str) -> None:
    """Check that η < 2/β, with β of this measurement."""
    beta = run.values.get(metric)
    if not run.values:
        judge.unknown("η < 2/β", NOT_YET)
    elif beta is None or run.rate is None:
        judge.unknown("η < 2/β", "η is not known" if run.rate is None else "β is not known for this network")
    else:
        omega = f"the paper's ηβ = {run.rate * beta:.3g}"
        if 1 + 1e-6 < run.rate * beta < 2:  # α and β are those of a step of 1/β: that of the run goes farther
            judge.unknown("η < 2/β", f"{omega}, with β of a step of 1/β, which is shorter")
        else:
            judge.check("η < 2/β", "" if run.rate * beta < 2 else f"{omega}, not below 2", omega)


def check_value(
    judge: Judge, run: Run, name: str, metric: str, symbol: str, *, above: float = -math.inf, below: float = math.inf
) -> None:
    """Check that a metric of this measurement, if it is of the whole training set, is between two numbers."""
    value = run.values.get(metric)
    if value is None:
        judge.unknown(name, NOT_YET if not run.values else f"{symbol} is not known for this network")
        return
    text = f"the paper's {symbol} = {value:.3g}"  # the report has our own beside it
    if not above < value < below:
        judge.check(name, text + (f", on a part of the training set: {run.probe}" if run.probe else ""))
    elif run.probe:
        judge.unknown(name, f"{text}, but {run.probe}")
    else:
        judge.check(name, "", text)
