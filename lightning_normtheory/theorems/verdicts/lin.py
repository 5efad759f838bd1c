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

_FROZEN = "weights that are not trained"
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
    _check_layers(judge, differences)
    if not isinstance(problem.chain, Chain):  # of a chain, `check_trained` does
        judge.check("every layer is trained", [each for each in differences if each.startswith(_FROZEN)])
    layers = [step for step in walk(problem.output) if isinstance(step, Affine)]
    if len(layers) > 1:
        start = {layer.origin.name.removesuffix(".weight"): (layer.weight, 1.0) for layer in layers}
        check_gaussian(judge, "W_0 ~ N(0, 1)", start, needed=True)
        width, inputs = len(layers[0].weight), _inputs(layers[0])
        narrow = "" if width > inputs else f"the width {width} is not above the {inputs} inputs"
        judge.check("m > d (Lemma G.1)", narrow, f"{width} > {inputs}")
        judge.unknown("m → ∞", f"asymptotic: the layers have {width} units, and no constant is given")
    check_activation(judge, problem, one_needed=True, lipschitz=False)
    check_one_output(judge, problem, needed=True)
    check_trained(judge, facts, needed=True)
    return status("LIN, Theorem 3.2 (constant kernel)", judge, None if run is None else lin_ball(run))


def _check_layers(judge: Judge, differences: tuple[str, ...]) -> None:
    known = tuple(beginning for beginnings in _LAYERS.values() for beginning in beginnings)
    others = [each for each in differences if not each.startswith(known)]
    judge.check("layers and skip connections of (46), (73) or (80), a linear output", others)
    for name, beginnings in _LAYERS.items():
        if name:
            judge.check(name, [each for each in differences if each.startswith(beginnings)])


def _inputs(layer: Affine) -> int:
    """Return d, of a convolution the number of channels."""
    return layer.source.shape[0] if layer.units_first else layer.weight.shape[1]


def lin_ball(run: Run) -> Judge:
    """Judge the run: it must stay in a ball, of any radius."""
    judge = Judge("run")
    judge.unknown("‖θ − θ₀‖ ≤ R for a fixed R", "any R will do, in the limit" if run.values else NOT_YET)
    return judge
