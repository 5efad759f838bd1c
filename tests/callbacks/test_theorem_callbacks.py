"""RademacherBound, ConvergenceCertificate, BatchNormTheory log the values of the theory functions, where they apply."""

import json
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory import batchnorm_margin, hessian_top_eigenvalue, rsc_ratio, weightnorm_constants
from lightning_normtheory.callbacks import BatchNormTheory, ConvergenceCertificate, NormTheory, RademacherBound
from lightning_normtheory.record.history import read_histories
from lightning_normtheory.record.theorem_status import NOT_YET
from lightning_normtheory.theorems import (
    LossState,
    batchnorm_complexity,
    guaranteed_step,
    mean_gradient_condition,
    network_problem,
)
from lightning_normtheory.theorems.generalization import generalization_bound
from lightning_normtheory.theorems.papers.bn_form import batchnorm_form
from lightning_normtheory.view.readings.theorems import judged_assumptions

from support.lit import Classifier, loader, rows, trainer
from support.theory.theorem_cases import (
    DGMNetwork,
    Regression,
    dgm_network,
    fit,
    paper_network,
    rsc_network,
    samples,
    square,
    two_classes,
    two_layers,
    unit_samples,
)


def header():
    (path,) = Path().rglob("normtheory.jsonl")
    return json.loads(path.read_text(encoding="utf-8").splitlines()[0])


# -- the certificate ---------------------------------------------------------------------------------------------------


def test_the_certificate_is_that_of_the_theory_floor():
    data = samples()
    module = Regression(paper_network(8, 2, 2.0))
    measured = fit(ConvergenceCertificate(on_error="raise"), module, data)
    problem = network_problem(module.net, *data, square)
    rsc = rsc_ratio(module.net, square, [data])
    local = LossState(rsc.loss, rsc.grad_norm_sq, problem.loss, problem.x_norm)
    best, own = guaranteed_step(problem.chain, local), guaranteed_step(problem.chain, local, 0.01)
    expected = {
        "certificate_alpha": best.constants.alpha,
        "certificate_beta": best.constants.beta,
        "certificate_step": best.step,
        "certificate_rate": best.rate(rsc.ratio),
        "certificate_hessian_bound": best.network.hessian,
        "certificate_omega": own.omega,
        "certificate_own_rate": own.rate(rsc.ratio),
    }
    for name, value in expected.items():
        assert measured[name] == pytest.approx(value, rel=1e-9), name
    assert measured["certificate_rsc"] == float(best.constants.alpha > 0)


def test_beta_is_above_the_largest_eigenvalue_of_the_hessian_and_the_step_keeps_its_promise():
    data = samples()
    module = Regression(nn.Sequential(weight_norm(nn.Linear(3, 16)), nn.GELU(), nn.Linear(16, 1)).double(), lr=0.02)
    measured = fit(ConvergenceCertificate(on_error="raise"), module, data, epochs=3)
    top = hessian_top_eigenvalue(module.net, square, [data], method="lanczos")
    assert top.value <= measured["certificate_beta"]
    # Every epoch is one step of gradient descent on the whole training set.
    history = rows()
    for before, after in ((history[0], history[1]), (history[1], history[2])):
        guaranteed = before["normtheory/certificate_own_rate"]
        assert after["normtheory/certificate_rate_measured"] <= guaranteed < 1


@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss", "binary_cross_entropy_with_logits"])
def test_other_losses_have_a_guaranteed_step_and_no_alpha(loss):
    x, y = samples()
    y = torch.cat([y, 1 - y, y], 1).round() if loss.startswith("binary") else (3 * y[:, 0]).long()
    criterion = getattr(nn.functional, loss)
    end = [nn.LogSoftmax(1)] if loss == "nll_loss" else []
    net = nn.Sequential(weight_norm(nn.Linear(3, 8)), nn.GELU(), nn.Linear(8, 3), *end).double()
    measured = fit(ConvergenceCertificate(on_error="raise"), Regression(net, 0.05, criterion), (x, y), epochs=3)
    top = hessian_top_eigenvalue(net, criterion, [(x, y)], method="lanczos")
    assert top.value <= measured["certificate_beta"]
    assert measured["certificate_step"] == pytest.approx(1 / measured["certificate_beta"])
    assert 0 <= measured["rsc_kappa"] <= 1
    assert not {"certificate_alpha", "certificate_rsc", "certificate_ntk", "rsc_alpha"} & set(measured)
    assert ("certificate_gradient_bound" in measured) == (not end)  # the bound is of the logits
    history = rows()
    for before, after in ((history[0], history[1]), (history[1], history[2])):
        guaranteed = before["normtheory/certificate_own_rate"]
        assert after["normtheory/certificate_rate_measured"] <= guaranteed < 1


