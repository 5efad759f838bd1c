"""The cases on which curvature is tried: models, losses, batches, and the matrix that the products make."""

import pytest
import torch
from torch import nn

from lightning_normtheory.hessian import hessian_operator

from support.models import MODELS, Model


def sum_square(output, y):
    return (output - y).square().sum() / len(output)


LOSSES = {"square": sum_square, "cross entropy": nn.functional.cross_entropy}
TABLE = pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
SHORT_LAST = [4, 3]

# The cross entropy of these runs by default; on the other models it differs from the square loss only outside of them.
CROSS_ENTROPY = ("mlp", "wn-hook-dim-0", "wn-parametrized-dim-0", "bn", "conv", "lstm")
# Every model with its running statistics, those with a BatchNorm also with the statistics of each batch.
CASES = [
    pytest.param(name, loss, train, marks=[pytest.mark.slow] * (loss != "square" and name not in CROSS_ENTROPY))
    for name, case in MODELS.items()
    for loss in LOSSES
    for train in ((False, True) if case.coupled else (False,))
    if loss == "square" or len(case.outputs) == 1
]


def batches_of(case: Model, loss: str = "square", sizes=SHORT_LAST, dtype=torch.float64):
    x, y = case.data(sum(sizes), dtype=dtype)
    y = case.labels(len(y)) if loss == "cross entropy" else y
    return list(zip(x.split(sizes), y.split(sizes)))


def prepared(name: str, train: bool) -> nn.Module:
    """With dropout off, as the library measures: the references run the model as it is."""
    return without_dropout(MODELS[name].make().train(train))


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    return model


def assembled(model, loss, batches, **options) -> torch.Tensor:
    """The matrix (p, p) of the products with all unit vectors."""
    with hessian_operator(model, loss, batches, **options) as hessian:
        return torch.stack([hessian @ column for column in torch.eye(hessian.space.size, dtype=torch.float64)], 1)


def ones_like(model):
    return {name: torch.ones_like(p) for name, p in model.named_parameters() if p.requires_grad}
