"""The memory of a separate process that trains with the callback."""

import json
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import QUIET

__all__ = ["table"]

EPOCHS = (5, 50)


def table() -> Table:
    """Resident memory after a few epochs and after many, and the peak."""
    result = Table(title="WeightNorm MLP 784-512-512-10, probe 512, 50 epochs: memory", title_justify="left")
    for header in ("callback", *(f"after {epoch} epochs" for epoch in EPOCHS), "peak"):
        result.add_column(header, justify="left" if header == "callback" else "right")
    for label in ("none", "high", "low", "lanczos"):
        measured = _in_a_process(label)
        result.add_row(label, *(f"{measured[str(epoch)]:.0f} MB" for epoch in EPOCHS), f"{measured['peak']:.0f} MB")
    return result


def _in_a_process(label: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory", label]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    return json.loads(output.stdout.splitlines()[-1])


def _train(label: str) -> dict[str, float]:
    import pytorch_lightning as pl

    from lightning_normtheory.callbacks import HessianTopEigenvalue
    from lightning_normtheory.recipes.datasets import FashionMNISTSlice
    from lightning_normtheory.recipes.models import WeightNormMLP

    measured: dict[str, float] = {}

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch + 1 in EPOCHS:
                measured[str(trainer.current_epoch + 1)] = _resident()

    options: dict[str, dict[str, Any]] = {
        "high": {"memory": "high"},
        "low": {"memory": "low"},
        "lanczos": {"method": "lanczos"},
    }
    ours = [HessianTopEigenvalue(max_hvps=10, **options[label])] if label in options else []
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=max(EPOCHS),
            callbacks=[*ours, Watch()],
            default_root_dir=folder,
            limit_train_batches=2,
            limit_val_batches=0,
            **QUIET,
        )
        trainer.fit(WeightNormMLP(width=512), FashionMNISTSlice())
    return {**measured, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _resident() -> float:
    """Megabytes in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(_train(sys.argv[1])))
