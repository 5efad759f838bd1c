"""Loss and predictor as they are found in the training step, and the parameters in which they are differentiated."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import HessianTopEigenvalue, MinWeightNorm, NormTheory, NTKLeastEigenvalue, RSCRatio

from support.lit import trainer

weight_norm = nn.utils.parametrizations.weight_norm


class Net(pl.LightningModule):
    """A network with two parts, and a step in some idiom: ``step(self, x, y)`` returns the loss."""

    def __init__(self, step, forward=None):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Tanh())
        self.head = nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5)
        self.criterion = nn.CrossEntropyLoss(reduction="none")
        self._step, self._forward = step, forward

    def forward(self, x, *args):
        return self._forward(self, x, *args) if self._forward else self.head(self.encoder(x))

    def training_step(self, batch, batch_idx):
        return self._step(self, *batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def data(n=20, batch_size=8):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size)


@dataclass(slots=True)
class Forecast:
    prediction: torch.Tensor
    state: torch.Tensor | None


def logits(net, x):
    return net.head(net.encoder(x))


def ce(z, y):
    return functional.cross_entropy(z, y)


IDIOMS = {
    "forward": (Net(lambda net, x, y: ce(net(x), y)), "the output of forward", logits),
    "forward by name": (Net(lambda net, x, y: ce(net.forward(x), y)), "the output of forward", logits),
    "a submodule on top of another": (
        Net(lambda net, x, y: ce(net.dropout(net.head(net.encoder(x))), y)),
        "the output of head",
        logits,
    ),
    "a criterion without reduction": (
        Net(lambda net, x, y: net.criterion(net.head(net.encoder(x)), y).mean()),
        "the output of head",
        logits,
    ),
    "forward returns loss and accuracy": (
        Net(
            lambda net, x, y: net(x, y)[0],
            lambda net, x, y: (ce(z := net.head(net.encoder(x)), y), (z.argmax(1) == y).float().mean()),
        ),
        "the output of head",
        logits,
    ),
    "forward returns hidden states and logits": (
        Net(
            lambda net, x, y: ce(net(x)["logits"], y),
            lambda net, x: {"hidden": (h := net.encoder(x)), "logits": net.head(h)},
        ),
        "the output ['logits'] of forward",
        logits,
    ),
    "forward returns an object": (
        Net(
            lambda net, x, y: net(x, y).loss,
            lambda net, x, y: SimpleNamespace(loss=ce(z := net.head(net.encoder(x)), y), logits=z),
        ),
        "the output .logits of forward",
        logits,
    ),
    "forward returns a dataclass with slots": (
        Net(lambda net, x, y: ce(net(x).prediction, y), lambda net, x: Forecast(net.head(net.encoder(x)), None)),
        "the output .prediction of forward",
        logits,
    ),
    "two heads": (
        Net(
            lambda net, x, y: ce((out := net(x))[0], y) + out[1].square().mean(),
            lambda net, x: [net.head(net.encoder(x)), net.encoder(-x)],
        ),
        "the output [0], [1] of forward",
        lambda net, x: torch.cat([logits(net, x), net.encoder(-x)], 1),
    ),
    "two calls": (
        Net(lambda net, x, y: ce(net(x), y) + net(-x).square().mean()),
        "the output of forward, call 1 of 2",
        logits,
    ),
    "forward is something else": (
        Net(lambda net, x, y: ce(net.head(net.encoder(x)), y), lambda net, x: net.head(net.encoder(x)).softmax(1)),
        "the output of head",
        logits,
    ),
    "views one below the other": (
        Net(lambda net, x, y: ce(net(torch.cat([x, -x])), torch.cat([y, y]))),
        "the output of forward",
        lambda net, x: logits(net, torch.cat([x, -x])),
    ),
    "the sequence in front": (
        Net(lambda net, x, y: ce(net(x.T[:, :, None].expand(-1, -1, 4)).mean(0), y)),
        "the output of forward",
        lambda net, x: logits(net, x[:, :, None].expand(-1, -1, 4)),
    ),
    "derivatives of the output": (
        Net(
            lambda net, x, y: (
                torch.autograd.grad(net.encoder(x.requires_grad_()).sum(), x, create_graph=True)[0].square().mean()
            )
        ),
        "the output of encoder",
        lambda net, x: net.encoder(x),
    ),
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_the_predictor_is_what_the_step_computes(idiom):
    net, name, reference = IDIOMS[idiom]
    callbacks = [RSCRatio(on_error="raise"), NTKLeastEigenvalue(samples=8, outputs="full", on_error="raise")]
    trainer(callbacks, max_epochs=1).fit(net, data())
    assert [each._findings.predictor for each in callbacks] == [name, name]
    exact = net.double()
    theta = [p for p in exact.parameters() if p.requires_grad]
    x = torch.cat([batch.data[0] for batch in callbacks[0].probe.batches(0, 1)]).double()
    total = torch.autograd.grad(reference(exact, x).sum(), theta, allow_unused=True)
    count = reference(exact, x).numel()
    squared = sum(float(g.square().sum()) for g in total if g is not None) / count**2
    metrics = net.trainer.callback_metrics
    assert float(metrics["normtheory/mean_predictor_grad_norm_sq"]) == pytest.approx(squared, rel=1e-4)
    first = callbacks[0].probe.batches(0, 1)[0].data[0].double()
    rows = reference(exact, first).flatten(1)[:8]
    jacobian = torch.stack(
        [
            torch.cat([torch.zeros(p.numel()) if g is None else g.reshape(-1) for g, p in zip(gradient, theta)])
            for gradient in (
                torch.autograd.grad(value, theta, retain_graph=True, allow_unused=True) for value in rows.reshape(-1)
            )
        ]
    )
    largest = torch.linalg.eigvalsh(jacobian @ jacobian.T)[-1]
    assert float(metrics["normtheory/ntk_lambda_max"]) == pytest.approx(float(largest), rel=1e-4)


def test_parameters_that_the_loss_uses_beside_the_predictor_are_named():
    net = Net(lambda net, x, y: ce(functional.linear(net.encoder(x), net.head.weight), y))
    callback = RSCRatio(on_error="raise")
    trainer([callback], max_epochs=1).fit(net, data())
    assert callback._findings.predictor == "the output of encoder"
    assert callback._findings.beside == ("head.weight",)


# -- several players ---------------------------------------------------------------------------------------------------


class GAN(pl.LightningModule):
    """Manual optimization in the usual order; the critic's losses on real and generated data are separate."""

    def __init__(self, critic_steps=1, closures=False):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(weight_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 4))
        self.critic = nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 1))
        self.critic_steps, self.closures = critic_steps, closures

    def losses(self, x, z):
        bce = functional.binary_cross_entropy_with_logits
        one, zero = torch.ones(len(x), 1, dtype=x.dtype), torch.zeros(len(x), 1, dtype=x.dtype)
        fake = self.generator(z)
        return (
            bce(self.critic(fake), one),
            bce(self.critic(x), one),
            bce(self.critic(fake.detach()), zero),
        )

    def training_step(self, batch, batch_idx):
        x, z = batch
        g_opt, c_opt = self.optimizers()
        g_loss, real, fake = self.losses(x, z)
        if batch_idx % self.critic_steps == self.critic_steps - 1:

            def closure():
                g_opt.zero_grad()
                self.manual_backward(g_loss)

            with g_opt.toggle_model():
                if self.closures:
                    g_opt.step(closure)
                else:
                    closure()
                    g_opt.step()
            assert all(p.grad is not None for p in self.generator.parameters())
        c_opt.zero_grad()
        _, real, fake = self.losses(x, z)
        real.backward()
        self.manual_backward(fake)
        c_opt.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        optimizers = [
            torch.optim.SGD(self.generator.parameters(), 0.2),
            torch.optim.SGD(self.critic.parameters(), 0.05),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 100) for each in optimizers]


