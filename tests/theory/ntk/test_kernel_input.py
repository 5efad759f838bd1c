"""Valid and invalid inputs of the tangent kernel; the model and its input stay unchanged."""

from collections import UserDict

import pytest
import torch
from torch import nn

from lightning_normtheory import empirical_ntk
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.ntk.empirical import tangent_kernel_of_batches

from support.models import MODELS, Graph
from support.oracles import dense_kernel
from support.theory.kernel_cases import KERNEL_MODELS, SINGULAR, assert_equal

pytestmark = SINGULAR


@pytest.mark.parametrize(
    ("model", "x", "error", "message"),
    [
        (nn.Linear(4, 3), torch.ones(0, 4), ValueError, "at least one sample"),
        (nn.Linear(4, 3), 3.0, TypeError, "samples in front"),
        (Graph(lambda m, x: m.a(x).sum(), a=nn.Linear(4, 3)), torch.ones(2, 4), TypeError, "samples in front"),
        (Graph(lambda m, x: {"y": m.a(x)}, a=nn.Linear(4, 3)), torch.ones(2, 4), TypeError, "forward"),
        (
            Graph(lambda m, x: m.a(x).flatten(), a=nn.Linear(4, 3)),
            torch.ones(2, 4),
            ValueError,
            "row for each of 2 samples, but got shape \\(6,\\)",
        ),
        (Graph(lambda m, x: m.a(x).argmax(1), a=nn.Linear(4, 3)), torch.ones(2, 4), TypeError, "floating-point"),
        (Graph(lambda m, x: m.a(x).detach(), a=nn.Linear(4, 3)), torch.ones(2, 4), ValueError, "no graph"),
        (Graph(lambda m, x: m.a(x)[:, :0], a=nn.Linear(4, 3)), torch.ones(2, 4), ValueError, "got shape"),
        (nn.Linear(4, 3).requires_grad_(False), torch.ones(2, 4), ValueError, "trainable"),
    ],
)
def test_bad_input_is_named(model, x, error, message):
    with pytest.raises(error, match=message):
        empirical_ntk(model, x)


def test_a_lazy_model_is_named():
    with pytest.raises(ValueError, match="still lazy"):
        empirical_ntk(nn.LazyLinear(3), torch.ones(2, 4))


def test_bad_options_are_named():
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    with pytest.raises(ValueError, match="'full', 'trace' or 'sum', but got 'all'"):
        empirical_ntk(model, x, outputs="all")
    with pytest.raises(ValueError, match=r"torch.float64 or None, but got torch.float16"):
        empirical_ntk(model, x, dtype=torch.float16)
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        empirical_ntk(model, x)


def test_dict_inputs():
    model = Graph(lambda m, x: m.layer(x["a"] * x["scale"] + x["b"]), layer=nn.Linear(4, 3).double())
    a, b = torch.randn(2, 5, 4, dtype=torch.float64)
    found = empirical_ntk(model, {"a": a, "b": b, "scale": 2.0})
    torch.testing.assert_close(found.kernel, empirical_ntk(model.layer, 2 * a + b).kernel)


def test_a_mapping_that_is_no_dict():
    x, _ = MODELS["mlp"].data(9)
    model = Graph(lambda m, x: m.a(x["ids"], x["ids"]), a=nn.Bilinear(4, 4, 2)).double()
    found = tangent_kernel_of_batches(model, [SampleBatch(UserDict(ids=x), 9, 9)])
    expected = dense_kernel(Graph(lambda m, x: m.a(x, x), a=model.a), x, "trace")
    assert_equal(found, expected)


@pytest.mark.parametrize("asked", [3, 4, 5])
def test_a_constant_beside_the_samples(asked):
    """Also if it is as long as the number of samples asked for."""
    x, _ = MODELS["mlp"].data(14)
    constant = torch.arange(4).double()
    model = Graph(lambda m, x: m.a(x["x"] * x["constant"]).tanh(), a=nn.Linear(4, 3)).double()
    batches = [SampleBatch({"x": part, "constant": constant}, 7, asked) for part in x.split(7)]
    found = tangent_kernel_of_batches(model, batches)
    expected = dense_kernel(
        nn.Sequential(model.a, nn.Tanh()), torch.cat([part[:asked] for part in x.split(7)]) * constant, "trace"
    )
    assert_equal(found, expected)


def test_dropout_is_off():
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data()
    expected = empirical_ntk(model.eval(), x)
    assert torch.equal(empirical_ntk(model.train(), x).kernel, expected.kernel)
    assert model[1].training


def test_autocast_is_off():
    model, x = MODELS["mlp"].make(torch.float32), MODELS["mlp"].data(dtype=torch.float32)[0]
    expected = empirical_ntk(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(empirical_ntk(model, x).kernel, expected.kernel)


def test_a_forward_pass_that_writes_into_its_input():
    model = Graph(lambda m, x: m.a(x.sub_(0.5).div_(0.25)).tanh(), a=nn.Linear(4, 3)).double()
    x, _ = MODELS["mlp"].data(12)
    before = x.clone()
    found = empirical_ntk(model, x)
    assert torch.equal(x, before)
    assert not found.coupled
    assert_equal(found, dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("n", [1, 5])
def test_a_model_that_squeezes(n):
    bilinear = nn.Bilinear(4, 4, 1)
    model = Graph(lambda m, x: m.a(x, x).squeeze(), a=bilinear).double()
    x, _ = MODELS["mlp"].data(n)
    found = empirical_ntk(model, x)
    plain = Graph(lambda m, x: m.a(x, x), a=bilinear)
    assert_equal(found, dense_kernel(plain, x, "trace"))


def test_complex_values_inside():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x):
            return torch.fft.ifft(torch.fft.fft(self.layer(x).tanh()) * self.gain).real

    model, (x, _) = Spectral(), MODELS["mlp"].data()
    found = empirical_ntk(model, x)
    assert found.one_by_one == ("gain",)
    assert_equal(found, dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("name", ["wn-hook-dim-0", "wn-parametrized-dim-0", "bn", "lstm", "checkpointed"])
def test_the_model_is_as_it_was(name, dtype):
    case = KERNEL_MODELS[name]
    model, (x, y) = case.make(torch.float32).train(), case.data(dtype=torch.float32)
    waiting = (model(x) - y).square().mean()  # a graph of the user whose backward pass comes later
    before = {key: (value.clone(), value.data_ptr()) for key, value in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    exchanged = []  # like the hooks of a strategy for several processes
    accumulators = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for accumulator in accumulators:
        accumulator.register_hook(lambda *_: exchanged.append(1))
    empirical_ntk(model, x, batch_stats=False, dtype=dtype)
    for key, value in model.state_dict(keep_vars=True).items():
        assert torch.equal(value, before[key][0])
        assert (value.data_ptr(), value.dtype) == (before[key][1], before[key][0].dtype)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    waiting.backward()
    (model(x) - y).square().mean().backward()
    assert len(exchanged) == 2 * len(accumulators)
    assert all(module.training for module in model.modules())
