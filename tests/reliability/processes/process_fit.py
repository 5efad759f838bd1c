"""A fit that a launcher starts in every process: ``python -m reliability.processes.process_fit NET FOLDER``."""

import sys
from pathlib import Path

import torch
from pytorch_lightning.strategies import DDPStrategy

from lightning_normtheory.callbacks import NormTheory

from reliability.processes.process_cases import Still, data
from support.lit import trainer

if __name__ == "__main__":
    torch.set_num_threads(1)
    net, folder = sys.argv[1], Path(sys.argv[2])
    callback = NormTheory(on_error="raise", ntk_samples=20)
    options = {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": 2, "default_root_dir": folder}
    trainer([callback], max_epochs=2, **options).fit(Still(net).double(), data(), data(20, seed=1))
