"""A training step that is run for a measurement trains nothing, whatever it steps, scales or schedules itself."""

import math

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory, NTKLeastEigenvalue, RademacherBound, RSCRatio

from support.lit import rows, trainer


def data(n=32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator) if dtype.is_floating_point else torch.randint(0, 256, (n, 4)).to(dtype)
    return DataLoader(TensorDataset(x, torch.randn(n, 1, generator=generator)), 8)


class SAM(torch.optim.Optimizer):
    """Steps twice for each batch, and leaves the second step to an optimizer of its own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.Adam(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def _all(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def ascend(self):
        norm = torch.stack([p.grad.norm() for p in self._all()]).norm() + 1e-12
        for p in self._all():
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=float(0.05 / norm))
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p in self._all():
            p.copy_(self.state[p]["before"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError


class Net(pl.LightningModule):
    manual = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not self.manual
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def loss(self, batch):
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class WrappedOptimizer(Net):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.ascend()
        self.manual_backward(self.loss(batch))
        optimizer.descend()

    def configure_optimizers(self):
        return SAM(self.parameters(), 0.01)


class OwnScaler(Net):
    def __init__(self):
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=3)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers().optimizer
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.log("scale", self.scaler.get_scale())


class OwnScheduler(Net):
    manual = False

    def training_step(self, batch, batch_idx):
        self.scheduler.step()
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return optimizer


@pytest.mark.parametrize("module", [WrappedOptimizer, OwnScaler, OwnScheduler])
def test_what_the_step_moves_itself_stays(module):
    found = []
    for callbacks in ([], [RSCRatio(on_error="raise")]):
        net = module()
        fit = trainer(callbacks, max_epochs=2)
        fit.fit(net, data())
        state = [dict(each.state_dict()) for each in fit.optimizers]
        moved = (getattr(net, "scaler", net), getattr(net, "scheduler", net))
        found.append([net.state_dict(), state, *(each.state_dict() for each in moved), fit.logged_metrics.get("scale")])
    assert str(found[0]) == str(found[1])
    x, y = data().dataset.tensors
    assert float(fit.callback_metrics["normtheory/loss"]) == pytest.approx(float(mse_loss(net.net(x), y)), rel=1e-5)


class Players(pl.LightningModule):
    """Two players; the order of zero_grad, backward and step is the idiom."""

    def __init__(self, idiom):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.idiom = idiom

    def first_loss(self, x):
        return 3 - self.second(self.first(x)).mean()

    def second_loss(self, x):
        return self.second(x).square().mean() + (self.second(self.first(x).detach()) - 1).square().mean()

    def training_step(self, batch, batch_idx):
        IDIOMS[self.idiom][0](self, batch[0], batch_idx, *self.optimizers())

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), 0.0) for each in (self.first, self.second)]


def in_turns(net, x, batch_idx, first, second):
    optimizer, loss = (first, net.first_loss) if batch_idx % 2 == 0 else (second, net.second_loss)
    optimizer.zero_grad()
    net.manual_backward(loss(x))
    optimizer.step()


def zero_grad_of_the_module(net, x, batch_idx, first, second):
    for optimizer, loss in ((first, net.first_loss), (second, net.second_loss)):
        net.zero_grad()
        net.manual_backward(loss(x))
        optimizer.step()


def named_inputs(net, x, batch_idx, first, second):
    first.zero_grad()
    second.zero_grad()
    net.first_loss(x).backward(inputs=list(net.first.parameters()))
    net.second_loss(x).backward(inputs=list(net.second.parameters()))
    first.step()
    second.step()


def signs(net, x, batch_idx, first, second):
    second.zero_grad()
    net.manual_backward(net.second(x).mean() + 2, gradient=torch.tensor(1.0))
    net.manual_backward(net.second(net.first(x).detach()).mean(), gradient=torch.tensor(-1.0))
    second.step()


# The step, and the loss of the second player.
IDIOMS = {
    "in turns": (in_turns, Players.second_loss),
    "zero_grad of the module": (zero_grad_of_the_module, Players.second_loss),
    "named inputs": (named_inputs, Players.second_loss),
    "signs": (signs, lambda net, x: net.second(x).mean() + 2 - net.second(net.first(x)).mean()),
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_the_loss_of_a_player(idiom):
    net = Players(idiom)
    fit = trainer([RSCRatio(parameters="second", on_error="raise")], max_epochs=1)
    fit.fit(net, data())
    loss = IDIOMS[idiom][1](net, data().dataset.tensors[0])
    gradients = torch.autograd.grad(loss, list(net.second.parameters()))
    assert float(fit.callback_metrics["normtheory/loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    squared = float(sum(g.square().sum() for g in gradients))
    assert float(fit.callback_metrics["normtheory/grad_norm_sq"]) == pytest.approx(squared, rel=1e-4)


def test_players_in_turns_without_a_choice_have_no_loss():
    """The first batch has the loss of one player only; it is not that of all parameters."""
    fit = trainer([RSCRatio(on_error="raise")], max_epochs=1)
    with pytest.warns(UserWarning, match="only some of the optimizers .* parameters=0, prefix='first'"):
        fit.fit(Players("in turns"), data())
    assert "normtheory/loss" not in fit.callback_metrics


class ByEpoch(Players):
    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        if self.current_epoch % 2 == 0:
            first_loss = self.first_loss(batch[0])
            first.zero_grad()
            self.manual_backward(first_loss)
            first.step()
        else:
            second_loss = self.second_loss(batch[0])
            second.zero_grad()
            self.manual_backward(second_loss)
            second.step()


def test_another_loss_in_another_epoch_is_noticed():
    fit = trainer([RSCRatio(parameters="first")], max_epochs=2)
    with pytest.warns(UserWarning, match="Expected training_step to hand first_loss .* but got second_loss"):
        fit.fit(ByEpoch("in turns"), data())
    assert math.isnan(fit.callback_metrics["normtheory/loss"])


class Unfreezes(pl.LightningModule):
    def __init__(self, frozen):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh()).requires_grad_(not frozen)
        self.head = nn.Linear(5, 1)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        return mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def test_the_kernel_of_layers_that_were_frozen_at_first(tmp_path):
    """The inputs of the head depend on the backbone once it is trained, and so does the kernel."""
    found = []
    for frozen in (True, False):
        run = trainer([NTKLeastEigenvalue(on_error="raise")], max_epochs=2, default_root_dir=tmp_path / str(frozen))
        run.fit(Unfreezes(frozen), data())
        row = rows(run.default_root_dir)[1]
        found.append((row["normtheory/ntk_lambda_min"], row["normtheory/ntk_lambda_max"]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


class Penalized(Net):
    manual = False

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_()
        output = self.net(x)
        loss = mse_loss(output, batch[1])
        if torch.is_grad_enabled():
            loss = loss + 10 * torch.autograd.grad(output.sum(), x, create_graph=True)[0].square().mean()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def test_a_loss_that_asks_for_gradients_has_them_everywhere(recwarn):
    fit = trainer([NormTheory(on_error="raise", ntk_samples=8)], max_epochs=1)
    fit.fit(Penalized(), data())
    assert float(fit.callback_metrics["normtheory/loss_ratio"]) == 1.0
    assert not [each for each in recwarn if "outside the module" in str(each.message)]


class Penalty(Players):
    """A critic whose gradient in its input is penalized, before anything else in the step."""

    def training_step(self, batch, batch_idx):
        x = batch[0]
        first, second = self.optimizers()
        mixed = (0.5 * x + 0.5 * self.first(x).detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.second(mixed).square().sum(), mixed, create_graph=True)
        second_loss = self.second_loss(x) + (slope.norm(dim=1) - 1).square().mean()
        second.zero_grad()
        self.manual_backward(second_loss)
        second.step()
        first_loss = self.first_loss(x)
        first.zero_grad()
        self.manual_backward(first_loss)
        first.step()


@pytest.mark.parametrize(("player", "predictor"), [("first", "first, call 3 of 3"), ("second", "second, call 1 of 3")])
def test_players_with_a_penalty_on_gradients(player, predictor):
    callback = NormTheory(parameters=player, on_error="raise", ntk_samples=8)
    fit = trainer([callback], max_epochs=1)
    fit.fit(Penalty("in turns"), data())
    assert callback._findings.predictor == f"the output of {predictor}"
    assert all(math.isfinite(fit.callback_metrics[f"normtheory/{name}"]) for name in ("rsc_ratio", "ntk_lambda_max"))
    assert "normtheory/certificate_rate_measured" not in fit.callback_metrics  # steps of both are counted together


class Scripted(Net):
    manual = False

    def __init__(self):
        super().__init__()
        self.net = torch.jit.script(self.net)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_script_module_does_not_stop_the_fit():
    fit = trainer([NormTheory()], max_epochs=1)
    fit.fit(Scripted(), data())
    assert math.isfinite(fit.callback_metrics["normtheory/rsc_ratio"])


class Bytes(Net):
    manual = False

    def training_step(self, batch, batch_idx):
        return mse_loss(self.net(batch[0].float()), batch[1])


class Converts(nn.Sequential):
    def forward(self, x):
        return super().forward(x.float())


@pytest.mark.parametrize("inside", [False, True], ids=["in the step", "in the network"])
def test_integers_that_are_no_tokens_are_not_taken_for_unit_vectors(inside):
    net = Bytes()
    if inside:
        net.net = Converts(*net.net)
        net.training_step = lambda batch, batch_idx: mse_loss(net.net(batch[0]), batch[1])
    loaded = data(dtype=torch.uint8)
    fit = trainer([RademacherBound()], max_epochs=1)
    fit.fit(net, loaded)
    largest = float(loaded.dataset.tensors[0].float().norm(dim=1).max())
    norm = fit.callback_metrics.get("normtheory/rademacher_x_norm", torch.tensor(math.nan))
    assert math.isnan(float(norm)) if inside else float(norm) == pytest.approx(largest)
