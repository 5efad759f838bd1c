"""Which theorem applies: a table of networks with the verdicts, and losses recognized by their values."""

import math

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import applicable_theorems
from lightning_normtheory.record import theorem_table
from lightning_normtheory.record.theorem_status import theorem_summary
from lightning_normtheory.theorems import losses, network_problem
from lightning_normtheory.theorems.losses import KnownLoss, as_targets, identify_loss

from support.theory.theorem_cases import dgm_network, paper_network, rsc_network, square, targets, unit

WN, WN_GENERAL, RSC, DGM, BN, LIN = range(6)


def verdicts(model, x, y, loss=square):
    return [row.verdict for row in applicable_theorems(model, x, y, loss)]


def test_the_papers_own_network_fits_wn():
    rows = applicable_theorems(paper_network(8, 2, 1.0), unit(), targets(), square)
    assert rows[WN].verdict == "fits"
    assert rows[WN_GENERAL].verdict == "fits"
    assert rows[WN].reasons == ()
    assert network_problem(paper_network(8, 2, 1.0), unit()).has_weight_norm_form


def two_layers(layer, activation):
    return nn.Sequential(layer, activation, nn.Linear(4, 1)).double()


def freed_lengths():
    net = paper_network(8, 2, 1.0)
    net[0].parametrizations.weight.original0.requires_grad_(True)
    return net


@pytest.mark.parametrize(
    ("net", "x", "y", "loss", "reason"),
    [
        (freed_lengths(), unit(), targets(), square, "trained lengths g (0)"),
        (paper_network(8, 2, 1.0), 2 * unit(), targets(), square, "‖x‖ is 2, not 1"),
        (paper_network(8, 2, 1.0), unit(), targets(), lambda f, y: square(f, y) / 2, "0.5 times"),
        (paper_network(8, 2, 1.0, nn.GELU), unit(), targets(), square, "GELU reaches 1.129"),
        (two_layers(weight_norm(nn.Linear(3, 4)), nn.Tanh()), unit(), targets(), square, "a bias (0)"),
        (two_layers(nn.Linear(3, 4, bias=False), nn.Tanh()), unit(), targets(), square, "no WeightNorm (0)"),
    ],
    ids=["lengths", "inputs", "loss", "activation", "bias", "plain"],
)  # fmt: skip
def test_wn_is_generalized_where_one_assumption_fails(net, x, y, loss, reason):
    row = applicable_theorems(net, x, y, loss)[WN]
    assert row.verdict == "generalized"
    assert any(reason in each for each in row.reasons), row.reasons


@pytest.mark.parametrize(
    ("net", "loss", "reason"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double(), square, "ReLU is not smooth"),
        (paper_network(8, 2, 1.0), lambda f, y: (f - y).abs().mean(), "neither a square loss"),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double(), square, "BatchNorm"),
    ],
    ids=["relu", "loss", "batchnorm"],
)
def test_wn_does_not_apply(net, loss, reason):
    row = applicable_theorems(net, unit(), targets(), loss)[WN]
    assert row.verdict == "does not apply"
    assert any(reason in each for each in row.reasons), row.reasons


def test_rscs_network_fits_rsc():
    found = verdicts(rsc_network(width=256), math.sqrt(3) * unit(), targets())
    assert found[RSC] == "fits"
    assert found[LIN] == "does not apply"  # the output weights are a unit vector, not N(0, 1)
    assert network_problem(rsc_network(), math.sqrt(3) * unit()).has_rsc_form
    assert verdicts(rsc_network(), unit(), targets())[RSC] == "generalized"
    assert not network_problem(rsc_network(), unit()).has_rsc_form


def test_constants_of_an_activation_that_are_measured_are_named():
    row = applicable_theorems(two_layers(nn.Linear(3, 4), nn.Mish()), unit(), targets(), square)[WN]
    assert row.unchecked[-1].found == "the constants of mish are measured, not derived"


def test_dgm_is_about_its_network_in_many_dimensions():
    row = applicable_theorems(dgm_network(), unit(), targets(), square)[DGM]
    assert row.verdict == "does not apply"
    assert "d is 3, below 50" in row.reasons
    assert verdicts(dgm_network(), unit(), targets())[WN] == "does not apply"
    assert verdicts(rsc_network(), unit(), targets())[DGM] == "does not apply"


def test_bn_is_about_widths_that_nobody_has():
    net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1, bias=False)).double()
    y = torch.randint(0, 2, (20, 1)).double()
    for x, loss, reason in (
        (unit() / 2, nn.functional.binary_cross_entropy_with_logits, "no width fits: at least"),
        (10 * unit(), nn.functional.binary_cross_entropy_with_logits, "‖x̄‖ of the centered inputs reaches"),
    ):
        row = applicable_theorems(net, x, y, loss)[BN]
        assert row.verdict == "does not apply"
        assert reason in row.reasons[0]


