"""State that the training step moves: every batch and every product sees the state at the end of the epoch.

The reference builds the module anew for each batch, and takes loss, gradient and Hessian of that one step, densely.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory, RSCRatio

from reliability.strange.moving_models import FEATURES, MODULES, Moving, build
from reliability.strange.strange_reference import write_out_weight_norms
from support.lit import rows, trainer
from support.neutral_cases import Recorder, generators, state

SAMPLES, BATCH = 10, 4


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x + 0.3 * torch.randn(x.shape, generator=generator, dtype=torch.float64))


def probe() -> list[list[Tensor]]:
    """The batches of the probe, by the rules of docs/measuring.md; the last one is short."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0))
    return [list(data()[indices.tolist()]) for indices in order.split(BATCH)]


class Reference:
    """A module at the end of an epoch: the mean over its probe of the loss and its derivatives."""

    def __init__(self, module: Moving, name: str) -> None:
        self.module, self.name = module, name
        self.loss, self.gradient, self.hessian = 0.0, 0.0, 0.0
        for index, batch in enumerate(probe()):
            part, share = self.fresh(), len(batch[0]) / SAMPLES
            loss = self.step(part, batch, index)
            parameters = [p for p in part.parameters() if p.requires_grad]
            gradient = flat(loss, parameters, create_graph=True)
            self.loss += share * float(loss.detach())
            self.gradient = self.gradient + share * gradient.detach()
            self.hessian = self.hessian + share * torch.stack(
                [flat(g, parameters, retain_graph=True) for g in gradient]
            )

    def fresh(self) -> Moving:
        module = build(self.name)
        module.load_state_dict(self.module.state_dict())
        for attribute in module.remembered:
            setattr(module, attribute, copy.deepcopy(getattr(self.module, attribute)))
        if hasattr(module, "noise"):
            module.noise.set_state(self.module.noise.get_state())
        write_out_weight_norms(module)
        return module

    def step(self, module: Moving, batch: list[Tensor], index: int) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(index * BATCH)
            return module.training_step(batch, index)

    @property
    def ratio(self) -> float:
        return float(self.gradient.square().sum()) / self.loss

    @property
    def lambda_max(self) -> float:
        return float(torch.linalg.eigvalsh(self.hessian).max())

    def carried_on(self) -> float:
        """The loss if only buffers begin afresh for each batch."""
        module, total = self.fresh(), 0.0
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for index, batch in enumerate(probe()):
            for name, buffer in buffers.items():
                setattr(module, name, buffer.clone())
            total += len(batch[0]) / SAMPLES * float(self.step(module, batch, index).detach())
        return total


def flat(value: Tensor, parameters: list[Tensor], **options) -> Tensor:
    if not value.requires_grad:
        return torch.zeros(sum(p.numel() for p in parameters), dtype=value.dtype)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True, **options)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(gradients, parameters)]
    )


def fit(name: str, callbacks: list, epochs: int = 2) -> tuple[Moving, list]:
    torch.manual_seed(1)
    module, recorder = build(name), Recorder()
    run = trainer([*callbacks, recorder], max_epochs=epochs)
    run.fit(module, DataLoader(data(), BATCH, shuffle=True))
    recorder.note(state(run, module), generators())
    return module, recorder.seen


@pytest.mark.filterwarnings("ignore:.*itself changes trained parameters")
@pytest.mark.parametrize("name", MODULES)
def test_every_batch_and_product_sees_the_state_at_the_end_of_the_epoch(name):
    options = {"method": "lanczos", "tol": 1e-7, "max_hvps": 100, "on_error": "raise"}  # λ errs by residual²/gap
    low = HessianTopEigenvalue(memory="low", prefix="low", **options)
    module, _ = fit(name, [RSCRatio(on_error="raise"), HessianTopEigenvalue(**options), low])
    measured, exact = rows()[1], Reference(module, name)
    assert measured["normtheory/loss"] == pytest.approx(exact.loss, rel=1e-12)
    assert measured["normtheory/rsc_ratio"] == pytest.approx(exact.ratio, rel=1e-10)
    for prefix in ("normtheory", "low"):
        assert measured[f"{prefix}/hessian_lambda_max"] == pytest.approx(exact.lambda_max, rel=1e-9)