def half_sum(outputs, y):
    return (outputs - y).square().sum() / 2


def test_the_step_is_that_of_a_loss_that_is_a_sum_over_the_batch():
    data = samples()
    net = nn.Sequential(weight_norm(nn.Linear(3, 8)), nn.Tanh(), nn.Linear(8, 1)).double()
    measured = fit(ConvergenceCertificate(on_error="raise"), Regression(net, 1e-3, half_sum), data, epochs=3)
    top = hessian_top_eigenvalue(net, half_sum, [data], method="lanczos")
    assert 1 < top.value <= measured["certificate_beta"]
    assert measured["rsc_alpha"] <= top.value
    history = rows()
    for before, after in ((history[0], history[1]), (history[1], history[2])):
        guaranteed = before["normtheory/certificate_own_rate"]
        assert after["normtheory/certificate_rate_measured"] <= guaranteed < 1


def test_any_chain_has_rscs_condition_on_the_mean_gradient():
    data = samples()
    module = Regression(nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1)).double())
    measured = fit(ConvergenceCertificate(on_error="raise"), module, data)
    problem, rsc = network_problem(module.net, *data, square), rsc_ratio(module.net, square, [data])
    best = guaranteed_step(problem.chain, LossState(rsc.loss, rsc.grad_norm_sq, problem.loss, problem.x_norm))
    expected = mean_gradient_condition(
        best,
        problem.loss,
        mean_predictor_grad_norm_sq=rsc.mean_predictor_grad_norm_sq,
        kappa=measured["rsc_kappa"],
        outputs=1,
    )
    assert measured["rsc_alpha"] == pytest.approx(expected.alpha, rel=1e-6)
    assert measured["rsc_threshold"] == pytest.approx(expected.threshold, rel=1e-6)
    assert measured["rsc_margin"] == pytest.approx(expected.margin, rel=1e-6)
    assert "rsc_gamma" not in measured


def test_a_network_of_wns_form_has_the_papers_constants():
    data = samples()
    module = Regression(paper_network(8, 2, 2.0), lr=0.05)
    start = module.net[-1].weight.detach().clone()
    measured = fit(ConvergenceCertificate(on_error="raise"), module, data)
    directions = [module.net[i].parametrizations.weight.original1.detach() for i in (0, 2)]
    expected = weightnorm_constants(
        depth=2,
        width=8,
        w_min=min(float(v.norm(dim=1).min()) for v in directions),
        beta_phi=4 / (3 * math.sqrt(3)),
        rho1=float((module.net[-1].weight.detach() - start).norm()) + measured["certificate_rho_2"],
        rho2=measured["certificate_rho_2"],
        targets=data[1],
        kappa=1.0,
        ratio=rsc_ratio(module.net, square, [data]).ratio,
        v0_norm=1.0,
    )
    assert measured["wn_alpha"] == pytest.approx(expected.alpha, rel=1e-6)
    assert measured["wn_beta"] == pytest.approx(expected.beta, rel=1e-6)
    assert measured["wn_hessian_bound"] == pytest.approx(expected.hessian, rel=1e-6)
    assert measured["certificate_beta"] <= measured["wn_beta"]
    assert "rsc_gamma" not in measured


def test_a_network_of_rscs_form_has_the_papers_constants():
    measured = fit(ConvergenceCertificate(on_error="raise"), Regression(rsc_network()), samples(norm=math.sqrt(3)))
    assert measured["rsc_margin"] < 0 < measured["rsc_threshold"]
    assert (measured["rsc_alpha"] > 0) == (measured["rsc_margin"] > 0)
    assert 0 <= measured["rsc_kappa"] <= 1
    assert measured["rho"] > 0
    assert "wn_alpha" not in measured