def test_on_a_relu_resnet_no_theorem_of_optimization_applies_and_the_reasons_are_there():
    model = torchvision.models.resnet18(num_classes=10)
    x, y = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
    rows = applicable_theorems(model, x, y, nn.functional.cross_entropy)
    assert [row.verdict for row in rows] == [
        "does not apply",
        "generalized",
        *["does not apply"] * 5,
    ]
    assert all(row.reasons for row in rows)
    assert "the activation ReLU is not smooth" in rows[WN].reasons
    complexity = network_problem(model, x).complexity
    assert 1 < complexity.rademacher(50_000, 60.0) < math.inf


def test_nothing_is_changed():
    model = torchvision.models.resnet18(num_classes=2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    applicable_theorems(model, torch.randn(2, 3, 32, 32), torch.tensor([0, 1]), nn.functional.cross_entropy)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_table_fits_a_terminal():
    rows = applicable_theorems(freed_lengths(), unit(), targets(), square)
    text = theorem_table(rows, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("WN, Theorem") == 2


def test_theorems_that_do_not_apply_take_a_line_each():
    model = torchvision.models.VisionTransformer(32, 16, 1, 2, 8, 8, num_classes=2)
    rows = applicable_theorems(model, torch.randn(2, 3, 32, 32), torch.tensor([0, 1]), nn.functional.cross_entropy)
    lines = theorem_summary(rows, width=80).splitlines()
    assert lines[0] == "No theorem applies:"
    assert len(lines) == 1 + len(rows) <= 8
    assert max(map(len, lines)) <= 80
    rows = applicable_theorems(freed_lengths(), unit(), targets(), square)
    applying = [row for row in rows if row.verdict != "does not apply"]
    text = theorem_summary(rows, width=80)
    assert 0 < len(applying) < len(rows)
    assert text.startswith(theorem_table(applying, width=80))
    assert len(text.splitlines()) == len(theorem_table(applying).splitlines()) + 1 + len(rows) - len(applying)


@pytest.mark.parametrize(
    ("loss", "k", "y", "expected"),
    [
        (square, 3, torch.rand(8, 3), ("square", 1.0)),
        (nn.MSELoss(), 3, torch.rand(8, 3), ("square", 1 / 3)),
        (nn.MSELoss(), 1, torch.rand(8, 1), ("square", 1.0)),
        (lambda f, y: square(f, y) / 2, 1, torch.rand(8, 1), ("square", 0.5)),
        (lambda f, y: square(f, nn.functional.one_hot(y, 3)), 3, torch.arange(8) % 3, ("square", 1.0)),
        (nn.CrossEntropyLoss(), 3, torch.arange(8) % 3, ("cross_entropy", 1.0)),
        (nn.BCEWithLogitsLoss(), 1, (torch.arange(8) % 2).float()[:, None], ("logistic", 1.0)),
        (nn.SoftMarginLoss(), 1, (2 * (torch.arange(8) % 2) - 1).float()[:, None], ("logistic", 1.0)),
        (lambda f, y: nn.functional.nll_loss(f.log_softmax(1), y), 3, torch.arange(8) % 3, ("cross_entropy", 1.0)),
        (nn.BCEWithLogitsLoss(), 3, (torch.arange(24) % 2).float().reshape(8, 3), ("logistic", 1 / 3)),
        (nn.BCEWithLogitsLoss(), 3, torch.rand(8, 3), ("logistic", 1 / 3)),
        (nn.SoftMarginLoss(), 3, (2 * (torch.arange(24) % 2) - 1).float().reshape(8, 3), ("logistic", 1 / 3)),
    ],
)
def test_losses_are_recognized_by_their_value(loss, k, y, expected):
    outputs = torch.randn(8, k)
    found = identify_loss(float(loss(outputs, y)), outputs, y)
    assert isinstance(found, KnownLoss)
    assert (found.name, found.scale) == expected


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("positions", [(), (1,), (5,), (4, 3)])
def test_cross_entropy_at_every_position(axis, positions):
    logits, y = torch.randn(6, 3, *positions), torch.arange(6 * math.prod(positions)).reshape(6, *positions) % 3
    value = float(nn.functional.cross_entropy(logits, y))
    expected = KnownLoss("cross_entropy", classes=3, terms=math.prod(positions))
    assert identify_loss(value, logits.movedim(1, axis), y) == expected
    assert identify_loss(value, logits.log_softmax(1).movedim(1, axis), y) == expected
    assert identify_loss(value * 1.01, logits.movedim(1, axis), y) != expected


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4)])
@pytest.mark.parametrize("label", [-100, -1, 3, 255])
def test_labels_outside_the_classes_are_neither_misread_nor_an_error(shape, label):
    """Seen: an IndexError of torch for −1; −100, which torch ignores, taken for a mean over all samples."""
    logits, y = torch.randn(shape), torch.zeros(shape[:1] + shape[2:], dtype=torch.long)
    y[0] = label
    value = float(nn.functional.cross_entropy(logits, y, ignore_index=label))
    assert identify_loss(value, logits, y) == (
        f"the cross entropy ignores labels of {label}: it is a mean over the other positions of a batch, not over its"
        " samples"
    )
    among = f"labels from {min(label, 0)} to {max(label, 0)} are not all among the 3 classes"
    assert identify_loss(1.01 * value, logits, y) == among