def pairs(n=22):
    generator = torch.Generator().manual_seed(2)
    x, z = torch.randn(n, 4, generator=generator), torch.randn(n, 3, generator=generator)
    return DataLoader(TensorDataset(x, z), 8)


def fit_gan(callbacks, **arguments):
    module = GAN(**arguments)
    trainer(callbacks, max_epochs=2).fit(module, pairs())
    return module


PLAYERS = {
    "generator": (0, lambda losses: losses[0], 10.0),
    "critic": (1, lambda losses: losses[1] + losses[2], 40.0),
}


@pytest.mark.parametrize(
    "arguments", [{}, {"closures": True}, {"critic_steps": 2}], ids=["plain", "closures", "in turns"]
)
@pytest.mark.parametrize("player", PLAYERS)
def test_one_callback_for_each_player(player, arguments):
    number, loss_of, edge = PLAYERS[player]
    choices = [number, player, [f"{player}.*"], lambda module: getattr(module, player).parameters()]
    callbacks = [
        NormTheory(parameters=choice, prefix=f"p{i}", on_error="raise", hessian_tol=1e-5, ntk_samples=8)
        for i, choice in enumerate(choices[: 1 if arguments else None])
    ]
    module = fit_gan(callbacks, **arguments)
    bare = fit_gan([], **arguments)
    for name, value in bare.state_dict().items():
        assert torch.equal(value, module.state_dict()[name])
    metrics = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    for i in range(1, len(callbacks)):
        for name, value in metrics.items():
            if name.startswith("p0") and "seconds" not in name:
                assert metrics[name.replace("p0", f"p{i}", 1)] == pytest.approx(value, rel=1e-6, nan_ok=True)
    exact = module.double()
    batches = [tuple(each.double() for each in batch.data) for batch in callbacks[0].probe.batches(0, 1)]
    theta = list(getattr(exact, player).parameters())
    loss = sum(len(batch[0]) * loss_of(exact.losses(*batch)) for batch in batches) / 22
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, theta, create_graph=True)])
    squared = float(gradient.detach().square().sum())
    assert metrics["p0/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["p0/grad_norm_sq"] == pytest.approx(squared, rel=1e-4)
    assert metrics["p0/rsc_ratio"] == pytest.approx(squared / float(loss.detach()), rel=1e-4)
    assert metrics["p0/hessian_edge"] == pytest.approx(edge)
    smallest = float(getattr(exact, player)[0].parametrizations.weight.original1.norm(dim=1).min())
    assert metrics["p0/min_weight_norm"] == pytest.approx(smallest, rel=1e-6)
    assert (
        callbacks[0]._findings.predictor
        == {
            "generator": "the output of generator",
            "critic": "the output of critic, call 5 of 6",
        }[player]
        or "critic_steps" in arguments
    )


def test_the_loss_of_one_player_in_the_parameters_of_both_is_something_else():
    """What used to be logged: the generator's loss differentiated in the critic's parameters as well."""
    both = RSCRatio(loss=lambda net, batch: net.losses(*batch)[0], prefix="both")
    module = fit_gan([both, RSCRatio(parameters=0, prefix="own")])
    metrics = module.trainer.callback_metrics
    assert metrics["both/loss"] == metrics["own/loss"]
    assert float(metrics["both/grad_norm_sq"]) > 2 * float(metrics["own/grad_norm_sq"])


def test_several_losses_without_a_choice_are_named():
    with pytest.warns(UserWarning, match="leaves out") as caught:
        module = fit_gan([NormTheory(on_error="raise")])
    (message,) = [str(each.message) for each in caught if "leaves out" in str(each.message)]
    assert "3 losses to manual_backward: g_loss (optimizer 0), real (optimizer 1), fake (optimizer 1)" in message
    assert "parameters=0, prefix=" in message
    assert math.isfinite(module.trainer.callback_metrics["normtheory/min_weight_norm"])
    assert "normtheory/loss" not in module.trainer.callback_metrics


def test_a_player_without_a_normalized_layer_has_no_minimum_norm():
    with pytest.warns(UserWarning, match="the chosen parameters have no normalized layer"):
        module = fit_gan([MinWeightNorm(parameters="generator.2")])
    assert "normtheory/min_weight_norm" not in module.trainer.callback_metrics


def test_the_curvature_is_that_of_the_chosen_parameters():
    torch.manual_seed(0)
    net = Net(lambda net, x, y: ce(net(x), y))
    callback = HessianTopEigenvalue(parameters="head", tol=1e-6, method="lanczos", on_error="raise")
    trainer([callback], max_epochs=1).fit(net, data())
    exact = net.double()
    batches = [(batch.data[0].double(), batch.data[1]) for batch in callback.probe.batches(0, 1)]
    theta = list(exact.head.parameters())
    loss = sum(len(x) * ce(exact(x), y) for x, y in batches) / 20
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, theta, create_graph=True)])
    rows = [
        torch.cat([h.reshape(-1) for h in torch.autograd.grad(entry, theta, retain_graph=True)]) for entry in gradient
    ]
    largest = float(torch.linalg.eigvalsh(torch.stack(rows))[-1])
    assert float(net.trainer.callback_metrics["normtheory/hessian_lambda_max"]) == pytest.approx(largest, rel=1e-4)