def test_a_network_of_dgms_form_has_a_regime():
    measured = fit(ConvergenceCertificate(on_error="raise"), Regression(dgm_network(4096)), samples(8), epochs=1)
    assert "certificate_dgm_v" in measured
    assert measured["certificate_dgm_v"] == float(measured["certificate_dgm_v_margin"] > 0)
    assert "certificate_rsc" not in measured  # ReLU
    assert "certificate_beta" not in measured


def test_nothing_pretends_on_a_relu_network_with_cross_entropy(tmp_path, monkeypatch):
    trainer([ConvergenceCertificate(on_error="raise")], max_epochs=1).fit(Classifier("bn"), loader())
    (row,) = rows().values()
    names = {name.removeprefix("normtheory/") for name in row}
    assert names == {"certificate_rate_measured", "rsc_kappa", "seconds"}
    theorems = header()["theorems"]
    assert [each["verdict"] for each in theorems].count("does not apply") == 6
    assert all(each["reasons"] for each in theorems)


def test_remark_5_5_on_the_same_samples():
    measured = fit(ConvergenceCertificate(on_error="raise"), Regression(paper_network(8, 1, 1.0)), samples(6))
    assert measured["ntk_mean_grad_norm_sq"] >= measured["ntk_mean_grad_norm_sq_bound"] > 0


def test_a_theorem_applies_while_network_and_run_fit():
    """With long directions, α > 0. From epoch 1 on the step is beyond 2/β, which the row says, without a warning."""

    class Faster(Regression):
        def on_train_epoch_start(self):
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.05 if self.current_epoch < 1 else 5.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(ConvergenceCertificate(on_error="raise"), Faster(paper_network(64, 1, 1000.0)), samples(4))
    (history,) = read_histories(next(Path().rglob("normtheory.jsonl")))
    assert list(history.series("theorem__wn_5_1").values()) == [1, 0]
    assert list(history.series("theorem__wn_6_1").values()) == [1, 1]
    assert "theorem__rsc_5_1" not in history.names()
    assert "theorem__wn_5_1" not in history.rows[0].reasons
    assert re.fullmatch(r"the paper's ηβ = 10, not below 2", history.rows[1].reasons["theorem__wn_5_1"])
    assert not any("theorem__" in str(warning.message) for warning in caught)
    assert history.theorems[0].verdict == "fits"
    assert len(history.theorems[0].assumptions) > 15
    after = {each.name: each for each in judged_assumptions(history, history.theorems[0])}
    assert (after["η < 2/β"].state, after["η < 2/β"].found) == ("fails", "the paper's ηβ = 10, not below 2")
    assert after["α > 0 (A3.1)"].state == after["v within ρ₁ of v_0 (A3.2)"].state == "holds"
    for status in history.theorems:  # nothing waits for the training
        assert not any(each.found == NOT_YET for each in judged_assumptions(history, status))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch": 2}, "mini-batches of 2 of 4 samples"),
        ({"momentum": 0.9}, "momentum of 0.9"),
        ({"clip": 0.5}, "gradients are clipped to 0.5"),
    ],
    ids=str,
)
def test_a_run_that_is_not_gradient_descent_does_not_fit(change, reason):
    class Other(Regression):
        def configure_optimizers(self):
            parameters = [p for p in self.parameters() if p.requires_grad]
            return torch.optim.SGD(parameters, 0.05, momentum=change.get("momentum", 0.0))

    made = trainer([ConvergenceCertificate(on_error="raise")], max_epochs=1, gradient_clip_val=change.get("clip"))
    made.fit(Other(paper_network(64, 1, 1000.0)), DataLoader(TensorDataset(*samples(4)), change.get("batch", 4)))
    assert reason in header()["theorems"][0]["reasons"][0]
    (row,) = rows().values()
    assert row["normtheory/theorem__wn_5_1"] == 0
    assert row["normtheory/theorem__wn_6_1"] == 1  # any training may end in that ball


