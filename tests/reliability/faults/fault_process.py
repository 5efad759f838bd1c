"""A fit in a separate process, for faults of processes: ``python fault_process.py '{"task": "signal"}'``."""

import hashlib
import json
import math
import os
import resource
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INSIDE = "inside"  # the file that tells that a measurement is under way
DEAD = "dead"  # the file that tells that a server is no more
SLEEP = "SLEEP_WHILE_MEASURING"
MARGIN = 13 << 20  # bytes: less than four vectors of Lanczos and a product take, more than a training step


def start(folder: Path, options: dict[str, Any], **environment: str) -> subprocess.Popen:
    """This script in a folder."""
    folder.mkdir(exist_ok=True)
    # Not with the service that W&B's client may have started for this process: it knows another server.
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return subprocess.Popen(
        [sys.executable, str(HERE / "fault_process.py"), json.dumps(options)],
        cwd=folder,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def slow_loss(module, batch):
    """Where it is asked to, it tells the parent when the second epoch is measured, and gives it time to do something.

    One function for all runs: a checkpoint remembers by its name what was measured.
    """
    from torch.nn.functional import cross_entropy

    if SLEEP in os.environ and module.current_epoch == 1:
        Path(INSIDE).touch()
        time.sleep(float(os.environ[SLEEP]))  # a signal ends it
    return cross_entropy(module(batch[0]), batch[1])


def signal_run(folder: Path, checkpoint: Path | None = None) -> Any:
    """A fit that resumes exactly, with the checkpoints that users have."""
    import pytorch_lightning as pl

    from lightning_normtheory.callbacks import NormTheory

    from support.lit import Classifier, loader, trainer

    pl.seed_everything(1, verbose=False)
    save = [pl.callbacks.ModelCheckpoint(folder, save_last=True), pl.callbacks.OnExceptionCheckpoint(folder)]
    run = trainer([NormTheory(loss=slow_loss), *save], default_root_dir=folder, enable_checkpointing=True)
    run.fit(Classifier("bn"), loader(24, shuffle=False), ckpt_path=checkpoint)
    return run


def memory_run() -> None:
    """A bare fit and a watched one, both with little memory from the second epoch on."""
    import pytorch_lightning as pl
    import torch
    from torch import nn
    from torch.nn.utils.parametrizations import weight_norm

    from lightning_normtheory.callbacks import HessianTopEigenvalue, MinWeightNorm

    from support.lit import FEATURES, Classifier, loader, rows, trainer

    class Wide(Classifier):
        """6 MB of weights."""

        def __init__(self):
            super().__init__("wn")
            wide = [weight_norm(nn.Linear(FEATURES, 1200)), nn.Tanh(), nn.Linear(1200, 1200), nn.Tanh()]
            self.net = nn.Sequential(*wide, nn.Linear(1200, 3))

        def configure_optimizers(self):  # a step of Adam takes nearly as much memory as the Hessian
            return torch.optim.SGD(self.parameters(), 0.05, foreach=False)

    class Limit(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                for callback in trainer.callbacks:
                    if isinstance(callback, HessianTopEigenvalue):
                        callback._fit.workspace.clear()  # with the memory of its vectors, it could go on
                size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + MARGIN, resource.RLIM_INFINITY))

        def on_fit_end(self, trainer, pl_module):
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def run(callbacks: list) -> str:
        pl.seed_everything(1, verbose=False)
        model = Wide()
        trainer([Limit(), *callbacks]).fit(model, loader(24))
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bare, watched = run([]), run([HessianTopEigenvalue(method="lanczos", tol=1e-9, max_hvps=12), MinWeightNorm()])
    found = [row for _, row in sorted(rows().items())]
    result = {
        "bare": bare,
        "watched": watched,
        "finite": [math.isfinite(row["normtheory/hessian_lambda_max"]) for row in found],
        "others": [math.isfinite(row["normtheory/min_weight_norm"]) for row in found],
        "reports": sum("hessian_lambda_max failed" in str(each.message) for each in caught),
    }
    Path("result.json").write_text(json.dumps(result))


def wandb_run() -> None:
    """With a logger of W&B. In the middle it waits for the end of the server; its warnings are in a file at the end."""
    import pytorch_lightning as pl

    from lightning_normtheory.callbacks import NormTheory

    from support.lit import Classifier, loader, trainer

    class Wait(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                Path(INSIDE).touch()
                while not Path(DEAD).exists():
                    time.sleep(0.05)

    save = pl.callbacks.ModelCheckpoint(".", save_last=True)
    log = pl.loggers.WandbLogger(project="demo")
    run = trainer([NormTheory(), save, Wait()], max_epochs=4, logger=log, enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Classifier("wn"), loader(24))
    Path("result.json").write_text(json.dumps([str(each.message) for each in caught]))


TASKS = {"signal": partial(signal_run, Path(".")), "memory": memory_run, "wandb": wandb_run}

if __name__ == "__main__":
    from reliability.faults.fault_process import TASKS  # by its name, as elsewhere

    TASKS[json.loads(sys.argv[1])["task"]]()