def cross_entropy_over_tokens(form, logits, y):
    """The same mean in each way in which language models write it, with the outputs of its predictor."""
    rows = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    return rows, {"tokens": logits, "transposed": logits.transpose(1, 2), "flat": logits.flatten(0, 1)}[form]


@pytest.mark.parametrize("form", ["tokens", "transposed", "flat"])
@pytest.mark.parametrize("ignored", [0, 1, 4])
def test_cross_entropy_over_tokens(form, ignored, monkeypatch):
    """Also when it is computed in several pieces, and with padding, which every form declines for the same reason."""
    monkeypatch.setattr(losses, "_PIECE", 40)
    logits, y = 2 * torch.randn(3, 4, 7), torch.randint(7, (3, 4))
    y[0, 4 - ignored :] = -100
    value, outputs = cross_entropy_over_tokens(form, logits, y)
    found = identify_loss(float(value), outputs, y)
    if ignored:
        assert "ignores labels of -100: it is a mean over the other positions" in found
    else:
        assert found == KnownLoss("cross_entropy", classes=7, terms=4)
    assert isinstance(identify_loss(1.01 * float(value), outputs, y), str)


@pytest.mark.parametrize("longer", [0, 1])
def test_cross_entropy_of_the_next_token(longer):
    """Where the model shifts the text itself, the outputs of the last token have no target."""
    logits, text = 2 * torch.randn(3, 4, 7), torch.randint(7, (3, 4 + longer))
    predicted = logits[:, : 3 + longer]
    value = nn.functional.cross_entropy(predicted.flatten(0, 1), text[:, 1:].flatten())
    assert identify_loss(float(value), logits, text) == KnownLoss("cross_entropy", classes=7, terms=3 + longer)


@pytest.mark.parametrize("loss", [square, nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.SoftMarginLoss(), nn.L1Loss()])
def test_losses_in_pieces_are_those_of_the_whole(loss, monkeypatch):
    outputs, y = torch.randn(9, 5), (torch.arange(45) % 2).float().reshape(9, 5)
    y = 2 * y - 1 if isinstance(loss, nn.SoftMarginLoss) else y
    value = float(loss(outputs, y))
    whole = identify_loss(value, outputs, y)
    monkeypatch.setattr(losses, "_PIECE", 12)
    assert identify_loss(value, outputs, y) == whole


@pytest.mark.parametrize("loss", [nn.L1Loss(), nn.HuberLoss(delta=0.1), lambda f, y: square(f, y) + 0.01])
def test_other_losses_are_not(loss):
    outputs, y = torch.randn(8, 2), torch.rand(8, 2)
    assert "neither" in identify_loss(float(loss(outputs, y)), outputs, y)


@pytest.mark.parametrize(
    "known",
    [
        KnownLoss("square", 0.5, 2.0),
        KnownLoss("cross_entropy", classes=3),
        KnownLoss("cross_entropy", classes=3, terms=5),
        KnownLoss("logistic"),
        KnownLoss("logistic", 0.25, terms=4),
        KnownLoss("logistic", terms=2),
    ],
)
def test_constants_of_losses(known):
    """Lipschitz and range, on random outputs within a bound."""
    functions = {
        "square": lambda f, y: known.scale * (f - y).square(),
        "cross_entropy": lambda f, y: nn.functional.cross_entropy(
            f.reshape(1, 3, known.terms), torch.arange(known.terms)[None] % 3
        ),
        "logistic": lambda f, y: known.scale * nn.functional.softplus(-f),
    }
    bound, k = 1.5, (3 if known.name == "cross_entropy" else 1) * known.terms
    # In one output, or for the cross entropy in all of them together.
    order = 2 if known.name == "cross_entropy" else math.inf
    for _ in range(200):
        f = ((2 * torch.rand(k) - 1) * bound).requires_grad_()
        value = functions[known.name](f, known.largest_target).sum()
        (slope,) = torch.autograd.grad(value, f)
        assert float(slope.norm(order)) <= known.lipschitz(bound) * (1 + 1e-6)
        assert float(value.detach()) <= known.largest(bound) * (1 + 1e-6)


def test_targets_as_numbers():
    assert as_targets(torch.zeros(2, 2), torch.tensor([0, 5])) is None
    assert as_targets(torch.zeros(2, 1), torch.tensor([0.5, 2.0])).shape == (2, 1)
    assert KnownLoss("square", 0.5).of_zero(torch.tensor([[2.0], [0.0]])) == 1.0
    assert math.isnan(KnownLoss("square").of_zero(None))