class Dropping(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net[2](nn.functional.dropout(self.net[1](self.net[0](x)), 0.5, self.training))


def test_a_functional_dropout_is_noticed():
    fit(ConvergenceCertificate(on_error="raise"), Regression(Dropping(paper_network(8, 1, 1.0))), samples(4), epochs=1)
    row = header()["theorems"][0]
    assert (row["verdict"], row["reasons"]) == ("does not apply", ["the training step draws random numbers"])


def test_the_targets_of_all_samples_are_looked_at():
    x, y = samples(100)
    y[90] = 3.0
    fit(ConvergenceCertificate(on_error="raise", probe=100), Regression(paper_network(8, 1, 1.0)), (x, y), epochs=1)
    assert "|y| reaches 3, above 1" in header()["theorems"][1]["reasons"]


def test_dgms_own_loss_and_network_are_recognized():
    data = unit_samples(8, 50), torch.rand(8, 1, dtype=torch.float64)
    module = Regression(DGMNetwork(50, 64, 0.5), lr=0.05, loss=lambda f, y: 0.5 * (f - y).square().sum())
    measured = fit(ConvergenceCertificate(on_error="raise"), module, data, epochs=1)
    assert measured["theorem__dgm_4_1"] == 1
    (row,) = [row for row in header()["theorems"] if row["theorem"].startswith("DGM")]
    assert row["verdict"] == "fits"
    assert sum("not checked" in reason for reason in row["reasons"]) == 2


def test_dgms_theorem_does_not_apply_beyond_the_radii_of_its_proof():
    data = unit_samples(8, 50), torch.rand(8, 1, dtype=torch.float64)
    module = Regression(DGMNetwork(50, 64, 0.5), lr=0.05, loss=lambda f, y: 0.5 * (f - y).square().sum())
    measured = fit(NormTheory(on_error="raise"), module, data, epochs=1)
    assert measured["weightnorm_displacement_v"] > measured["dgm_radius_v"]
    assert measured["theorem__dgm_4_1"] == 0
    (history,) = read_histories(next(Path().rglob("normtheory.jsonl")))
    assert "is above R_v" in history.rows[0].reasons["theorem__dgm_4_1"]


def test_the_table_is_printed_at_fit_start(monkeypatch):
    printed = []
    monkeypatch.setattr("lightning_normtheory.callbacks.output.messages.rank_zero_info", printed.append)
    fit(ConvergenceCertificate(), Regression(paper_network(8, 1, 1.0)), samples(6), epochs=2)
    (text,) = [text for text in printed if re.search(r"WN, Theorem 5.1 \(optimization\) +network fits", text)]
    assert text == next(each for each in printed if "\n" in each)  # before the other tables


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_bound_and_gap_are_those_of_the_theory_floor():
    data, unseen = samples(), samples(40, seed=1)
    module = Regression(paper_network(8, 2, 1.0))
    measured = fit(RademacherBound(on_error="raise", delta=0.1), module, data, unseen)
    problem = network_problem(module.net, *data, square)
    expected = generalization_bound(problem.complexity, problem.loss, n=24, x_norm=problem.x_norm, delta=0.1)
    assert measured["rademacher_bound"] == pytest.approx(expected.rademacher, rel=1e-9)
    assert measured["generalization_bound"] == pytest.approx(expected.value, rel=1e-9)
    assert measured["generalization_bound_fixed_radii"] == pytest.approx(expected.fixed, rel=1e-9)
    train, validation = (float(square(module.net(x), y).detach()) for x, y in (data, unseen))
    assert measured["generalization_gap"] == pytest.approx(validation - train, rel=1e-9)
    assert measured["population_loss_bound"] == pytest.approx(train + expected.value, rel=1e-9)
    assert measured["generalization_bound_vacuous"] == 1


@pytest.mark.slow
def test_a_bound_that_says_something():
    """For a linear function that fits many samples, the bound is below the loss of the zero function."""
    net = nn.Linear(3, 1, bias=False).double()
    net.weight.data = torch.tensor([[0.3, 0.4, 0.0]], dtype=torch.float64)
    x = samples(200_000)[0]
    measured = fit(RademacherBound(on_error="raise"), Regression(net), (x, net(x).detach() + 0.01))
    assert measured["generalization_bound_vacuous"] == 0
    assert measured["population_loss_bound"] < 0.25 / 3  # E(w·x)² of unit vectors in three dimensions


def test_given_norm_and_arguments():
    measured = fit(RademacherBound(x_norm=10.0), Regression(paper_network(8, 1, 1.0)), samples())
    assert measured["rademacher_x_norm"] == 10
    for wrong in ({"delta": 0.0}, {"delta": 1.0}, {"x_norm": -1.0}, {"x_norm": math.nan}):
        with pytest.raises(ValueError, match="Expected"):
            RademacherBound(**wrong)


def test_a_network_without_bound_logs_nan_and_says_why_once():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()
    with pytest.warns(UserWarning, match="layer_norm") as caught:
        measured = fit(RademacherBound(on_error="raise"), Regression(net), samples(), samples(8, seed=1))
    assert math.isnan(measured["rademacher_bound"])
    assert math.isfinite(measured["generalization_gap"])
    assert "generalization_bound" not in measured
    assert sum("rademacher_bound" in str(w.message) for w in caught) == 1


def tokens(*shape):
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(0))


