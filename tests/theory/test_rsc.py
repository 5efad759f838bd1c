"""R = ‖∇L‖²/L and ‖ḡ‖² against full Jacobians, and the identities that tie them to the tangent kernel."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_normtheory import RSC, rsc_ratio
from lightning_normtheory.model.checks import trainable_parameters
from lightning_normtheory.rsc import add_gradients, gradients_of, rsc_from_sums, zero_gradient

from support.models import MODELS, Graph, Model, freeze
from support.oracles import cross_entropy, dense_rsc, jacobian, mean_square_loss, square_loss

# 1e-10 leaves room for the order of at most a few hundred float64 sums, and for nothing else.
RELATIVE = 1e-10


def sum_square(output, y):
    """The loss of the theory: squares are summed over the outputs and averaged over the samples."""
    return (output - y).square().sum() / len(output)


# Each loss as a user writes it, beside the reference with a derivative by hand.
LOSSES = {
    "sum of squares": (sum_square, square_loss),
    "MSELoss": (nn.MSELoss(), mean_square_loss),
    "cross entropy": (nn.CrossEntropyLoss(), cross_entropy),
}

TABLE = pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())


def targets(case: Model, y: torch.Tensor, loss: str) -> torch.Tensor:
    return case.labels(len(y)) if loss == "cross entropy" else y


def pieces(x, y, sizes):
    return list(zip(x.split(sizes), y.split(sizes)))


# Cross entropy needs one row of scores per sample.
WITH_LOSSES = [
    (name, loss)
    for name, case in MODELS.items()
    for loss in LOSSES
    if loss != "cross entropy" or len(case.outputs) == 1
]


@pytest.mark.parametrize(("name", "loss"), WITH_LOSSES)
def test_against_full_jacobians(name, loss):
    case, (ours, reference) = MODELS[name], LOSSES[loss]
    model = case.make().eval()
    x, y = case.data()
    batches = pieces(x, targets(case, y, loss), [4, 3])
    actual = rsc_ratio(model, ours, batches)
    assert isinstance(actual, RSC)
    assert actual == pytest.approx(dense_rsc(model, reference, batches), rel=RELATIVE)


@pytest.mark.parametrize("sizes", [[7], [4, 3], [3, 3, 1], [1] * 7], ids=str)
@TABLE
def test_the_split_of_the_samples_does_not_matter(case, sizes):
    model = case.make().eval()  # running statistics: samples do not see each other
    x, y = case.data()
    expected = dense_rsc(model, square_loss, [(x, y)])
    assert rsc_ratio(model, sum_square, pieces(x, y, sizes)) == pytest.approx(expected, rel=RELATIVE)


COUPLED = pytest.mark.parametrize("name", [name for name, case in MODELS.items() if case.coupled])


@COUPLED
@pytest.mark.parametrize("sizes", [[7], [4, 3], [5, 2]], ids=str)
def test_batch_statistics_with_fixed_boundaries(name, sizes):
    model = MODELS[name].make().train()
    batches = pieces(*MODELS[name].data(), sizes)
    expected = dense_rsc(MODELS[name].make().train(), square_loss, batches)
    assert rsc_ratio(model, sum_square, batches) == pytest.approx(expected, rel=RELATIVE)


@COUPLED
def test_batch_statistics_are_chosen_by_the_caller(name):
    case = MODELS[name]
    batches = pieces(*case.data(), [7])
    of_the_batch = dense_rsc(case.make().train(), square_loss, batches)
    running = dense_rsc(case.make().eval(), square_loss, batches)
    assert abs(of_the_batch[2] - running[2]) > 1e-3 * running[2]
    for model in (case.make().train(), case.make().eval()):
        as_it_is = of_the_batch if model.training else running
        assert rsc_ratio(model, sum_square, batches, batch_stats=True) == pytest.approx(of_the_batch, rel=RELATIVE)
        assert rsc_ratio(model, sum_square, batches, batch_stats=False) == pytest.approx(running, rel=RELATIVE)
        assert rsc_ratio(model, sum_square, batches, batch_stats=None) == pytest.approx(as_it_is, rel=RELATIVE)


@TABLE
def test_float32_models_come_close(case):
    """Forward and backward pass err by a few hundred units in the last place (6e-8); sums are taken in float64."""
    x, y = case.data(dtype=torch.float32)
    batches = pieces(x, y, [4, 3])
    model = case.make(torch.float32)
    exact = dense_rsc(case.make().eval(), square_loss, [(a.double(), b.double()) for a, b in batches])
    assert rsc_ratio(model.eval(), sum_square, batches) == pytest.approx(exact, rel=1e-4)


def test_batches_are_weighted_by_their_size():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    x = torch.tensor([[1.0], [3.0], [5.0]], dtype=torch.float64)
    y = torch.tensor([[0.0], [1.0], [1.0]], dtype=torch.float64)
    # Residuals 1, 2, 4: L = (1 + 4 + 16)/3, ∇L = (2/3)(1·1 + 2·3 + 4·5), ḡ = (1 + 3 + 5)/3.
    result = rsc_ratio(model, nn.functional.mse_loss, pieces(x, y, [2, 1]))
    assert result == pytest.approx((7.0, 324.0, 324.0 / 7.0, 9.0), rel=1e-14)


def test_batches_may_be_a_generator():
    case = MODELS["mlp"]
    batches = pieces(*case.data(), [4, 3])
    assert rsc_ratio(case.make(), sum_square, iter(batches)) == rsc_ratio(case.make(), sum_square, batches)


def test_dropout_is_off():
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.9), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = MODELS["mlp"].data()
    expected = dense_rsc(nn.Sequential(net[0], net[2], net[3]), square_loss, [(x, y)])
    assert rsc_ratio(net.train(), sum_square, [(x, y)]) == pytest.approx(expected, rel=RELATIVE)


def test_recurrent_dropout_is_off():
    case = MODELS["lstm"]
    model = Graph(
        lambda m, x: m.head(m.lstm(x)[0][:, -1]),
        lstm=nn.LSTM(2, 4, num_layers=2, dropout=0.9, batch_first=True),
        head=nn.Linear(4, 3),
    ).double()
    x, y = case.data()
    expected = dense_rsc(model.eval(), square_loss, [(x, y)])
    assert rsc_ratio(model.train(), sum_square, [(x, y)]) == pytest.approx(expected, rel=RELATIVE)
    assert model.lstm.dropout == 0.9
    assert model.lstm.training


def test_frozen_parameters_are_no_part_of_the_gradient():
    case = MODELS["mlp"]
    model = case.make()
    freeze(model[0])
    result = rsc_ratio(model, sum_square, [case.data()])
    _, jacobians = jacobian(model, case.data()[0])
    assert jacobians.shape[-1] == sum(parameter.numel() for parameter in model[2].parameters())
    assert result == pytest.approx(dense_rsc(model, square_loss, [case.data()]), rel=RELATIVE)


def test_the_loss_scale_is_that_of_the_callers_loss():
    case = MODELS["mlp"]
    theory = rsc_ratio(case.make(), sum_square, [case.data()])
    averaged = rsc_ratio(case.make(), nn.functional.mse_loss, [case.data()])
    assert averaged.loss == pytest.approx(theory.loss / 3, rel=1e-14)
    assert averaged.ratio == pytest.approx(theory.ratio / 3, rel=1e-13)
    assert averaged.mean_predictor_grad_norm_sq == theory.mean_predictor_grad_norm_sq


def test_a_loss_of_shape_one_is_a_number_too():
    case = MODELS["mlp"]
    expected = rsc_ratio(case.make(), sum_square, [case.data()])
    assert rsc_ratio(case.make(), lambda output, y: sum_square(output, y).reshape(1), [case.data()]) == expected


def test_works_inside_no_grad():
    case = MODELS["mlp"]
    expected = rsc_ratio(case.make(), sum_square, [case.data()])
    with torch.no_grad():
        assert rsc_ratio(case.make(), sum_square, [case.data()]) == expected
        assert not torch.is_grad_enabled()


def test_no_trainable_parameter():
    case = MODELS["mlp"]
    with pytest.raises(ValueError, match=r"Expected a trainable parameter.*Sequential has requires_grad=False"):
        rsc_ratio(freeze(case.make()), sum_square, [case.data()])
    with pytest.raises(ValueError, match="Tanh"):
        rsc_ratio(nn.Tanh(), sum_square, [case.data()])


BAD_LOSSES = {
    "detached": (lambda output, y: sum_square(output.detach(), y), "no graph"),
    "per sample": (lambda output, y: (output - y).square().sum(1), r"scalar.*\(7,\)"),
    "per entry": (nn.MSELoss(reduction="none"), r"scalar.*\(7, 3\)"),
}


@pytest.mark.parametrize(("loss", "message"), BAD_LOSSES.values(), ids=BAD_LOSSES.keys())
def test_losses_that_cannot_be_differentiated(loss, message):
    case = MODELS["bn"]
    model = case.make().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        rsc_ratio(model, loss, [case.data()])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("batches", [[], iter(())])
def test_no_batches(batches):
    with pytest.raises(ValueError, match="at least one sample"):
        rsc_ratio(MODELS["mlp"].make(), sum_square, batches)


def test_a_nan_loss_gives_nan():
    case = MODELS["mlp"]
    x, y = case.data()
    y[0, 0] = math.nan
    result = rsc_ratio(case.make(), sum_square, pieces(x, y, [4, 3]))
    assert [math.isnan(value) for value in result] == [True, True, True, False]


def test_an_infinite_loss_gives_no_exception():
    case = MODELS["mlp"]
    x, y = case.data()
    y[0, 0] = math.inf
    result = rsc_ratio(case.make(), sum_square, [(x, y)])
    assert result.loss == math.inf
    assert math.isnan(result.ratio)


def test_a_loss_of_zero_has_no_ratio():
    case = MODELS["mlp"]
    model = case.make()
    x, _ = case.data()
    result = rsc_ratio(model, sum_square, [(x, model(x).detach())])
    assert (result.loss, result.grad_norm_sq) == (0.0, 0.0)
    assert math.isnan(result.ratio)
    assert result.mean_predictor_grad_norm_sq > 0


@pytest.mark.parametrize("batch_stats", [True, False, None])
@TABLE
def test_nothing_in_the_model_changes(case, batch_stats):
    model = case.make().train()
    x, y = case.data()
    sum_square(model(x), y).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradient_values = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    identities = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    flags = [
        (module.training, parameter.requires_grad) for module in model.modules() for parameter in module.parameters()
    ]
    generators = (torch.get_rng_state(), random.getstate(), repr(np.random.get_state()))
    rsc_ratio(model, sum_square, pieces(x, y, [4, 3]), batch_stats=batch_stats)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == identities
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert parameter.grad is None or torch.equal(parameter.grad, gradient_values[name])
    assert [(m.training, p.requires_grad) for m in model.modules() for p in m.parameters()] == flags
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), repr(np.random.get_state())) == generators[1:]


def test_random_losses_repeat_and_leave_the_generators_alone():
    case = MODELS["mlp"]
    model = case.make()

    def noisy(output, y):
        return sum_square(output, y) * (torch.rand(()) + random.random() + np.random.rand())

    state = torch.get_rng_state()
    first = rsc_ratio(model, noisy, [case.data()])
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert rsc_ratio(model, noisy, [case.data()]) == first


def test_trainable_parameters_come_once_and_in_order():
    assert list(trainable_parameters(MODELS["tied"].make())) == ["0.weight", "0.bias", "4.weight", "4.bias"]
    assert list(trainable_parameters(MODELS["frozen"].make())) == ["2.weight", "2.bias"]


def test_sums_of_gradients_are_float64_and_zero_for_what_does_not_enter():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(2, 2)})
    parameters = dict(model.named_parameters())
    total = zero_gradient(parameters)
    gradients = gradients_of(model["used"](torch.ones(2, 4)).sum(), parameters)
    add_gradients(total, gradients, 0.5, [p.numel() for p in parameters.values()])
    assert total.dtype == torch.float64
    assert total.tolist() == [1.0] * 15 + [0.0] * 6


def test_sums_of_batches_and_processes_add_up():
    # n = 4 samples with Σ∇ℓ = (4, 8), k = 2 outputs each with Σ∇f = (8, 0).
    result = rsc_from_sums(4, 2.0, torch.tensor([4.0, 8.0]), 8, torch.tensor([8.0, 0.0]))
    assert result == RSC(0.5, 5.0, 10.0, 1.0)


def kernel(jacobians: torch.Tensor) -> torch.Tensor:
    """K[(i,h),(j,h')] = ⟨∇f_h(x_i), ∇f_h'(x_j)⟩ as (nk, nk)."""
    rows = jacobians.flatten(0, 1)
    return rows @ rows.t()


@TABLE
def test_both_quantities_are_forms_of_the_tangent_kernel(case):
    """‖ḡ‖² = 1ᵀK1/(nk)² and R = (4/n)·rᵀKr/‖r‖² for the loss of the theory."""
    model = case.make().eval()
    x, y = case.data()
    outputs, jacobians = jacobian(model, x)
    K = kernel(jacobians)
    residuals = (outputs - y.reshape(outputs.shape)).flatten()
    n, nk = len(x), len(residuals)
    result = rsc_ratio(model, sum_square, [(x, y)])
    assert result.mean_predictor_grad_norm_sq == pytest.approx(float(K.sum()) / nk**2, rel=RELATIVE)
    expected = 4 / n * float(residuals @ K @ residuals) / float(residuals @ residuals)
    assert result.ratio == pytest.approx(expected, rel=RELATIVE)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["mlp", "wn-hook-dim-0", "wn-parametrized-dim-1", "bn", "conv", "tied", "number-output"]),
    n=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    scale=st.floats(0.01, 100.0),
)
def test_ratio_and_mean_gradient_lie_between_the_eigenvalues(name, n, seed, scale):
    """4λ_min/n ≤ R ≤ 4λ_max/n and ‖ḡ‖² ≥ λ_min/(nk)."""
    case = MODELS[name]
    model = case.make().eval()
    x, y = case.data(n, seed=seed)
    _, jacobians = jacobian(model, x)
    eigenvalues = torch.linalg.eigvalsh(kernel(jacobians))
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    rounding = 1e-12 * largest  # of the eigenvalues and of the Gram matrix, in float64
    result = rsc_ratio(model, sum_square, [(x, scale * y)])
    assert 4 * (smallest - rounding) / n <= result.ratio <= 4 * (largest + rounding) / n
    outputs = len(eigenvalues)
    assert (smallest - rounding) / outputs <= result.mean_predictor_grad_norm_sq <= (largest + rounding) / outputs


@pytest.mark.parametrize("constant", [10.0, 2.5])
def test_a_loss_that_is_not_positive_has_no_ratio(constant):
    """L − 10 used to have R = 49/(2.5 − 10) = −6.5; ‖∇L‖² is that of L."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    batches = [(torch.tensor([[1.0]]), torch.tensor([[0.0]])), (torch.tensor([[3.0]]), torch.tensor([[1.0]]))]
    found = rsc_ratio(model, lambda output, y: nn.functional.mse_loss(output, y) - constant, batches)
    assert (found.loss, found.grad_norm_sq, found.mean_predictor_grad_norm_sq) == (2.5 - constant, 49.0, 4.0)
    assert math.isnan(found.ratio)
