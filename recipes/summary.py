"""The table that a recipe prints at its end."""

from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_normtheory.callbacks import record
from lightning_normtheory.theorems import TheoremStatus, theorem_table

__all__ = ["bound_table", "epoch_table", "legend", "theorems"]

_ROWS = 20
# metric: its column, and what that is
_COLUMNS = {
    "train_loss": ("train", "mean loss of the epoch"),
    "val_loss": ("val", "loss on the validation set"),
    "val_accuracy": ("acc", "accuracy on the validation set"),
    "normtheory/min_weight_norm": ("w_min", "smallest norm of a weight vector"),
    "normtheory/rsc_ratio": ("R", "‖∇L‖²/L on the probe"),
    "normtheory/mean_predictor_grad_norm_sq": ("‖ḡ‖²", "ḡ is the mean gradient of the outputs"),
    "normtheory/hessian_lambda_max": ("λ_max", "largest eigenvalue of the Hessian"),
    "normtheory/hessian_edge": ("2/η", "plain steps are stable while λ_max is below"),
    "normtheory/hessian_stability_limit": ("limit", "the optimizer's steps are stable while λ_max is below"),
    "normtheory/ntk_lambda_min": ("λ_min(K)", "of the tangent kernel, which is positive definite if that is > 0"),
    "normtheory/ntk_change_max": ("ΔK", "largest change of the tangent kernel since the start"),
    "normtheory/batchnorm_gamma_a": ("γ_a", "margin through the output weights, at the start"),
    "normtheory/batchnorm_gamma_c": ("γ_c", "margin through BatchNorm's scales, at the start"),
}
# Where both are there, the second is shown.
_INSTEAD = {
    "normtheory/hessian_edge": "normtheory/hessian_stability_limit",
    "normtheory/ntk_change_max": "normtheory/hessian_lambda_max",
}


def epoch_table(path: Path) -> Table:
    """One row per measured epoch, from the JSON Lines file of a run; of many epochs, 20 from the first to the last.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "normtheory.jsonl")
        >>> record.append(path, {}, {"epoch": 0, "metrics": {"normtheory/rsc_ratio": 2.0}, "user_metrics": {}})
        >>> table = epoch_table(path)
        >>> [column.header for column in table.columns], table.row_count
        (['epoch', 'R'], 1)
    """
    rows = _epochs(path)
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


def legend(path: Path) -> str:
    """What the columns of `epoch_table` are.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "normtheory.jsonl")
        >>> record.append(path, {}, {"epoch": 0, "metrics": {"normtheory/rsc_ratio": 2.0}, "user_metrics": {}})
        >>> legend(path)
        'R: ‖∇L‖²/L on the probe.'
    """
    parts = (f"{name}: {meaning}" for name, meaning in map(_COLUMNS.__getitem__, _shown(_epochs(path))))
    return "; ".join(parts) + "."


def _epochs(path: Path) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for line in record.read(path):
        if "epoch" in line:
            rows.setdefault(line["epoch"], {}).update({**line["user_metrics"], **line["metrics"]})
    return rows


def _shown(rows: Mapping[int, Mapping[str, float]]) -> list[str]:
    """The columns that there is something for; of those that say nearly the same, one, for a terminal of 80 columns."""
    shown = [key for key in _COLUMNS if any(key in row for row in rows.values())]
    for key, better in _INSTEAD.items():
        if key in shown and better in shown:
            shown.remove(key)
    return shown


# What is measured, what bounds it, and where that is from.
_BOUNDS = (
    ("λ_max of the Hessian", "hessian_lambda_max", "certificate_beta", "β of WN, Lemma 5.2, generalised"),
    ("generalization gap", "generalization_gap", "generalization_bound", "with probability 0.95"),
)


def bound_table(path: Path) -> Table | None:
    """What the last measured epoch has on both sides of an inequality; ``None`` if it has none.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "normtheory.jsonl")
        >>> metrics = {"normtheory/hessian_lambda_max": 2.0, "normtheory/certificate_beta": 9.0}
        >>> record.append(path, {}, {"epoch": 0, "metrics": metrics, "user_metrics": {}})
        >>> bound_table(path).row_count
        1
    """
    last: dict[str, float] = {}
    for line in record.read(path):
        if "epoch" in line:
            last = {name.removeprefix("normtheory/"): value for name, value in line["metrics"].items()}
    rows = [row for row in _BOUNDS if row[1] in last and row[2] in last]
    if not rows:
        return None
    table = Table("", "measured", "bound", "", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns[1:3]:
        column.justify = "right"
    for name, measured, bound, remark in rows:
        vacuous = bound == "generalization_bound" and last.get("generalization_bound_vacuous") == 1
        values = (last[measured], last[bound])
        table.add_row(name, *(f"{value:.3g}" for value in values), "vacuous" if vacuous else remark)
    return table


def theorems(path: Path) -> str:
    """Which theorem applies to the network, as it was found at fit start; empty if that was not looked at."""
    for line in record.read(path):
        found = [
            TheoremStatus(row["theorem"], row["verdict"], tuple(row["reasons"])) for row in line.get("theorems", [])
        ]
        return theorem_table(found, width=80) if found else ""
    return ""