IDIOMS = {
    "log_softmax and nll": (
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.LogSoftmax(1)),
        (torch.randn(8, 3), tokens(8)),
        nn.NLLLoss(),
    ),
    "tokens": (
        nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 5)),
        (tokens(8, 3), tokens(8)),
        nn.CrossEntropyLoss(),
    ),
    "pixels": (
        nn.Sequential(nn.Conv2d(1, 2, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(2, 5, 2, stride=2)),
        (torch.randn(8, 1, 4, 4), tokens(8, 4, 4)),
        nn.CrossEntropyLoss(),
    ),
    "next tokens": (
        nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)),
        (tokens(8, 3), tokens(8, 3)),
        lambda f, y: nn.functional.cross_entropy(f.flatten(0, 1), y.flatten()),
    ),
    "several labels": (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)),
        (torch.randn(8, 3), (tokens(8, 5) % 2).float()),
        nn.BCEWithLogitsLoss(),
    ),
}


@pytest.mark.parametrize(("net", "data", "loss"), IDIOMS.values(), ids=IDIOMS.keys())
def test_losses_of_the_wild_have_a_bound(net, data, loss):
    """Seen: NaN or no bound in each."""
    module = Regression(net, loss=loss)
    measured = fit(RademacherBound(on_error="raise"), module, data)
    problem = network_problem(module.net, *data, loss)
    bound = generalization_bound(problem.complexity, problem.loss, n=len(data[0]), x_norm=problem.x_norm)
    assert measured["rademacher_bound"] == pytest.approx(problem.complexity.rademacher(len(data[0]), problem.x_norm))
    assert measured["generalization_bound"] == pytest.approx(bound.value)
    assert measured["generalization_bound_vacuous"] == 1.0


class NextToken(Regression):
    """Its batches are text alone."""

    def training_step(self, batch, batch_idx):
        return self._criterion(self(batch[0][:, :-1]), batch[0][:, 1:])


def test_text_that_is_its_own_target_has_a_bound():
    net, _, loss = IDIOMS["next tokens"]
    text = tokens(8, 4)
    measured = fit(RademacherBound(on_error="raise"), NextToken(net, loss=loss), (text,))
    problem = network_problem(net, text[:, :-1], text[:, 1:], loss)
    bound = generalization_bound(problem.complexity, problem.loss, n=8, x_norm=problem.x_norm)
    assert problem.loss.terms == 3
    assert measured["generalization_bound"] == pytest.approx(bound.value)


@pytest.mark.parametrize("ignored", [-100, -1])
def test_ignored_labels_leave_the_complexity_and_say_why_there_is_no_bound(ignored):
    net, (x, y), _ = IDIOMS["pixels"]
    y = y.clone()
    y[:, 0] = ignored
    module = Regression(net, loss=nn.CrossEntropyLoss(ignore_index=ignored))
    with pytest.warns(UserWarning, match=rf"the cross entropy ignores labels of {ignored}: it is a mean over"):
        measured = fit(RademacherBound(on_error="raise"), module, (x, y))
    assert math.isfinite(measured["rademacher_bound"])
    assert "generalization_bound" not in measured


