"""LIN, Theorem 3.2."""

from lightning_normtheory.architecture.chain import Chain
from lightning_normtheory.architecture.operations import Affine, walk
from lightning_normtheory.record.theorem_status import NOT_YET, TheoremStatus
from lightning_normtheory.theorems.papers.lin_form import lin_form
from lightning_normtheory.theorems.verdicts.chains import (
    check_activation,
    check_gaussian,
    check_one_output,
    check_trained,
)
from lightning_normtheory.theorems.verdicts.facts import Facts, Judge, Run, status

__all__ = ["lin_ball", "linearity"]

_FROZEN, _NOT_LINEAR = "weights that are not trained", "the output layer is not linear"
_START, _WIDE, _LIMIT = "W_0 ~ N(0, 1)", "m > d (Lemma G.1)", "m → ∞"
# The properties of the layers, by the beginnings of their differences in `lin_form`. Those of the activations have
# assumptions of their own.
_LAYERS = {
    "no biases": ("a bias",),
    "a factor 1/√fan-in in every layer": ("no factor",),
    "one width m": ("hidden layers of different",),
    "": ("the activation", "different activations", _FROZEN),
}


def linearity(facts: Facts, run: Run | None) -> TheoremStatus:
    """Judge LIN, Theorem 3.2, and Appendix H for convolutions and skip connections: smooth activations, a linear
    output, factors 1/√fan-in and a start of N(0, 1).

    The theorem is asymptotic in the width, so it cannot be generalized to other networks. It is about a ball of
    parameters, whatever the training is that stays in it.
    """
    judge, problem = Judge("network"), facts.problem
    differences = lin_form(problem)
    followed = problem.recognized and not any(each.startswith(_NOT_LINEAR) for each in differences)
    _check_layers(judge, differences, followed)
    layers = [step for step in walk(problem.output) if isinstance(step, Affine)]
    if problem.recognized and len(layers) > 1:
        start = {layer.origin.name.removesuffix(".weight"): (layer.weight, 1.0) for layer in layers}
        check_gaussian(judge, _START, start, needed=True)
        width, inputs = len(layers[0].weight), _inputs(layers[0])
        narrow = "" if width > inputs else f"the width {width} is not above the {inputs} inputs"
        judge.check(_WIDE, narrow, f"{width} > {inputs}")
        judge.unknown(_LIMIT, f"asymptotic: the layers have {width} units, and no constant is given")
    else:
        for name in (_START, _WIDE, _LIMIT):
            judge.unknown(name, "the hidden layers are not recognized")
    check_activation(judge, problem, one_needed=True, lipschitz=False)
    check_one_output(judge, problem, needed=True)
    if isinstance(problem.chain, Chain) or not followed:
        check_trained(judge, facts, needed=True)
    else:
        judge.check("every layer is trained", [each for each in differences if each.startswith(_FROZEN)])
        judge.check("no dropout", facts.dropped)
    return status("LIN, Theorem 3.2 (constant kernel)", judge, None if run is None else lin_ball(run))


def _check_layers(judge: Judge, differences: tuple[str, ...], followed: bool) -> None:
    """Check each property of the layers; ``followed``: whether `lin_form` has seen all of them."""
    known = tuple(beginning for beginnings in _LAYERS.values() for beginning in beginnings)
    others = [each for each in differences if not each.startswith(known)]
    judge.check("layers and skip connections of (46), (73) or (80), a linear output", others)
    for name, beginnings in _LAYERS.items():
        found = [each for each in differences if each.startswith(beginnings)]
        if name and (found or followed):
            judge.check(name, found)
        elif name:
            judge.unknown(name, "not all layers have been compared")


def _inputs(layer: Affine) -> int:
    """Return d, of a convolution the number of channels."""
    return layer.source.shape[0] if layer.units_first else layer.weight.shape[1]


def lin_ball(run: Run) -> Judge:
    """Judge the run: it must stay in a ball, of any radius."""
    judge = Judge("run")
    judge.unknown("‖θ − θ₀‖ ≤ R for a fixed R", "any R will do, in the limit" if run.values else NOT_YET)
    return judge
