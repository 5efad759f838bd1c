"""‖∇²f(θ; x_i)‖₂ against dense Hessians of single outputs."""

import warnings

import pytest
import torch
from torch import nn

import lightning_normtheory.hessian.predictor as module
from lightning_normtheory import predictor_hessian_norm
from lightning_normtheory.hessian.predictor import predictor_hessian

from support.models import MODELS, Graph, freeze
from support.oracles import difference_hessian

# Seconds each, and of kinds that other rows have.
SLOW = ("attention", "wn-lstm", "wn-conv-hook-dim-2", "wn-conv-hook-dim-None", "wn-conv-parametrized-dim-3")
TABLE = pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in MODELS])
N = 2


def reference(model, x, *, coupled=False) -> torch.Tensor:
    """(n,), from differences of exact gradients of each output of each sample."""
    norms = torch.zeros(len(x), dtype=torch.float64)
    k = model(x)[0].numel()
    for i in range(len(x)):
        for h in range(k):
            if coupled:
                hessian = difference_hessian(model, lambda out, _, i=i, h=h: out.reshape(len(x), k)[i, h], [(x, x)])
            else:
                hessian = difference_hessian(model, lambda out, _, h=h: out.reshape(-1)[h], [(x[i : i + 1], x)])
            norms[i] = torch.maximum(norms[i], torch.linalg.eigvalsh(hessian).abs().max())
    return norms


@TABLE
def test_table(name):
    case = MODELS[name]
    model, x = case.make().eval(), case.data(N)[0]
    norms = predictor_hessian_norm(model, x, tol=1e-4)
    torch.testing.assert_close(norms, reference(model, x), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["bn", pytest.param("bn-residual", marks=pytest.mark.slow)])
def test_batch_statistics_couple_the_samples(name):
    case = MODELS[name]
    model, x = case.make().train(), case.data(N)[0]
    expected = reference(case.make().train(), x, coupled=True)
    torch.testing.assert_close(predictor_hessian_norm(model, x, tol=1e-4), expected, rtol=1e-6, atol=0)
    running = predictor_hessian_norm(model, x, tol=1e-4, batch_stats=False)
    torch.testing.assert_close(running, reference(case.make().eval(), x), rtol=1e-6, atol=0)
    assert (running - expected).abs().max() > 1e-2


def test_samples_that_see_each_other_in_another_way():
    model = Graph(lambda m, x: m.layer(x - x.mean(0)).tanh(), layer=nn.Linear(4, 2)).double()
    x = MODELS["mlp"].data(N)[0]
    torch.testing.assert_close(
        predictor_hessian_norm(model, x, tol=1e-4), reference(model, x, coupled=True), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("pairs_at_once", [1, 2, 5])
def test_chunks_do_not_matter(monkeypatch, pairs_at_once):
    case = MODELS["wn-hook-dim-0"]
    model, x = case.make(), case.data(N)[0]
    expected = predictor_hessian(model, x)
    size = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(module, "_BYTES", pairs_at_once * (module._BASIS + module._BETWEEN) * size * 8)
    actual = predictor_hessian(model, x)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=1e-12, atol=0)
    assert actual.hvps == expected.hvps


def test_one_by_one_gives_the_same(monkeypatch):
    case = MODELS["wn-parametrized-dim-1"]
    model, x = case.make(), case.data(N)[0]
    expected = predictor_hessian(model, x)

    def no_batching_rule(*args):
        raise RuntimeError("Batching rule not implemented")

    monkeypatch.setattr(module, "vmap", no_batching_rule)
    actual = predictor_hessian(model, x)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=1e-9, atol=0)
    assert actual.hvps == expected.hvps


@pytest.mark.parametrize("training", [False, True])
def test_one_output_of_each_sample(training):
    """Batch statistics couple the samples, which are then measured one by one."""
    case = MODELS["bn"]
    model, x = case.make().train(training), case.data(N)[0]
    every = predictor_hessian(model, x).by_output
    some = predictor_hessian(model, x, one_output=True)
    chosen = nn.functional.one_hot(torch.arange(N) % every.shape[1], every.shape[1])
    assert every.shape[1] > 1
    torch.testing.assert_close(some.by_output, every * chosen, rtol=1e-12, atol=0)
    torch.testing.assert_close(some.norms, (every * chosen).amax(1), rtol=1e-12, atol=0)


def test_inputs_of_other_forms():
    model = Graph(lambda m, batch: m.layer(batch["a"] * batch["b"]).tanh(), layer=nn.Linear(4, 2)).double()
    a, b = MODELS["mlp"].data(N)[0], MODELS["mlp"].data(N, seed=1)[0]
    plain = Graph(lambda m, x: m.layer(x).tanh(), layer=model.layer)
    torch.testing.assert_close(predictor_hessian_norm(model, {"a": a, "b": b}), predictor_hessian_norm(plain, a * b))


