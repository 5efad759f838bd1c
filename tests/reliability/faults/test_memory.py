"""Where memory runs out: less at once, and the same numbers; then, and only then, nothing."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_normtheory import empirical_ntk
from lightning_normtheory.callbacks import HessianTopEigenvalue, NTKLeastEigenvalue, RSCRatio
from lightning_normtheory.callbacks.measurement import curvature
from lightning_normtheory.measuring.memory import is_out_of_memory

from support.lit import Classifier, loader, rows, trainer
from support.models import MODELS

ROOT = Path(__file__).parents[3]
ALLOCATOR = "[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8."
ERRORS = {
    "device": lambda: torch.cuda.OutOfMemoryError("CUDA out of memory"),
    "python": MemoryError,
    "allocator": lambda: RuntimeError(ALLOCATOR),
}


class Limited(nn.Module):
    """A model that runs out of memory when differentiated with more samples at once."""

    def __init__(self, net: nn.Module, samples: int, error: str = "device", always: bool = False):
        super().__init__()
        self.net, self.samples, self.error, self.always = net, samples, error, always
        self.largest = 0

    def forward(self, x):
        if len(x) > self.samples and (self.always or torch.is_grad_enabled()):
            raise ERRORS[self.error]()
        self.largest = max(self.largest, len(x))
        return self.net(x)


@pytest.mark.parametrize("error", ERRORS)
def test_it_is_recognized_by_whatever_name(error):
    assert is_out_of_memory(ERRORS[error]())


@pytest.mark.parametrize(
    "message",
    [
        "Invalid buffer size: 9.75 GiB",
        "MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: 6.80 GB)",
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "XPU out of memory. Tried to allocate 4.66 GiB",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "NPU out of memory. Tried to allocate 52.00 MiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
        "RESOURCE_EXHAUSTED: Attempting to allocate 8.00G",
    ],
)
def test_it_is_recognized_in_the_words_of_every_device(message):
    assert is_out_of_memory(RuntimeError(message))


def test_other_errors_are_not_taken_for_it():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(OSError(12, "Cannot allocate memory"))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("outputs", ["full", "trace", "sum"])
def test_the_kernel_in_smaller_portions_is_the_same(error, outputs):
    model = MODELS["wn-parametrized-dim-0"]
    net, (x, _) = model.make().double(), model.data(16)
    limited = empirical_ntk(Limited(net, 2, error), x, outputs=outputs)
    whole = empirical_ntk(net, x, outputs=outputs)
    for part in ("kernel", "direction", "length", "rest"):
        torch.testing.assert_close(getattr(limited, part), getattr(whole, part), rtol=1e-12, atol=1e-12)


def test_a_kernel_that_fits_in_no_portion_fails():
    model = MODELS["wn-parametrized-dim-0"]
    net, (x, _) = model.make().double(), model.data(64)
    with pytest.raises(MemoryError):
        empirical_ntk(Limited(net, 1, "python"), x)


class Narrow(Classifier):
    """Has memory for three samples at once, when a gradient is asked for, once it trains."""

    def __init__(self, net="wn", samples=3, always=False, error="device"):
        torch.manual_seed(0)
        super().__init__(net, lr=0.0)
        self.net = Limited(self.net, 10**6, error, always)
        self.limit = samples

    def on_train_epoch_end(self):
        self.net.samples = 10**6

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_last_batch:
            self.net.samples = self.limit


METRICS = {
    RSCRatio: "normtheory/rsc_ratio",
    HessianTopEigenvalue: "normtheory/hessian_lambda_max",
    NTKLeastEigenvalue: "normtheory/ntk_lambda_min",
}


def measured(folder, callback, module, **arguments):
    fit = trainer([callback(probe=40, **arguments)], max_epochs=1, default_root_dir=folder)
    fit.fit(module, loader(40, 8, shuffle=False))
    return rows(folder)[0][METRICS[callback]]


@pytest.mark.parametrize("callback", METRICS)
@pytest.mark.parametrize(
    "always", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["gradients", "values, too"]
)
def test_a_diagnostic_in_smaller_batches_gives_the_same_number(callback, always, tmp_path):
    little = measured(tmp_path / "little", callback, Narrow(always=always), on_error="raise")
    enough = measured(tmp_path / "enough", callback, Narrow(samples=10**6), on_error="raise")
    assert little == pytest.approx(enough, rel=1e-5)


@pytest.mark.parametrize("error", ["python", "allocator"])
def test_curvature_in_smaller_batches_whatever_the_name_of_the_error(error, tmp_path):
    little = measured(tmp_path / "little", HessianTopEigenvalue, Narrow(error=error), on_error="raise")
    enough = measured(tmp_path / "enough", HessianTopEigenvalue, Narrow(samples=10**6), on_error="raise")
    assert little == pytest.approx(enough, rel=1e-5)


@pytest.mark.parametrize("callback", [RSCRatio, HessianTopEigenvalue])
@pytest.mark.parametrize("reason", ["batch statistics", "not for one sample", "samples that see each other"])
def test_what_cannot_be_cut_is_nan_and_training_goes_on(callback, reason, tmp_path):
    class Contrastive(Narrow):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self(batch[0]).var(0).sum()

    module = {
        "batch statistics": lambda: Narrow("bn"),
        "not for one sample": lambda: Narrow(samples=0, always=True),
        "samples that see each other": Contrastive,
    }[reason]()
    with pytest.warns(UserWarning, match="OutOfMemoryError: CUDA out of memory"):
        assert math.isnan(measured(tmp_path, callback, module))


def lambda_max(net, folder, monkeypatch, limit, spare=0):
    """λ_max where graphs may have so many bytes, those of all batches ``spare``, and the samples of each batch whose
    graph was built for a product."""
    sizes = []
    loss_of = curvature.Curvature._loss_of
    monkeypatch.setattr(curvature, "_SMALL", limit)
    monkeypatch.setattr(curvature, "_SHARE", 0)
    monkeypatch.setattr(curvature, "_SPARE", spare)
    monkeypatch.setattr(
        curvature.Curvature, "_loss_of", lambda self, batch: sizes.append(batch.samples) or loss_of(self, batch)
    )
    value = measured(folder, HessianTopEigenvalue, Narrow(net, samples=10**6), on_error="raise")
    monkeypatch.undo()
    return value, sizes[1:]  # the first one counts the bytes: 1.5 to 2 kB, the largest tensor 256


@pytest.mark.parametrize(("net", "largest"), [("wn", 2), ("bn", 8)])
def test_graphs_that_are_too_large_are_not_kept_and_batches_are_cut(net, largest, tmp_path, monkeypatch):
    """Not with batch statistics, though: the loss of smaller batches would be another one."""
    kept, once = lambda_max(net, tmp_path / "kept", monkeypatch, 2**20)
    rebuilt, each_time = lambda_max(net, tmp_path / "rebuilt", monkeypatch, 2**12)
    cut, smaller = lambda_max(net, tmp_path / "cut", monkeypatch, 2**10)
    assert once == [8] * 5
    assert len(each_time) > 5
    assert rebuilt == kept
    assert set(smaller) == {largest}
    assert cut == pytest.approx(kept, rel=1e-5)


def test_graphs_of_cut_batches_are_kept_where_memory_is_to_spare(tmp_path, monkeypatch):
    rebuilt, each_time = lambda_max("wn", tmp_path / "rebuilt", monkeypatch, 2**10)
    kept, once = lambda_max("wn", tmp_path / "kept", monkeypatch, 2**10, spare=2**20)
    assert each_time[:20] == once == [2] * 20
    assert len(each_time) > 20
    assert kept == rebuilt


def peak(case, callback):
    """Megabytes of a process that trains a case of the benchmarks."""
    command = [sys.executable, "-m", "benchmarks.first_step", case, "memory", callback, "1000"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ended"]
    return found["peak"]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("case", "callbacks"),
    [
        ("LM, 32 × 50,000", ("RSCRatio", "HessianTopEigenvalue", "RademacherBound", "ConvergenceCertificate")),
        # Its batches cannot be cut for the Hessian, which takes 2.7 training steps.
        ("U-Net, 256×256", ("RSCRatio", "RademacherBound", "ConvergenceCertificate")),
    ],
)
def test_many_outputs_need_no_more_memory_than_two_and_a_half_training_steps(case, callbacks):
    bare = peak(case, "")
    for callback in callbacks:
        assert peak(case, callback) <= 2.5 * bare, callback
