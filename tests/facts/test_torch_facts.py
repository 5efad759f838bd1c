"""Traps of torch that the library works around. A failure here says that torch has changed, and what can go."""

import copy
import pickle

import pytest
import torch
from torch import nn

from support.models import WEIGHT_NORM_FORMS, Cube, direction, hook_weight_norm, length, parametrized_weight_norm
from support.oracles import difference_hessian

FORMS = pytest.mark.parametrize("form", WEIGHT_NORM_FORMS)


def test_functional_call_on_a_parametrized_weight_overwrites_the_direction():
    layer = parametrized_weight_norm(nn.Linear(3, 2))
    direction(layer).data.mul_(3.0)  # as after some training: ‖v‖ is no longer g
    effective, v = layer.weight.detach().clone(), direction(layer).detach().clone()
    torch.func.functional_call(layer, {"weight": torch.ones(2, 3)}, torch.ones(1, 3))
    # "Restoring" the weight puts it where the direction was: the effective weight looks right, so nobody notices.
    torch.testing.assert_close(layer.weight, effective)
    assert not torch.allclose(direction(layer), v)
    torch.testing.assert_close(direction(layer), effective)


def test_functional_call_on_the_originals_leaves_the_direction_alone():
    layer = parametrized_weight_norm(nn.Linear(3, 2))
    direction(layer).data.mul_(3.0)
    v = direction(layer)
    before = v.detach().clone()
    torch.func.functional_call(layer, {"parametrizations.weight.original1": torch.ones(2, 3)}, torch.ones(1, 3))
    assert direction(layer) is v
    assert torch.equal(v, before)


def test_deepcopy_fails_on_the_hook_form_only():
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(hook_weight_norm(nn.Linear(3, 2)))
    layer = parametrized_weight_norm(nn.Linear(3, 2))
    assert torch.equal(direction(copy.deepcopy(layer)), direction(layer))


def test_pickle_fails_on_the_parametrized_form_only():
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(parametrized_weight_norm(nn.Linear(3, 2)))
    layer = hook_weight_norm(nn.Linear(3, 2))
    layer.weight = layer.weight.detach()  # the hook's own result is no leaf, which pickles; its graph does not
    assert torch.equal(pickle.loads(pickle.dumps(layer)).weight_v, layer.weight_v)


@FORMS
@pytest.mark.parametrize("dim", [None, -1])
def test_dim_minus_one_means_all_axes_and_gives_one_length(form, dim):
    layer = WEIGHT_NORM_FORMS[form](nn.Linear(3, 2), dim=dim)
    assert length(layer).shape == ()
    torch.testing.assert_close(length(layer), direction(layer).norm())


@FORMS
@pytest.mark.parametrize(("dim", "shape"), [(0, (4, 1, 1)), (1, (1, 3, 1)), (2, (1, 1, 5))])
def test_length_has_one_entry_per_index_of_dim(form, dim, shape):
    layer = WEIGHT_NORM_FORMS[form](nn.Conv1d(3, 4, 5), dim=dim)
    assert length(layer).shape == shape


@FORMS
def test_a_zero_direction_gives_nan(form):
    layer = WEIGHT_NORM_FORMS[form](nn.Linear(3, 2))
    direction(layer).data.zero_()
    assert layer(torch.ones(1, 3)).isnan().all()


@FORMS
def test_first_derivative_of_weight_norm_is_exact(form):
    torch.manual_seed(0)
    layer = WEIGHT_NORM_FORMS[form](nn.Linear(3, 2, bias=False).double())
    x = torch.randn(5, 3, dtype=torch.float64)
    g, v = length(layer), direction(layer)
    (actual,) = torch.autograd.grad(layer(x).tanh().sum(), v)
    (expected,) = torch.autograd.grad((x @ (g * v / v.norm(dim=1, keepdim=True)).t()).tanh().sum(), v)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-14)


@FORMS
def test_second_derivative_of_weight_norm_is_wrong(form):
    """Why `EffectiveWeights` exists. The day this fails, torch has mended it, and plain autograd will do."""
    torch.manual_seed(0)
    normalize = WEIGHT_NORM_FORMS[form]
    model = nn.Sequential(normalize(nn.Linear(5, 7)), nn.Tanh(), normalize(nn.Linear(7, 1))).double()
    x, y = torch.randn(6, 5, dtype=torch.float64), 3 * torch.randn(6, 1, dtype=torch.float64)
    loss = nn.functional.mse_loss
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss(model(x), y), parameters, create_graph=True)
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for g in gradients for entry in g.flatten()]
    plain = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    exact = difference_hessian(model, loss, [(x, y)])
    assert (exact - exact.t()).norm() < 1e-9 * exact.norm()
    assert (plain - plain.t()).norm() > 0.01 * exact.norm()
    assert (plain - exact).norm() > 0.01 * exact.norm()
    top = torch.linalg.eigvalsh((plain + plain.t()) / 2)[-1], torch.linalg.eigvalsh(exact)[-1]
    assert abs(top[0] - top[1]) > 1e-3 * top[1]


