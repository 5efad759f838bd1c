"""All theorems of the five papers."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.record.theorem_status import TheoremStatus
from lightning_normtheory.theorems.papers.bn_form import batchnorm_form
from lightning_normtheory.theorems.papers.dgm import dgm_form
from lightning_normtheory.theorems.problem import network_problem
from lightning_normtheory.theorems.verdicts.bn import (
    bn_descent,
    bn_steps,
    two_layer_batch_norm,
    two_layer_batch_norm_descent,
)
from lightning_normtheory.theorems.verdicts.dgm import dgm_steps, two_layer_relu
from lightning_normtheory.theorems.verdicts.facts import Facts, Judge, Run, dropout_layers, status
from lightning_normtheory.theorems.verdicts.lin import lin_ball, linearity
from lightning_normtheory.theorems.verdicts.rsc import restricted_strong_convexity, rsc_iterates
from lightning_normtheory.theorems.verdicts.wn import (
    weight_norm_generalization,
    weight_norm_optimization,
    wn_iterates,
    wn_radius,
)

__all__ = ["applicable_theorems", "judge_run", "judge_theorems"]

_THEOREMS: tuple[Callable[[Facts, Run | None], TheoremStatus], ...] = (
    weight_norm_optimization,
    weight_norm_generalization,
    restricted_strong_convexity,
    two_layer_relu,
    two_layer_batch_norm,
    two_layer_batch_norm_descent,
    linearity,
)
_RUNS: dict[str, Callable[[Run], Judge]] = {
    "wn_5_1": wn_iterates,
    "wn_6_1": wn_radius,
    "rsc_5_1": rsc_iterates,
    "dgm_4_1": dgm_steps,
    "dgm_4_2": dgm_steps,
    "bn_2_1": bn_steps,
    "bn_2_2": bn_descent,
    "lin_3_2": lin_ball,
}


def applicable_theorems(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], run: Run | None = None
) -> tuple[TheoremStatus, ...]:
    """Check each theorem of the five papers for a model on samples x (n, …) with targets y.

    Args:
        model: at initialization, about which many assumptions are.
        loss: ``loss(output, target)``, the loss that the model is trained with.
        run: how it is trained, if that is to be judged; the samples are then the training set. Without it no theorem
            "applies": a network at most "fits".

    Returns:
        One verdict per theorem, with its reasons and the state of each assumption.

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
        several = f"the model has {problem.outputs} outputs, not one"
        dgm = dgm_form(model, x.flatten(1), outputs) if one else several
        form = batchnorm_form(model, x.flatten(1), outputs) if one else several
    facts = Facts(problem, dgm, form, y, dropout_layers(model), len(x))
    if run is not None:
        asked = facts.batchnorm_theorem
        run = replace(run, loss=problem.loss, samples=len(x), asked_rate=asked.learning_rate if asked else None)
    return judge_theorems(facts, run)


def judge_theorems(facts: Facts, run: Run | None = None) -> tuple[TheoremStatus, ...]:
    """Judge each theorem by the facts about a network, and about its run if there is one.

    Example:
        >>> from lightning_normtheory.theorems.problem import Problem
        >>> from lightning_normtheory.theorems.losses import KnownLoss
        >>> from lightning_normtheory.architecture.recorder import record_forward
        >>> net = nn.Sequential(nn.Linear(50, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> problem = Problem(record_forward(net, torch.randn(2, 50)), (1.0, 1.0), KnownLoss("square"))
        >>> print(judge_theorems(Facts(problem))[3])
        DGM, Theorems 4.1 and 4.2 (two-layer ReLU): does not apply (the network has not been compared with DGM's)
    """
    return tuple(theorem(facts, run) for theorem in _THEOREMS)


def judge_run(row: TheoremStatus, run: Run) -> TheoremStatus:
    """Judge the run again, with what was found about the network at initialization.

    Example:
        >>> from lightning_normtheory.record.theorem_status import Assumption
        >>> found = (Assumption("φ(0) = 0", "network", "holds"),)
        >>> row = TheoremStatus("WN, Theorem 6.1 (generalization)", "fits", (), found)
        >>> judge_run(row, Run(values={"rho_1": 0.5})).verdict
        'applies'
    """
    network = Judge("network", [each for each in row.assumptions if each.part == "network"])
    return status(row.theorem, network, _RUNS[row.key](run) if row.key in _RUNS else Judge("run"))
