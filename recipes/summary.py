"""The table that a recipe prints at its end."""

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_normtheory.callbacks import record

__all__ = ["epoch_table"]

_COLUMNS = {
    "train_loss": "train",
    "val_loss": "val",
    "val_accuracy": "acc",
    "normtheory/min_weight_norm": "w_min",
    "normtheory/rsc_ratio": "R",
    "normtheory/mean_predictor_grad_norm_sq": "‖ḡ‖²",
    "normtheory/hessian_lambda_max": "λ_max",
    "normtheory/hessian_edge": "2/η",
    "normtheory/ntk_lambda_min": "λ_min(K)",
}
_CAPTION = (
    "train, val: mean losses; acc: accuracy on the validation set. w_min: smallest norm of a weight vector. "
    "R = ‖∇L‖²/L on the probe. ḡ: mean gradient of the outputs. λ_max: largest eigenvalue of the Hessian, stable below "
    "2/η. K: tangent kernel, positive definite if λ_min(K) > 0."
)


def epoch_table(path: Path) -> Table:
    """One row per measured epoch, from the JSON Lines file of a run.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "normtheory.jsonl")
        >>> record.append(path, {}, {"epoch": 0, "metrics": {"normtheory/rsc_ratio": 2.0}, "user_metrics": {}})
        >>> table = epoch_table(path)
        >>> [column.header for column in table.columns], table.row_count
        (['epoch', 'R'], 1)
    """
    rows: dict[int, dict[str, float]] = {}
    for line in record.read(path):
        if "epoch" in line:
            rows.setdefault(line["epoch"], {}).update({**line["user_metrics"], **line["metrics"]})
    shown = [key for key in _COLUMNS if any(key in row for row in rows.values())]
    table = Table(
        "epoch",
        *(_COLUMNS[key] for key in shown),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=_CAPTION,
        caption_justify="left",
    )
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for epoch, row in sorted(rows.items()):
        table.add_row(
            str(epoch),
            *(f"{row[key]:{'.5g' if key.endswith('norm') else '.3g'}}" if key in row else "–" for key in shown),
        )
    return table
