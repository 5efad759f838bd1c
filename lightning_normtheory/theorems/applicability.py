"""Check which theorems apply to a network: each applies, is generalized, or does not apply."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_normtheory.architecture.activations import ActivationConstants
from lightning_normtheory.architecture.chain import Chain
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.record.theorem_status import TheoremStatus
from lightning_normtheory.theorems.papers.bn_bounds import batchnorm_theorem
from lightning_normtheory.theorems.papers.bn_form import BatchNormForm, batchnorm_form
from lightning_normtheory.theorems.papers.bn_margin import batchnorm_margin
from lightning_normtheory.theorems.papers.dgm import dgm_form
from lightning_normtheory.theorems.problem import Problem, network_problem

__all__ = ["applicable_theorems", "check_theorems", "why_not_batchnorm"]

_ONE_OUTPUT = "the model does not have exactly one output"


def applicable_theorems(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[TheoremStatus, ...]:
    """Check each theorem of the five papers for a model on samples x (n, …) with targets y.

    Args:
        loss: ``loss(output, target)``, the mean loss that the model is trained with.

    Returns:
        One verdict per theorem, with its reasons.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> rows = applicable_theorems(model, torch.randn(8, 3), torch.zeros(8, 1), nn.MSELoss())
        >>> print(rows[0])
        WN, Theorem 5.1 (optimization): does not apply (the activation ReLU is not smooth)
    """
    problem = network_problem(model, x, y, loss)
    with preserve_state(model, batch_stats=True), torch.no_grad():
        outputs = model(x)
        one = isinstance(outputs, Tensor) and outputs.numel() == len(x)
        dgm = dgm_form(model, x.flatten(1), outputs) if one else _ONE_OUTPUT
        form = batchnorm_form(model, x.flatten(1), outputs) if one else _ONE_OUTPUT
    return check_theorems(problem, dgm=dgm if isinstance(dgm, str) else "", batchnorm=why_not_batchnorm(form, y))


def why_not_batchnorm(form: BatchNormForm | str, targets: Tensor | None) -> str:
    """Return why BN, Theorem 2.1 does not apply to a network and its samples; empty if it does.

    Args:
        form: the result of `batchnorm_form`.
        targets: the labels of the same samples.
    """
    if isinstance(form, str):
        return form
    largest = float(form.x_centered.norm(dim=1).max())
    if largest > 1.001:
        return f"‖x̄‖ of the centered inputs reaches {largest:.3g}, but may be at most 1"
    values = torch.empty(0, device="cpu") if targets is None else targets.flatten().unique()
    if len(values) != 2 or targets is None or targets.numel() != len(form.x_centered):
        return "the labels do not have two classes"
    signs = torch.where(targets.flatten() == values[1], 1, -1).cpu()
    width, d = form.v.shape
    gamma = sum(batchnorm_margin(features, signs).value for features in (form.features_a, form.features_c))
    if gamma <= 0:
        return "the margin γ_a + γ_c at initialization is 0"
    theorem = batchnorm_theorem(
        epsilon_n=form.epsilon_n, gamma=gamma / math.sqrt(width), n=len(signs), d=d, width=width, steps=1, delta=0.01
    )
    allowed = f"{theorem.width_lower:.2g} to {theorem.width_upper:.2g}"
    return "" if theorem.width_ok else f"the width is {width}, but must be {allowed}"


def check_theorems(problem: Problem, *, dgm: str = "", batchnorm: str = "") -> tuple[TheoremStatus, ...]:
    """Check each theorem for a `Problem`.

    Args:
        dgm: why the network does not have the form of DGM; empty if it does.
        batchnorm: why the network does not satisfy the assumptions of BN; empty if it does.

    Example:
        >>> from lightning_normtheory.theorems.losses import KnownLoss
        >>> from lightning_normtheory.architecture.recorder import record_forward
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> problem = Problem(record_forward(net, torch.randn(2, 3)), (1.0, 1.0), KnownLoss("square"))
        >>> print(check_theorems(problem, dgm="no WeightNorm", batchnorm="no BatchNorm")[0])
        WN, Theorem 5.1 (optimization): does not apply (the activation ReLU is not smooth)
    """
    return (
        _weight_norm_optimization(problem),
        _weight_norm_generalization(problem),
        _restricted_strong_convexity(problem),
        _dukler(problem, dgm),
        _batch_norm(problem, batchnorm),
        _linearity(problem),
    )


def _activation_problems(problem: Problem) -> list[str]:
    """Return the violations of smoothness, which every form of the theorems needs."""
    unbounded = {"exp": "has unbounded derivatives"}
    return [
        f"the activation {phi.name} {unbounded.get(phi.name, 'is not smooth')}"
        for phi in problem.activations
        if math.isinf(phi.smoothness)
    ]


def _activation_differences(problem: Problem) -> list[str]:
    return [
        f"|φ'| of {phi.name} reaches {phi.lipschitz:.4g}, above 1" for phi in problem.activations if phi.lipschitz > 1
    ]


def _measured(activations: Iterable[ActivationConstants]) -> tuple[str, ...]:
    return tuple(f"the constants of {phi.name} are measured, not derived" for phi in activations if phi.measured)


def _loss_problems(problem: Problem) -> list[str]:
    loss = problem.loss
    if isinstance(loss, str):
        return [loss]
    return [] if loss.is_square else [f"the loss is a {loss.name.replace('_', ' ')}, not the square loss"]


def _loss_differences(problem: Problem) -> list[str]:
    loss = problem.loss
    found = []
    if not isinstance(loss, str) and loss.is_square and loss.scale != 1:
        found.append(f"the loss is {loss.scale:.3g} times the theorem's loss")
    if problem.outputs > 1:
        found.append(f"the model has {problem.outputs} outputs, not one")
    return found


def _norm_difference(problem: Problem, value: float, name: str) -> list[str]:
    if problem.inputs_have_norm(value):
        return []
    low, high = problem.x_norms
    measured = f"{high:.3g}" if math.isclose(low, high, rel_tol=1e-3) else f"between {low:.3g} and {high:.3g}"
    return [f"‖x‖ is {measured}, not {name}"]


def _head_differences(problem: Problem) -> list[str]:
    """Compare the output layer with WN's: linear, no bias, no WeightNorm, a unit vector at initialization."""
    if isinstance(problem.chain, str):
        return []
    head = problem.chain.head.affine
    found = []
    if head.origin.kind == "weight_norm":
        found.append("the output layer has WeightNorm")
    if head.bias is not None:
        found.append("the output layer has a bias")
    if not math.isclose(problem.chain.head.before, 1, rel_tol=1e-3):
        found.append("the input of the output layer has a factor")
    largest = head.row * abs(problem.chain.head.after)
    if not math.isclose(largest, 1, rel_tol=1e-3):
        found.append(f"the largest ‖v_h‖ is {largest:.3g}, not 1")
    return found


