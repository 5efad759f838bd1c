"""DGM, Theorems 4.1 and 4.2."""

import math

from lightning_normtheory.record.theorem_status import NOT_YET, TheoremStatus
from lightning_normtheory.theorems.papers.dgm import DGMForm
from lightning_normtheory.theorems.papers.dgm_rates import LARGEST_STEP, dgm_widths
from lightning_normtheory.theorems.problem import Problem
from lightning_normtheory.theorems.verdicts.chains import check_descent, other_loss
from lightning_normtheory.theorems.verdicts.facts import Facts, Judge, Run, status

__all__ = ["dgm_steps", "two_layer_relu"]

_START, _PARALLEL = "v_k(0) ~ N(0, α²I) (eq. (2.4))", "no two samples are parallel (Assumption 1)"
_WIDTH, _OF_FORM = "the width m = Ω(…)", "examined only for DGM's network"
_CONSTANT = "L = ½Σ_i(f(x_i) − y_i)² (eq. (2.5))"
_NORMS = {"v": "‖v − v₀‖", "g": "|g − g₀|"}


def two_layer_relu(facts: Facts, run: Run | None) -> TheoremStatus:
    """Judge DGM's theorem for the network's α: 4.1 if α ≤ 1, else 4.2."""
    judge, form, problem = Judge("network"), facts.dgm, facts.problem
    of_run = None if run is None else dgm_steps(run)
    if isinstance(form, str):
        _check_other(judge, form, facts)
        return status("DGM, Theorems 4.1 and 4.2 (two-layer ReLU)", judge, of_run)
    judge.check("DGM's network (eq. (1.2))", "", f"α = {form.alpha:.3g}, m = {form.width}")
    if form.start or form.enough:
        judge.check(_START, f"the start of v is not Gaussian: {form.start}" if form.start else "")
    else:
        judge.unknown(_START, "there are too few weights to tell")
    part = facts.part(form.samples)
    _check_norms(judge, part, form.x_norm)
    judge.check_samples(part, _PARALLEL, form.parallel)
    _check_inputs(judge, form.inputs)
    _check_loss(judge, problem)
    _check_width(judge, form, facts)
    judge.check("no dropout", facts.dropped)
    number, regime = ("4.1", "α ≤ 1") if form.directions_dominate else ("4.2", "α > 1")
    return status(f"DGM, Theorem {number} (two-layer ReLU, {regime})", judge, of_run)


def _check_other(judge: Judge, why: str, facts: Facts) -> None:
    """Check what can be checked of a network that does not have DGM's form."""
    judge.check("DGM's network (eq. (1.2))", why)
    judge.unknown(_START, _OF_FORM)
    _check_norms(judge, facts.part(facts.examined), facts.problem.x_norm)
    judge.unknown(_PARALLEL, _OF_FORM)
    _check_inputs(judge, facts.problem.inputs)
    _check_loss(judge, facts.problem)
    judge.unknown(_WIDTH, _OF_FORM)
    judge.check("no dropout", facts.dropped)


def _check_norms(judge: Judge, part: str, largest: float) -> None:
    name = "‖x_i‖ ≤ 1 (Assumption 1)"
    if math.isnan(largest):
        judge.unknown(name, "‖x‖ is not known")
        return
    far = "" if largest <= 1.001 else f"‖x‖ reaches {largest:.3g}, above 1"
    judge.check_samples(part, name, far, f"at most {largest:.3g}")


def _check_inputs(judge: Judge, d: int | None) -> None:
    if d is None:
        judge.unknown("d ≥ 50 (Assumption 2)", "d is not known")
    else:
        judge.check("d ≥ 50 (Assumption 2)", "" if d >= 50 else f"d is {d}, below 50", str(d))


