"""What a terminal shows of a run: the table of its epochs, and which theorem applies."""

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_normtheory.record.history import History
from lightning_normtheory.record.theorem_status import theorem_table

__all__ = ["epoch_table", "legend", "theorems"]

_ROWS = 20
# metric: its column, and what that is
_COLUMNS = {
    "train_loss": ("train", "mean loss of the epoch"),
    "val_loss": ("val", "loss on the validation set"),
    "val_accuracy": ("acc", "accuracy on the validation set"),
    "val_acc": ("acc", "accuracy on the validation set"),
    "min_weight_norm": ("w_min", "smallest norm of a weight vector"),
    "rsc_ratio": ("R", "‖∇L‖²/L on the probe"),
    "mean_predictor_grad_norm_sq": ("‖ḡ‖²", "ḡ is the mean gradient of the outputs"),
    "hessian_lambda_max": ("λ_max", "largest eigenvalue of the Hessian"),
    "hessian_edge": ("2/η", "plain steps are stable while λ_max is below"),
    "hessian_stability_limit": ("limit", "the optimizer's steps are stable while λ_max is below"),
    "ntk_lambda_min": ("λ_min(K)", "of the tangent kernel, which is positive definite if that is > 0"),
    "ntk_change_max": ("ΔK", "largest change of the tangent kernel since the start"),
    "batchnorm_gamma_a": ("γ_a", "margin through the output weights, at the start"),
    "batchnorm_gamma_c": ("γ_c", "margin through BatchNorm's scales, at the start"),
}
# Where both are there, the second is shown.
_INSTEAD = {
    "hessian_edge": "hessian_stability_limit",
    "ntk_change_max": "hessian_lambda_max",
}


def epoch_table(history: History) -> Table:
    """One row per measured epoch; of many epochs, 20 from the first to the last.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> table = epoch_table(History(Path(), "demo", "normtheory", rows=[Row(0, 5, 0.0, {"rsc_ratio": 2.0}, {})]))
        >>> [column.header for column in table.columns], table.row_count
        (['epoch', 'R'], 1)
    """
    rows = _epochs(history)
    shown = _shown(rows)
    table = Table("epoch", *(_COLUMNS[key][0] for key in shown), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    epochs = sorted(rows)
    if len(epochs) > _ROWS:
        epochs = [epochs[round(i * (len(epochs) - 1) / (_ROWS - 1))] for i in range(_ROWS)]
    for epoch in epochs:
        row = rows[epoch]
        table.add_row(
            str(epoch),
            *(f"{row[key]:{'.5g' if key.endswith('norm') else '.3g'}}" if key in row else "–" for key in shown),
        )
    return table


def legend(history: History) -> str:
    """What the columns of `epoch_table` are.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> legend(History(Path(), "demo", "normtheory", rows=[Row(0, 5, 0.0, {"rsc_ratio": 2.0}, {})]))
        'R: ‖∇L‖²/L on the probe.'
    """
    parts = (f"{name}: {meaning}" for name, meaning in map(_COLUMNS.__getitem__, _shown(_epochs(history))))
    return "; ".join(parts) + "."


def _epochs(history: History) -> dict[int, dict[str, float]]:
    return {row.epoch: {**row.users, **row.metrics} for row in history.rows}


def _shown(rows: Mapping[int, Mapping[str, float]]) -> list[str]:
    """The columns that there is something for; of those that say nearly the same, one, for a terminal of 80 columns."""
    shown = [key for key in _COLUMNS if any(key in row for row in rows.values())]
    for key, better in _INSTEAD.items():
        if key in shown and better in shown:
            shown.remove(key)
    return shown


def theorems(history: History) -> str:
    """Which theorem applies to the network, as it was found at fit start; empty if that was not looked at."""
    return theorem_table(history.theorems, width=80) if history.theorems else ""