def test_another_loss_has_a_complexity_and_no_bound():
    module = Regression(paper_network(8, 1, 1.0), loss=lambda f, y: (f - y).abs().mean())
    with pytest.warns(UserWarning, match="generalization_bound is not logged: the loss is neither"):
        measured = fit(RademacherBound(on_error="raise"), module, samples())
    assert math.isfinite(measured["rademacher_bound"])
    assert "generalization_bound" not in measured


# -- BatchNorm ---------------------------------------------------------------------------------------------------------


def test_margins_and_displacements_of_the_papers_network():
    data, net = two_classes(), two_layers()
    form = batchnorm_form(net, data[0], net(data[0]))
    expected = [batchnorm_margin(f, data[1][:, 0]).value / math.sqrt(32) for f in (form.features_a, form.features_c)]
    start = net[0].weight.detach().clone()
    module = Regression(net, loss=nn.functional.binary_cross_entropy_with_logits)
    measured = fit(NormTheory(on_error="raise"), module, data)
    assert measured["batchnorm_gamma_a"] == pytest.approx(expected[0], rel=1e-6)
    assert measured["batchnorm_gamma_c"] == pytest.approx(expected[1], rel=1e-6)
    assert measured["batchnorm_displacement_v"] == pytest.approx(
        float((net[0].weight.detach() - start).norm()), rel=1e-6
    )
    assert measured["rademacher_bound"] > 0
    assert measured["batchnorm_width_ok"] == 0
    assert "batchnorm_error_bound" not in measured
    (reason,) = header()["theorems"][4]["reasons"]
    assert "no width fits: at least" in reason


def test_the_corrected_lemma_bounds_the_papers_network():
    """For a network of BN's form the bound is BN's, corrected, for n samples with the largest norm."""
    from lightning_normtheory import batchnorm_rademacher

    data, net = two_classes(), two_layers()
    net[1].bias.requires_grad_(False)
    start = net[0].weight.detach().clone()
    measured = fit(BatchNormTheory(on_error="raise"), Regression(net), data)
    net.train()
    form = batchnorm_form(net, data[0], net(data[0]))
    expected = batchnorm_rademacher(form.a, form.c, form.v, start, form.x_centered, form.factors, n=24)
    assert measured["batchnorm_rademacher"] == pytest.approx(expected, rel=1e-6)
    signs = 2 * data[1][:, 0] - 1
    margin = (signs * net(data[0])[:, 0]).min() / (net[3].weight.norm() * net[1].weight.norm())
    assert measured["batchnorm_margin"] == pytest.approx(float(margin.detach()), rel=1e-6)


def test_a_trained_shift_has_no_margin_and_says_why():
    with pytest.warns(UserWarning, match="batchnorm_margin is not logged: the bias of the BatchNorm"):
        measured = fit(BatchNormTheory(on_error="raise"), Regression(two_layers()), two_classes())
    assert "batchnorm_margin" not in measured
    assert "batchnorm_rademacher" not in measured
    assert measured["batchnorm_delta_v"] > 0


def crossed():
    """The unit with the large output weight has the small scale: Σ|a_j c_j| is far less than ‖a‖‖c‖."""
    net = two_layers(4)
    net[3].weight.data = torch.tensor([[1.0, 0.01, 0.01, 0.01]], dtype=torch.float64)
    net[1].weight.data = torch.tensor([0.01, 1.0, 1.0, 1.0], dtype=torch.float64)
    return net