# What used to come out: the loss, and λ_max with graphs kept and rebuilt, all "converged". Only buffers began afresh
# for each batch, so the loss was that of `Reference.carried_on`. SwAV's λ_max was NaN; the VAE's had other draws.
USED_TO_BE = {
    "BYOL": (0.418184, 7.350697, 6.981902),
    "MoCo": (1.630471, 7.553881, 8.225460),
    "DINO": (0.909907, 1.939131, 1.941868),
    "MeanTeacher": (0.045691, 2.187553, 2.355307),
    "Rescaled": (1.245568, 1.141366, 0.844472),
    "Annealed": (0.038041, 1.434373, 1.190960),
}


@pytest.mark.parametrize("name", USED_TO_BE)
def test_the_cases_notice_state_that_is_carried_on(name):
    module, _ = fit(name, [])
    exact, (loss, high, low) = Reference(module, name), USED_TO_BE[name]
    assert exact.carried_on() == pytest.approx(loss, rel=1e-4)
    assert exact.loss != pytest.approx(loss, rel=5e-4)
    for value in (high, low):
        assert exact.lambda_max != pytest.approx(value, rel=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_training_is_bitwise_the_same(name):
    bare, watched = fit(name, [])[1], fit(name, [NormTheory(on_error="raise")])[1]
    assert bare == watched


COUNTER = {"steps": 0}


class Outside(Moving):
    """Counts in a global variable."""

    def training_step(self, batch, batch_idx):
        COUNTER["steps"] += 1
        return self(batch[0]).square().mean() / COUNTER["steps"]


def messages(module: Moving, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer([RSCRatio(on_error="raise", **options)], max_epochs=1)
        run.fit(module.double(), DataLoader(data(), BATCH))
    return [
        str(each.message) for each in caught if "training_step" in str(each.message) or "loss=" in str(each.message)
    ]


def test_what_cannot_be_restored_is_said_once():
    COUNTER["steps"] = 0
    torch.manual_seed(0)
    module = Outside()
    with torch.no_grad():
        value = float(module.double()(probe()[0][0]).square().mean())
    (message,) = messages(module)
    # The second call is without a graph, the third shows that this is not the reason.
    assert f"training_step gave {value:.6g}, and then {value / 3:.6g}" in message
    assert "outside the module" in message
    assert message.count("\n") <= 2


def test_a_loss_of_the_users_that_cannot_be_restored():
    seen = []

    def loss(module, batch):
        seen.append(1)
        return module(batch[0]).square().mean() / len(seen)

    (message,) = messages(build("BYOL"), loss=loss)
    assert message.startswith("loss= gave")


@pytest.mark.parametrize("name", MODULES)
def test_trained_weights_that_the_step_changes_are_named(name):
    said = messages(build(name))
    if name in ("SwAV", "SwAVData", "Rescaled"):
        (message,) = said
        assert "training_step itself changes trained parameters (prototypes.weight)" in message
    else:
        assert said == []


class Both(Moving):
    """Augments in its transfer hook and draws in its forward pass."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [x + torch.randn_like(x) for x in batch]

    def forward(self, x):
        return self.student(x) + torch.randn(x.shape[0], 1, dtype=x.dtype)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()


def test_the_same_draws_in_every_diagnostic():
    """Loss and predictor draw the same numbers, which differ from batch to batch, and from those of the hook."""
    drawn: dict[str, list] = {"loss": [], "predict": []}

    def noted(kind, module, batch):
        drawn[kind].append((batch[0].sum().item(), torch.rand(()).item()))
        return module(batch[0])

    callbacks = [
        each(
            probe=SAMPLES,
            loss=lambda module, batch: noted("loss", module, batch).square().mean(),
            predict=lambda module, batch: noted("predict", module, batch),
            on_error="raise",
        )
        for each in (RSCRatio, HessianTopEigenvalue)
    ]
    trainer(callbacks, max_epochs=1).fit(Both().double(), DataLoader(data(), BATCH))
    assert set(drawn["loss"]) == set(drawn["predict"])
    assert len(set(drawn["loss"])) == len({x for x, _ in drawn["loss"]}) == len({u for _, u in drawn["loss"]}) == 3
