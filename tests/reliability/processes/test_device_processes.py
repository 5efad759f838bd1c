"""Two processes whose backend takes tensors of their device only, as NCCL does: they measure as one does."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory

from reliability.outcome import Outcome
from reliability.processes import device_group, synchronized
from reliability.processes.process_cases import differences, measured
from reliability.processes.process_faults import sabotaged
from reliability.processes.process_runs import Fingerprint, undisturbed
from support.accelerator import trainer as device_trainer
from support.accelerator.build import reason_against
from support.accelerator.process import Process
from support.lit import Classifier, rows, tensors, trainer

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch cannot distribute")
DTYPES = {"cuda": torch.float64, "mps": torch.float32}


def in_new_process(kind, function, *arguments):
    """One that has not used autograd on its device yet: it could not be forked."""
    if reason := reason_against():
        pytest.skip(reason)
    process = Process(kind)
    try:
        return process.call(function, arguments, {})
    finally:
        process.stop()


def equals_one(folder: Path, kind: str, net: str) -> Outcome:
    dtype = DTYPES[kind]
    several = measured(folder / "two", 2, net, dtype=dtype, **device_group.arguments())
    alone = {name: value for name, value in device_trainer.arguments().items() if name != "devices"}
    one = measured(folder / "one", 1, net, dtype=dtype, **alone)
    return differences(one, several, 1e-10 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("kind", ["cuda", pytest.param("mps", marks=pytest.mark.slow)])
def test_the_numbers_are_those_of_one_process(kind, tmp_path):
    outcome = in_new_process(kind, equals_one, tmp_path, kind, "WeightNorm")
    assert outcome.compared > 0
    assert outcome.differences == ()


def undisturbed_two(folder: Path) -> Outcome:
    return undisturbed(folder, 2, new=device_group.arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DTYPES)
def test_training_is_undisturbed(kind, tmp_path):
    outcome = in_new_process(kind, undisturbed_two, tmp_path)
    assert outcome.compared > 0
    assert outcome.differences == ()


def sabotaged_two(folder: Path, kind: str, net: str) -> Outcome:
    return sabotaged(folder, 2, net, dtype=DTYPES[kind], **device_group.arguments())


@pytest.mark.slow
@pytest.mark.parametrize("kind", DTYPES)
def test_a_failure_in_one_process(kind, tmp_path):
    outcome = in_new_process(kind, sabotaged_two, tmp_path, kind, "WeightNorm")
    assert outcome.compared > 0
    assert outcome.differences == ()


def fit_synchronized(folder: Path) -> None:
    """Train with sync_batchnorm=True, without us and with us."""
    synchronized.register()
    x, y = tensors(48)
    for name, ours in (("bare", []), ("watched", [NormTheory(on_error="raise", ntk_samples=12)])):
        torch.manual_seed(0)
        callbacks = [*ours, Fingerprint(folder / name / "weights")]
        options = {"max_epochs": 2, "devices": 2, "default_root_dir": folder / name, **device_group.arguments()}
        fit = trainer(callbacks, sync_batchnorm=True, **options)
        fit.fit(Classifier("bn").double(), DataLoader(TensorDataset(x.double(), y), 8))


@pytest.mark.slow
def test_synchronized_layers_are_measured_as_in_eval_mode(tmp_path):
    for name in ("bare", "watched"):
        (tmp_path / name).mkdir()
    in_new_process("cuda", fit_synchronized, tmp_path)
    bare, watched = (torch.load(tmp_path / name / "weights", weights_only=True) for name in ("bare", "watched"))
    assert all(torch.equal(bare[key], watched[key]) for key in bare)
    module = Classifier("bn").double().eval()
    module.load_state_dict(watched)
    assert module.net[1].num_batches_tracked == 6
    x, y = tensors(48)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    theta = torch.nn.utils.parameters_to_vector(module.parameters()).detach().requires_grad_()

    def loss(vector):
        parts = vector.split([shape.numel() for shape in shapes.values()])
        parameters = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}
        return nn.functional.cross_entropy(torch.func.functional_call(module, parameters, x.double()), y)

    value = loss(theta)
    (gradient,) = torch.autograd.grad(value, theta)
    curvature = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, theta.detach()))
    row = rows(tmp_path)[1]
    assert row["normtheory/loss"] == pytest.approx(float(value), rel=1e-12)
    assert row["normtheory/rsc_ratio"] == pytest.approx(float(gradient @ gradient / value), rel=1e-10)
    assert row["normtheory/hessian_lambda_max"] == pytest.approx(float(curvature[-1]), rel=2e-2)  # its tolerance
    (path,) = tmp_path.rglob("normtheory.jsonl")
    assert "running (SyncBatchNorm)" in path.read_text().splitlines()[0]
