"""Shared settings of the tests."""

import importlib.util
import logging
import os
import warnings

import pytest
import torch

if importlib.util.find_spec("lightning_normtheory") is None or not importlib.util.find_spec(
    "lightning_normtheory.callbacks"
):
    raise pytest.UsageError(
        "lightning_normtheory.callbacks cannot be imported: the folders callbacks/ and recipes/ are part of the package"
        ' only once it is installed. Run: pip install -e ".[test]"'
    )

# The models are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)
# Tests of the recipes never talk to a server, whatever the environment says.
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    """Every test runs in a folder of its own, without Lightning's advice about workers and logging intervals."""
    monkeypatch.chdir(tmp_path)
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