@FORMS
def test_weight_norm_has_no_forward_mode_derivative(form):
    layer = WEIGHT_NORM_FORMS[form](nn.Linear(3, 2))
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def output(theta):
        return torch.func.functional_call(layer, theta, (torch.ones(1, 3),))

    with pytest.raises(NotImplementedError, match="weight_norm"):
        torch.func.jvp(output, (parameters,), (parameters,))


def test_compiled_modules_have_no_second_derivative():
    model = torch.compile(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), backend="aot_eager")
    (gradient, *_) = torch.autograd.grad(
        model(torch.ones(1, 3)).square().sum(), list(model.parameters()), create_graph=True
    )
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(gradient.sum(), list(model.parameters()), allow_unused=True)


def test_forward_over_forward_through_batch_statistics_is_wrong_and_forward_over_reverse_is_right():
    """Why second derivatives are taken of gradients, never of forward-mode derivatives."""
    x = torch.tensor([[0.3], [1.2], [-0.7], [0.1]], dtype=torch.float64)
    batch_norm = torch.nn.functional.batch_norm

    def f(t):
        return batch_norm(x + t * x**2, None, None, training=True).pow(3).sum()

    t, one = torch.tensor(0.4, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    h = 1e-4
    exact = (f(t + h) - 2 * f(t) + f(t - h)) / h**2
    reverse = torch.func.jvp(torch.func.grad(f), (t,), (one,))[1]
    forward = torch.func.jvp(lambda s: torch.func.jvp(f, (s,), (one,))[1], (t,), (one,))[1]
    assert abs(reverse - exact) < 1e-5 * abs(exact)
    assert abs(forward - exact) > 1e-2 * abs(exact)


def test_fused_attention_has_no_second_derivative():
    """Why attention is computed step by step while curvature is measured."""
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    output = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    (gradient,) = torch.autograd.grad(output.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(gradient.sum(), q)


def test_once_differentiable_keeps_silent_when_the_incoming_gradient_is_constant():
    """Why such functions are looked for, instead of waiting for autograd to complain."""
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
    assert not gradient.requires_grad  # as if x³ had no curvature


def test_momentum_zero_still_counts_batches():
    layer = nn.BatchNorm1d(2, momentum=0.0)
    layer(torch.randn(4, 2))
    assert layer.running_mean.tolist() == [0.0, 0.0]
    assert int(layer.num_batches_tracked) == 1


def test_running_variance_is_unbiased_and_the_normalizing_one_is_not():
    layer = nn.BatchNorm1d(1, momentum=1.0, eps=1e-20, affine=False)
    output = layer(torch.tensor([[1.0], [5.0]]))
    assert float(layer.running_var) == 8.0  # (4 + 4)/(2 − 1)
    assert output.flatten().tolist() == [-1.0, 1.0]  # (x − 3)/√4, not /√8


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions of torch accept zero")
def test_training_refuses_eps_zero():
    # Why the oracle of scale invariance makes do with a tiny one.
    with pytest.raises(ValueError, match="eps"):
        nn.BatchNorm1d(1, eps=0.0)(torch.tensor([[1.0], [5.0]]))


def test_hook_form_replaces_the_weight_in_every_forward_pass():
    layer = hook_weight_norm(nn.Linear(3, 2))
    before = layer.weight
    layer(torch.ones(1, 3))
    assert layer.weight is not before
    assert "weight" not in dict(layer.named_parameters())


def test_setting_requires_grad_leaves_the_gradient_in_place():
    # An optimizer still applies it: a diagnostic that clears .grad of a frozen parameter changes the training.
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    layer.requires_grad_(False)
    before = layer.weight.detach().clone()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert not torch.equal(layer.weight, before)


def test_data_of_another_dtype_makes_a_parameter_forget_its_gradient_hooks():
    """Why a model is never converted in place while it is measured: DistributedDataParallel would stop working."""
    p = nn.Parameter(torch.ones(1))
    seen = []
    accumulator = p.expand_as(p).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: seen.append(1))
    (2 * p).sum().backward()
    assert seen == [1]
    original = p.data
    p.data = p.data.double()
    p.data = original
    (2 * p).sum().backward()
    assert seen == [1]  # not a second time