@pytest.mark.parametrize(("net", "own"), [(crossed, True), (two_layers, False)], ids=["start", "generic"])
@pytest.mark.parametrize("loss", [nn.functional.binary_cross_entropy_with_logits, square], ids=["logistic", "square"])
def test_the_generalization_bound_follows_from_the_rademacher_bound(net, own, loss):
    """Both from one class, with δ/2: that of the lower complexity, of the network with its running statistics."""
    data, net = two_classes(), net()
    net[1].bias.requires_grad_(False)
    start = torch.cat([net[0].weight.detach().clone(), net[0].bias.detach().clone()[:, None]], dim=1)
    measured = fit(RademacherBound(on_error="raise"), Regression(net, loss=loss), data)
    net.eval()
    norm, problem = net[1], network_problem(net, *data, loss)
    rows_now = torch.cat([net[0].weight, (net[0].bias - norm.running_mean)[:, None]], dim=1)
    factors = (norm.running_var + norm.eps).sqrt()
    around = batchnorm_complexity(net[3].weight, norm.weight, rows_now, start, factors)
    both = {True: around, False: problem.complexity}
    of = {which: each.rademacher(24, problem.x_norm) for which, each in both.items()}
    assert of[own] < of[not own]
    expected = generalization_bound(both[own], problem.loss, n=24, x_norm=problem.x_norm, delta=0.05 / 2)
    assert measured["rademacher_bound"] == pytest.approx(of[own], rel=1e-9)
    assert measured["generalization_bound"] == pytest.approx(expected.value, rel=1e-9)
    assert measured["generalization_bound_fixed_radii"] == pytest.approx(expected.fixed, rel=1e-9)
    # The documented formula, from what is logged: F = C max‖(x, 1)‖ and R have a fixed ratio.
    spread = 2 / math.sqrt(24) if own else (math.sqrt(2 * problem.complexity.log_kappa) + 1) / math.sqrt(24)
    R, F, tail = measured["rademacher_bound"], measured["rademacher_bound"] / spread, math.sqrt(2 * math.log(80) / 24)
    lipschitz, largest = (1, math.log(2) + F) if loss is not square else (2 * (1 + F), (1 + F) ** 2)
    assert measured["generalization_bound_fixed_radii"] == pytest.approx(2 * lipschitz * R + largest * tail, rel=1e-9)


def test_epsilon_of_every_batchnorm():
    trainer([BatchNormTheory(on_error="raise")], max_epochs=1).fit(Classifier("bn"), loader())
    (row,) = rows().values()
    assert row["normtheory/batchnorm_epsilon"] == row["normtheory_layers/batchnorm_epsilon__net_1"] > 0


def test_norm_theory_says_nothing_of_what_is_not_there(recwarn):
    fit(NormTheory(on_error="raise"), Regression(paper_network(8, 1, 1.0)), samples(), epochs=1)
    assert not any("leaves out" in str(w.message) for w in recwarn)


@pytest.mark.parametrize("net", [lambda: paper_network(8, 2, 1.0), rsc_network, two_layers], ids=["wn", "rsc", "bn"])
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(tmp_path, net):
    def run(folder, epochs, ckpt=None):
        torch.manual_seed(1)
        module = Regression(net())
        made = trainer([NormTheory(on_error="raise")], max_epochs=epochs, default_root_dir=folder)
        made.fit(module, DataLoader(TensorDataset(*samples()), 24), ckpt_path=ckpt)
        made.save_checkpoint(folder / "last.ckpt")
        return rows(folder)

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "half", 2)
    resumed = run(tmp_path / "rest", 4, tmp_path / "half" / "last.ckpt")
    for epoch in (2, 3):
        for name, value in whole[epoch].items():
            if "seconds" not in name:
                assert resumed[epoch][name] == pytest.approx(value, rel=1e-12, nan_ok=True), name


def test_theorems_are_looked_for_again_after_a_start_without_a_loss():
    """A first epoch with a NaN loss must not fix the table or the header for the whole run."""

    class Late(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if self.current_epoch == 0 else loss

        def on_after_backward(self):
            for p in self.parameters():
                p.grad.nan_to_num_()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer([ConvergenceCertificate()], max_epochs=3).fit(Late("wn"), loader())
    (path,) = Path().rglob("normtheory.jsonl")
    (history,) = read_histories(path)
    reasons = {row.theorem: " ".join(row.reasons) for row in history.theorems}
    assert reasons["WN, Theorem 5.1 (optimization)"] == "the loss is a cross entropy, not the square loss"