def _check_loss(judge: Judge, problem: Problem) -> None:
    loss = problem.loss
    if isinstance(loss, str) or not loss.is_square:
        judge.check("square loss", other_loss(loss))
        judge.unknown(_CONSTANT, "not a square loss, or an unknown one")
        judge.unknown("‖y‖_∞ = O(1)", "the targets of another loss")
        return
    judge.check("square loss", "")
    own = loss.summed and math.isclose(loss.scale / loss.summed, 0.5, rel_tol=1e-3)
    what = "a sum with the constant" if loss.summed else "a mean with the constant"
    constant = loss.scale / max(loss.summed, 1)
    judge.check(_CONSTANT, "" if own else f"the loss is {what} {constant:.3g}", needed=False)
    judge.unknown("‖y‖_∞ = O(1)", f"the largest |y| is {loss.largest_target:.3g}, and no constant is given")


def _check_width(judge: Judge, form: DGMForm, facts: Facts) -> None:
    """Give the widths that the theorems ask for, up to the constant that they do not print."""
    n = form.samples if facts.samples is None else facts.samples
    least, floor = (form.lambda_0 if form.directions_dominate else form.mu_0), form.floor
    if n != form.samples:
        judge.unknown(_WIDTH, f"the least eigenvalue is that of {form.samples} of {n} samples")
        return
    if least <= floor:
        judge.unknown(_WIDTH, "λ_min(V∞) or λ_min(G∞) is zero up to rounding")
        return
    lengths = "m = Ω(max(n⁴ log(n/δ)/(α⁴μ₀⁴), n² log(n/δ)/μ₀²))"
    name = "m = Ω(n⁴ log(n/δ)/λ₀⁴)" if form.directions_dominate else lengths
    asked = dgm_widths(form, n=n, delta=facts.delta).own
    judge.unknown(name, f"m = {form.width}, {asked:.2g} up to a constant that is not given (δ = {facts.delta})")


def dgm_steps(run: Run) -> Judge:
    """Judge gradient descent with η ≤ 1/(3‖Λ‖) (Theorem C.1); for another constant of the loss, η is rescaled."""
    judge, loss = Judge("run"), run.loss
    check_descent(judge, run)
    name = "η‖Λ‖ ≤ 1/3 (Theorem C.1)"
    if run.lambda_max is None:
        judge.unknown(name, NOT_YET)
    elif run.rate is None or isinstance(loss, str):
        judge.unknown(name, "η is not known" if run.rate is None else "the loss is not known")
    else:
        # dL/df_i = 2s(f_i − y_i)/n; for the sum of a batch, s is the number of its samples times its constant.
        value = run.rate * 2 * loss.scale / (loss.summed or run.samples or run.kernel_samples) * run.lambda_max
        part = run.samples != run.kernel_samples
        text = f"η‖Λ‖ = {value:.3g}" + (f" on {run.kernel_samples} samples only" if part else "")
        if value > LARGEST_STEP * (1 + 1e-6):
            judge.check(name, f"{text}, above 1/3")
        elif part:
            judge.unknown(name, text)
        else:
            judge.check(name, "", text)
    _check_radii(judge, run)
    return judge


def _check_radii(judge: Judge, run: Run) -> None:
    """Check that v and g are within the radii of the proof. Those of a part of the training set are not smaller."""
    name = "‖v_k − v_k(0)‖ ≤ R_v and |g_k − g_k(0)| ≤ R_g (Appendix C)"
    names = ("v", "weightnorm_displacement_v", "dgm_radius_v"), ("g", "weightnorm_displacement_g", "dgm_radius_g")
    pairs = [(of, run.values.get(far, math.nan), run.values.get(most, math.nan)) for of, far, most in names]
    if any(math.isnan(far - most) for _, far, most in pairs):
        judge.unknown(name, "the radii are not measured" if run.values else NOT_YET)
        return
    beyond = [f"max {_NORMS[of]} = {far:.3g} is above R_{of} = {most:.2g}" for of, far, most in pairs if far > most]
    within = ", ".join(f"max {_NORMS[of]} = {far:.3g}, R_{of} = {most:.2g}" for of, far, most in pairs)
    if beyond or run.samples == run.kernel_samples:
        judge.check(name, beyond, within)
    else:
        judge.unknown(name, f"{within}, on {run.kernel_samples} samples only")