def test_a_predictor_that_is_linear_in_its_parameters_has_no_curvature():
    model = nn.Sequential(freeze(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))
    assert predictor_hessian_norm(model, torch.ones(2, 4)).tolist() == [0.0, 0.0]


def test_float32():
    case = MODELS["conv"]
    exact = predictor_hessian_norm(case.make(), case.data(N)[0], tol=1e-4)
    actual = predictor_hessian_norm(case.make(torch.float32), case.data(N, dtype=torch.float32)[0], tol=1e-3)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), exact, rtol=1e-4, atol=0)


def random_network(seed):
    """A small network and two samples; ∇²f of a linear one has the eigenvalues ±λ, that of the others nearly so."""
    torch.manual_seed(seed)
    inputs, width, outputs = (int(torch.randint(low, high, ())) for low, high in ((2, 6), (3, 9), (1, 3)))
    activation = (nn.Identity, nn.Tanh, nn.Softplus)[seed % 3]
    middle = [nn.Linear(width, width), activation()] if seed % 2 else []
    model = nn.Sequential(nn.Linear(inputs, width), activation(), *middle, nn.Linear(width, outputs))
    return model.double(), torch.randn(2, inputs, dtype=torch.float64)


def dense_norms(model, x) -> torch.Tensor:
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()))
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    sizes = [shape.numel() for shape in shapes]

    def output(theta, sample):
        parts = {name: part.view(shape) for name, part, shape in zip(names, theta.split(sizes), shapes)}
        return torch.func.functional_call(model, parts, (sample[None],))[0]

    hessians = torch.stack([torch.func.hessian(output)(theta, sample) for sample in x])
    return torch.linalg.eigvalsh(hessians).abs().amax((1, 2))


def shortfalls(seeds, **options):
    """By how much the norms are too small, relative to them."""
    found = []
    for seed in seeds:
        model, x = random_network(seed)
        dense = dense_norms(model, x)
        found.append((dense - predictor_hessian(model, x, **options).norms) / dense)
    return torch.cat(found)


def test_the_norm_is_never_too_large_and_seldom_much_too_small():
    errors = shortfalls(range(9))
    assert errors.min() >= -1e-12  # a Ritz value is a lower bound
    assert errors.max() <= 1e-2


def test_a_small_residual_can_belong_to_another_eigenvalue():
    """Why the docstring promises no more: two of the few networks where the norm is off by more than the residual."""
    for seed in (79, 99):
        model, x = random_network(seed)
        result, dense = predictor_hessian(model, x), dense_norms(model, x)
        assert ((dense - result.norms) / dense).max() > 2e-2
        assert (result.residuals <= 1e-2 * result.norms).all()
    assert shortfalls((79, 99), tol=1e-3).max() <= 1e-4


@pytest.mark.slow
def test_the_errors_that_the_docstring_promises():
    errors = shortfalls(range(150))
    assert errors.min() >= -1e-12
    assert (errors > 1e-2).double().mean() <= 0.025
    assert (errors > 1e-3).double().mean() <= 0.1
    assert (shortfalls(range(150), tol=1e-3) > 1e-4).double().mean() <= 0.03


def test_too_small_a_budget_is_admitted():
    case = MODELS["mlp"]
    with pytest.warns(UserWarning, match="2 of 2 norms did not reach tol=0.0001 within 2 products.*lower bounds"):
        norms = predictor_hessian_norm(case.make(), case.data(N)[0], tol=1e-4, max_hvps=2)
    assert (norms < reference(case.make(), case.data(N)[0])).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        predictor_hessian_norm(case.make(), case.data(N)[0])


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        predictor_hessian_norm(MODELS["mlp"].make(), torch.zeros(0, 4).double())
    with pytest.raises(ValueError, match="trainable parameter"):
        predictor_hessian_norm(freeze(MODELS["mlp"].make()), torch.zeros(1, 4))


@pytest.mark.parametrize("name", ["bn", "wn-hook-dim-0", "wn-parametrized-dim-0", "lstm"])
def test_nothing_is_changed(name):
    case = MODELS[name]
    model, x = case.make(torch.float32).train(), case.data(N, dtype=torch.float32)[0]
    before = {key: (id(value), value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    weights = {key: id(getattr(m, "weight", None)) for key, m in model.named_modules() if "weight" in vars(m)}
    state = torch.get_rng_state()
    predictor_hessian_norm(model, x, batch_stats=False)
    for key, value in model.state_dict(keep_vars=True).items():
        assert (id(value), torch.equal(value, before[key][1])) == (before[key][0], True)
    assert {key: id(m.weight) for key, m in model.named_modules() if "weight" in vars(m)} == weights
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in model.modules())
