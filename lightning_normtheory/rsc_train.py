"""Estimate the RSC ratio and both gradients of the whole training set from the batches of a probe."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_normtheory.linalg.sampling import SKETCH, Estimate, add_sketch, square_norm_of_set
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.model.checks import count_output_samples, list_batches, trainable_parameters
from lightning_normtheory.rsc import (
    RSC,
    add_gradients,
    flat_gradients,
    gradients_of,
    rsc_from_sums,
    why_no_ratio,
    zero_gradient,
)

__all__ = [
    "MOST_GROUPS",
    "RSCTrain",
    "add_to_table",
    "mean_squares",
    "rsc_of_set",
    "rsc_ratio_train",
    "same_spread",
    "spread_table",
    "table_of_grams",
    "why_no_estimate",
]

# Batches beyond this number share a group: the errors then rest on so many groups.
MOST_GROUPS = 32
# Relative to the largest entry of a column: two ways to compute a table round differently.
_SAME = 1e-3
# The columns of a table before the sketches of both gradients.
_SAMPLES, _LOSS, _LOSS_SQUARE, _LOSS_UNITS, _OUTPUTS, _OUTPUT_SQUARE, _OUTPUT_UNITS, _COLUMNS = range(8)


class RSCTrain(NamedTuple):
    """The result of `rsc_ratio_train`: each estimate with its standard error.

    Attributes:
        ratio: R = ‖∇L‖²/L of the training set.
        grad_norm_sq: ‖∇L‖² of the training set.
        mean_predictor_grad_norm_sq: ‖ḡ‖² of the training set.
    """

    ratio: Estimate
    grad_norm_sq: Estimate
    mean_predictor_grad_norm_sq: Estimate


def rsc_ratio_train(
    model: nn.Module,
    loss: Callable[[Tensor, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    training_samples: int | None = None,
    *,
    batch_stats: bool | None = None,
) -> RSCTrain:
    """Estimate R, ‖∇L‖² and ‖ḡ‖² of a training set of N samples from batches with n of them.

    `rsc_ratio` of the n samples is too large on average: E‖∇L_n‖² = ‖∇L‖² + (1/n − 1/N) tr Cov(∇ℓ). The spread of the
    batches' gradients estimates the second term, see `square_norm_of_set`: ‖∇L‖² without bias, for N → ∞ by
    (B²‖ḡ‖² − Σ‖g_b‖²)/(B(B − 1)) from the gradients g_b of B equal batches and their mean ḡ. For n = N the estimate is
    the value itself, with error 0. The errors assume that the samples are drawn from the set at random, without
    replacement, and that the means of batches are roughly normal. With the statistics of batches in BatchNorm, a batch
    is the unit: the set is then understood as cut into batches of this size.

    The arguments that are not listed are those of `rsc_ratio`.

    Args:
        training_samples: N; ``None``: the set is endless.

    Raises:
        ValueError: for a single batch that is not the whole set, whose spread is unknown; for more samples than N.

    Example:
        The set has the samples (1, 0) and (3, 1): a batch each is the whole set.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> batches = [(torch.tensor([[1.0]]), torch.tensor([[0.0]])), (torch.tensor([[3.0]]), torch.tensor([[1.0]]))]
        >>> rsc_ratio_train(model, nn.functional.mse_loss, batches, training_samples=2).ratio
        Estimate(value=19.6, error=0.0)
        >>> rsc_ratio_train(model, nn.functional.mse_loss, batches).grad_norm_sq.value  # (2² · 7² − (2² + 12²)) / 2
        24.0
    """
    parameters = trainable_parameters(model)
    sizes = [p.numel() for p in parameters.values()]
    sums = [zero_gradient(parameters), zero_gradient(parameters)]
    found = list_batches(batches)
    table = spread_table(min(len(found), MOST_GROUPS)).to(sums[0].device)
    with preserve_state(model, batch_stats=batch_stats) as reset_state, torch.enable_grad():
        for index, (x, y) in enumerate(found):
            reset_state()
            with isolated_rng(index):
                output = model(x)
                value = loss(output, y)
            n, row = count_output_samples(output), table[index * len(table) // len(found)]
            flat = flat_gradients(gradients_of(value, parameters, retain_graph=True), sums[0].device)
            square = add_gradients(sums[0], flat, n, sizes)
            add_to_table(row, sizes, samples=n, loss=value, loss_gradients=flat, loss_square=square)
            flat = flat_gradients(gradients_of(output.sum(), parameters), sums[0].device)
            square = add_gradients(sums[1], flat, 1, sizes)
            add_to_table(row, sizes, outputs=output.numel(), predictor_gradients=flat, predictor_square=square)
    totals = table[:, :_COLUMNS].sum(0).tolist()
    if totals[_SAMPLES] == 0:
        raise ValueError("Expected at least one sample, but the batches hold none.")
    if training_samples is not None and training_samples < totals[_SAMPLES]:
        raise ValueError(
            f"Expected training_samples to be at least the {totals[_SAMPLES]:.0f} samples of the batches, but got "
            f"{training_samples}."
        )
    left_out = 1.0 if training_samples is None else 1 - totals[_SAMPLES] / training_samples
    rsc = rsc_from_sums(totals[_SAMPLES], totals[_LOSS], sums[0], totals[_OUTPUTS], sums[1])
    if why := why_no_estimate(table, left_out):
        raise ValueError(f"Expected at least two batches, or the whole training set, but {why}.")
    return rsc_of_set(rsc, table, left_out)


def spread_table(groups: int) -> Tensor:
    """Return an empty table with a row for each group of batches. Tables of several processes can be added."""
    return torch.zeros(groups, _COLUMNS + 2 * SKETCH, dtype=torch.float64, device="cpu")


def add_to_table(
    row: Tensor,
    sizes: Sequence[int],
    *,
    samples: float = 0,
    loss: Tensor | None = None,
    loss_gradients: Sequence[Tensor | None] = (),
    loss_square: Tensor | float = 0.0,
    outputs: float = 0,
    predictor_gradients: Sequence[Tensor | None] = (),
    predictor_square: Tensor | float = 0.0,
) -> None:
    """Add a batch to the row of its group: its mean loss, the gradients of that, those of the sum of its outputs, with
    the squared norms of both, as `add_gradients` returns them."""
    if samples and loss is not None:
        row[_SAMPLES] += samples
        row[_LOSS] += samples * loss.detach().to(row.device)
        row[_LOSS_SQUARE] += samples * loss_square
        row[_LOSS_UNITS] += 1
        add_sketch(row[_COLUMNS : _COLUMNS + SKETCH], loss_gradients, sizes, samples)
    if outputs:
        row[_OUTPUTS] += outputs
        row[_OUTPUT_SQUARE] += predictor_square / outputs
        row[_OUTPUT_UNITS] += 1
        add_sketch(row[_COLUMNS + SKETCH :], predictor_gradients, sizes, 1.0)


def table_of_grams(
    groups: Sequence[int],
    samples: Sequence[int],
    losses: Sequence[float],
    loss_gram: Tensor,
    outputs: int,
    predictor_gram: Tensor,
) -> Tensor:
    """Make the table from the inner products of the gradients of single samples.

    Args:
        groups: the row of each unit of samples, a batch or a part of one, in order.
        samples: the number of samples of each unit.
        losses: the mean loss of each unit.
        loss_gram: ⟨∇ℓ_i, ∇ℓ_j⟩ (n, n) of all samples.
        outputs: k, of each sample.
        predictor_gram: ⟨Σ_h ∇f_h(x_i), Σ_h ∇f_h(x_j)⟩ (n, n).

    Example:
        >>> gram = torch.tensor([[4.0, 24.0], [24.0, 144.0]])  # of the gradients 2 and 12
        >>> table = table_of_grams([0, 1], [1, 1], [1.0, 4.0], gram, 1, torch.ones(2, 2))
        >>> rsc_of_set(RSC(2.5, 49.0, 19.6, 1.0), table, left_out=1.0).grad_norm_sq.value
        24.0
    """
    table = spread_table(max(groups) + 1)
    of_unit = torch.repeat_interleave(torch.arange(len(samples), device="cpu"), torch.tensor(samples, device="cpu"))
    unit = torch.nn.functional.one_hot(of_unit, len(samples)).T.double()
    group = torch.nn.functional.one_hot(torch.tensor(groups, device="cpu"), len(table)).T.double()
    counts = torch.tensor(samples, dtype=torch.float64, device="cpu")
    ones = torch.ones_like(counts)
    loss_sums, predictor_sums = (unit @ gram.double() @ unit.T for gram in (loss_gram, predictor_gram))
    columns = {
        _SAMPLES: counts,
        _LOSS: counts * torch.tensor(losses, dtype=torch.float64, device="cpu"),
        _LOSS_SQUARE: loss_sums.diagonal() / counts,
        _LOSS_UNITS: ones,
        _OUTPUTS: outputs * counts,
        _OUTPUT_SQUARE: predictor_sums.diagonal() / (outputs * counts),
        _OUTPUT_UNITS: ones,
    }
    for column, values in columns.items():
        table[:, column] = group @ values
    for begin, sums in ((_COLUMNS, loss_sums), (_COLUMNS + SKETCH, predictor_sums)):
        # Vectors with these inner products serve as well as sketches of the gradients.
        values, vectors = torch.linalg.eigh(group @ sums @ group.T)
        table[:, begin : begin + len(table)] = vectors * values.clamp(min=0).sqrt()
    return table


def same_spread(first: Tensor, second: Tensor) -> bool:
    """Whether two tables are the same but for rounding and empty rows; sketches are not compared."""
    first, second = (table[table[:, _SAMPLES] > 0, :_COLUMNS].cpu() for table in (first, second))
    if first.shape != second.shape:
        return False
    return bool(((first - second).abs() <= _SAME * second.abs().amax(0)).all())


def mean_squares(table: Tensor) -> tuple[float, float]:
    """Return the mean of ‖∇L_b‖² over samples and of ‖ḡ_b‖² over outputs, for the batches b of a table."""
    totals = table[:, :_COLUMNS].sum(0).tolist()
    of_loss, of_outputs = (
        totals[square] / totals[count] if totals[count] else math.nan
        for square, count in ((_LOSS_SQUARE, _SAMPLES), (_OUTPUT_SQUARE, _OUTPUTS))
    )
    return of_loss, of_outputs


def why_no_estimate(table: Tensor, left_out: float) -> str:
    """Return why the spread of the batches cannot be known; empty if it is, or is not needed.

    Example:
        >>> why_no_estimate(spread_table(1), left_out=0.5)
        'the samples are a single batch, of which the spread is unknown'
    """
    if left_out == 0 or int((table[:, _SAMPLES] > 0).sum()) > 1:
        return ""
    return "the samples are a single batch, of which the spread is unknown"


def rsc_of_set(rsc: RSC, table: Tensor, left_out: float) -> RSCTrain:
    """Estimate for the set from the result on the samples and the table of their batches.

    Args:
        left_out: the fraction of the set that is not among the samples.
    """
    if left_out == 0:
        return RSCTrain(
            *(Estimate(each, 0.0) for each in (rsc.ratio, rsc.grad_norm_sq, rsc.mean_predictor_grad_norm_sq))
        )
    table = table.cpu()
    rows = table[table[:, _SAMPLES] > 0]
    of_loss, ratio = square_norm_of_set(
        rows[:, _SAMPLES] / rows[:, _SAMPLES].sum(),
        rows[:, _COLUMNS : _COLUMNS + SKETCH] / rows[:, _SAMPLES, None],
        square=rsc.grad_norm_sq,
        mean_square=float(rows[:, _LOSS_SQUARE].sum() / rows[:, _SAMPLES].sum()),
        units=int(rows[:, _LOSS_UNITS].sum()),
        left_out=left_out,
        values=rows[:, _LOSS] / rows[:, _SAMPLES],
    )
    assert ratio is not None
    if why_no_ratio(rsc.loss):
        ratio = Estimate(math.nan, math.nan)
    return RSCTrain(ratio, of_loss, _of_predictor(rsc.mean_predictor_grad_norm_sq, rows, left_out))


def _of_predictor(square: float, rows: Tensor, left_out: float) -> Estimate:
    if not math.isfinite(square):
        return Estimate(math.nan, math.nan)
    outputs = rows[:, _OUTPUTS]
    return square_norm_of_set(
        outputs / outputs.sum(),
        rows[:, _COLUMNS + SKETCH :] / outputs[:, None],
        square=square,
        mean_square=float(rows[:, _OUTPUT_SQUARE].sum() / outputs.sum()),
        units=int(rows[:, _OUTPUT_UNITS].sum()),
        left_out=left_out,
    )[0]