def _length_difference(chain: Chain | str) -> list[str]:
    """Compare the output weights with RSC's, which are unit vectors at initialization."""
    if isinstance(chain, str) or math.isclose(chain.head.affine.row, 1, rel_tol=1e-3):
        return []
    return [f"the largest ‖v_h‖ is {chain.head.affine.row:.3g}, not 1"]


def _verdict(theorem: str, problems: list[str], differences: list[str], problem: Problem) -> TheoremStatus:
    if problems:
        return TheoremStatus(theorem, "does not apply", tuple(dict.fromkeys(problems)))
    measured = _measured(problem.activations)
    if differences:
        return TheoremStatus(theorem, "generalized", (*dict.fromkeys(differences), *measured))
    return TheoremStatus(theorem, "applies", measured)


def _weight_norm_optimization(problem: Problem) -> TheoremStatus:
    chain = problem.chain
    problems = _activation_problems(problem) + ([chain] if isinstance(chain, str) else []) + _loss_problems(problem)
    return _verdict("WN, Theorem 5.1 (optimization)", problems, _weight_norm_differences(problem), problem)


def _weight_norm_differences(problem: Problem) -> list[str]:
    return (
        list(problem.weight_norm_differences)
        + _head_differences(problem)
        + _activation_differences(problem)
        + _norm_difference(problem, 1.0, "1")
        + _loss_differences(problem)
    )


def _weight_norm_generalization(problem: Problem) -> TheoremStatus:
    problems, loss = [], problem.loss
    if isinstance(problem.complexity, str):
        problems.append(problem.complexity)
    if isinstance(loss, str):
        problems.append(loss)
    differences = (
        _weight_norm_differences(problem)
        + (_loss_problems(problem) if not isinstance(loss, str) else [])
        + [f"φ(0) of {phi.name} is {phi.at_zero:.3g}, not 0" for phi in problem.activations if phi.at_zero != 0]
    )
    if not isinstance(loss, str) and loss.is_square and loss.largest_target > 1:
        differences.append(f"|y| reaches {loss.largest_target:.3g}, above 1")
    return _verdict("WN, Theorem 6.1 (generalization)", problems, differences, problem)


def _restricted_strong_convexity(problem: Problem) -> TheoremStatus:
    chain = problem.chain
    problems = _activation_problems(problem) + ([chain] if isinstance(chain, str) else []) + _loss_problems(problem)
    inputs = 1 if isinstance(chain, str) else chain.links[0].affine.weight.shape[1]
    differences = (
        list(problem.rsc_differences)
        + _activation_differences(problem)
        + _norm_difference(problem, math.sqrt(inputs), f"√{inputs}")
        + _length_difference(chain)
        + _loss_differences(problem)
    )
    return _verdict("RSC, Theorems 5.1 to 5.3 (optimization)", problems, differences, problem)


def _dukler(problem: Problem, reason: str) -> TheoremStatus:
    theorem = "DGM, Theorems 4.1 and 4.2 (two-layer ReLU)"
    problems = [reason] if reason else _loss_problems(problem)
    if problems:
        return TheoremStatus(theorem, "does not apply", tuple(problems))
    return TheoremStatus(theorem, "applies", ("in the limit of infinite width, for small enough steps",))


def _batch_norm(problem: Problem, reason: str) -> TheoremStatus:
    theorem = "BN, Theorem 2.1 (two-layer ReLU)"
    problems = [reason] if reason else []
    loss = problem.loss
    if not reason and (isinstance(loss, str) or loss.name != "logistic"):
        problems.append(loss if isinstance(loss, str) else "the loss is not the logistic loss")
    if problems:
        return TheoremStatus(theorem, "does not apply", tuple(problems))
    return TheoremStatus(theorem, "applies", ("the printed constants differ from those of the paper's proof",))


def _linearity(problem: Problem) -> TheoremStatus:
    """Check LIN, Theorem 3.2: smooth activations, a linear output and a factor 1/√(fan-in) in every layer.

    The theorem is asymptotic in the width, so it cannot be generalized to other networks.
    """
    chain = problem.chain
    problems = _activation_problems(problem) + list(problem.rsc_differences)
    widths = [] if isinstance(chain, str) else [link.affine.size for link in chain.links[:-1]]
    reasons = tuple(dict.fromkeys(problems)) or (
        f"in the limit of infinite width; the narrowest layer has {min(widths, default=0)} units",
    )
    return TheoremStatus("LIN, Theorem 3.2 (constant kernel)", "does not apply" if problems else "applies", reasons)
