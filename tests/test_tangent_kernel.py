"""The tangent kernel against full Jacobians, on the table of models."""

import warnings

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm

from lightning_normtheory import empirical_ntk, gram, kernel_assembly
from lightning_normtheory.tangent_kernel import tangent_kernel_of_batches

from hessian_cases import without_dropout
from kernel_cases import KERNEL_MODELS, ONE_BY_ONE, STRUCTURED
from models import MODELS, Graph
from oracles import contract, dense_kernel, jacobian

PARTS = ("kernel", "direction", "length", "rest")
# Every model with its running statistics, those with a BatchNorm also with the statistics of the batch.
CASES = [
    (name, train) for name, case in KERNEL_MODELS.items() for train in ((False, True) if case.coupled else (False,))
]


@pytest.fixture(autouse=True)
def _small_models_have_singular_kernels():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The kernel has")
        yield


def assert_equal(found, expected):
    """To 1e-10, relative to the whole kernel."""
    scale = expected["kernel"].norm()
    for part in PARTS:
        assert (getattr(found, part) - expected[part]).norm() <= 1e-10 * scale, part


@pytest.mark.parametrize("outputs", ["full", "trace", "sum"])
@pytest.mark.parametrize(("name", "train"), CASES)
def test_kernel_and_parts_are_those_of_the_jacobian(name, train, outputs):
    case = KERNEL_MODELS[name]
    model, (x, _) = without_dropout(case.make().train(train)), case.data()
    found = empirical_ntk(model, x, outputs=outputs, layers=True)
    assert_equal(found, dense_kernel(model, x, outputs))
    assert torch.equal(found.kernel, found.kernel.t())
    assert torch.equal(found.kernel, found.direction + found.length + found.rest)
    assert found.coupled is train
    for part in PARTS[1:]:
        summed = sum(getattr(layer, part) for layer in found.layers.values())
        torch.testing.assert_close(summed, getattr(found, part), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [*MODELS, *STRUCTURED])
def test_the_structure_is_used(name):
    case = KERNEL_MODELS[name]
    found = empirical_ntk(case.make().eval(), case.data()[0])
    expected = [f"0.parametrizations.bias.original{i}" for i in (0, 1)] if name == "wn-bias" else []
    assert list(found.one_by_one) == expected


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_has_no_structure_is_named(name):
    case = KERNEL_MODELS[name]
    found = empirical_ntk(case.make().eval(), case.data()[0])
    names = {
        "language-model": ["position.weight"],
        "tied-language-model": ["position.weight"],
        "bilinear": ["layer.weight"],
        "embedding-bag": ["0.weight"],
        "wn-embedding": [f"0.parametrizations.weight.original{i}" for i in (0, 1)],
        "spectral-norm": ["0.parametrizations.weight.original"],
        "prelu": ["1.weight"],
        "wn-entangled": ["first.weight_g", "first.weight_v", "second.weight_v"],
    }
    assert list(found.one_by_one) == names[name]


# --- Any portions, any number of samples, any dtype -------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["full", "trace", "sum"])
@pytest.mark.parametrize(
    "name",
    ["mlp", "conv", "wn-hook-dim-0", "wn-grouped-conv-dim-1", "bn", "lstm", "tied-language-model", "prelu", "wn-bias"],
)
@pytest.mark.parametrize("numbers", [1, 150, 600])
def test_the_portions_in_which_it_is_computed_do_not_matter(name, outputs, numbers, monkeypatch):
    case = KERNEL_MODELS[name]
    model, (x, _) = case.make().eval(), case.data(11)
    expected = empirical_ntk(model, x, outputs=outputs)
    # So few bytes that samples and outputs are handled a few at a time, and Gram matrices in small tiles.
    monkeypatch.setattr(kernel_assembly, "_BYTES", 8 * numbers)
    monkeypatch.setattr(gram, "_BYTES", 8 * numbers)
    monkeypatch.setattr(gram, "_ROWS", 3)
    found = empirical_ntk(model, x, outputs=outputs)
    assert_equal(found, {part: getattr(expected, part) for part in PARTS})


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize(
    "name", ["mlp", "conv", "grouped-conv", "transposed-conv-2d", "wn-grouped-conv-dim-0", "wn-sequence", "tied"]
)
@pytest.mark.parametrize("outputs", ["full", "trace"])
def test_both_ways_to_a_gram_matrix(name, outputs, positions, monkeypatch):
    case = KERNEL_MODELS[name]
    model, (x, _) = case.make().eval(), case.data()
    monkeypatch.setattr(gram, "_cost_of_positions", lambda *_: 0.0 if positions else 2.0)
    monkeypatch.setattr(gram, "_cost_of_gradients", lambda *_: 1.0)
    assert_equal(empirical_ntk(model, x, outputs=outputs), dense_kernel(model, x, outputs))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "name", ["mlp", "wn-hook-dim-0", "conv", "attention", "lstm", "sequence-first", "bn", "language-model"]
)
def test_few_samples(name, n):
    case = KERNEL_MODELS[name]
    model, (x, _) = case.make().eval(), case.data(n)
    assert_equal(empirical_ntk(model, x), dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("batches", [[7], [3, 4], [1, 5, 1]])
@pytest.mark.parametrize("name", ["wn-hook-dim-0", "attention", "prelu"])
def test_several_batches_are_one(name, batches):
    case = KERNEL_MODELS[name]
    model, (x, _) = case.make().eval(), case.data()
    found = tangent_kernel_of_batches(model, [(part, len(part), len(part)) for part in x.split(batches)])
    assert_equal(found, dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("outputs", ["full", "trace"])
def test_batches_of_sequences_of_different_lengths(outputs):
    """They cannot be joined, and layers see another number of positions in each."""
    model = KERNEL_MODELS["attention"].make().eval()
    lengths = [torch.randn(n, t, 4, dtype=torch.float64) for n, t in ((3, 2), (2, 5), (1, 3))]
    found = tangent_kernel_of_batches(model, [(x, len(x), len(x)) for x in lengths], outputs=outputs)
    assert not found.one_by_one
    rows = torch.cat([jacobian(model, x)[1] for x in lengths])
    expected = contract(rows, outputs)
    assert (found.kernel - expected).norm() <= 1e-10 * expected.norm()


def test_batch_statistics_are_those_of_each_batch():
    case = KERNEL_MODELS["bn"]
    model, (x, _) = case.make().train(), case.data()
    found = tangent_kernel_of_batches(model, [(x[:4], 4, 4), (x[4:], 3, 2)])
    rows = torch.cat([jacobian(model, x[:4])[1], jacobian(model, x[4:])[1][:2]])
    assert found.coupled
    torch.testing.assert_close(found.kernel, contract(rows, "trace"), rtol=1e-10, atol=1e-12)


def test_dict_inputs():
    model = Graph(lambda m, x: m.layer(x["a"] * x["scale"] + x["b"]), layer=torch.nn.Linear(4, 3).double())
    a, b = torch.randn(2, 5, 4, dtype=torch.float64)
    found = empirical_ntk(model, {"a": a, "b": b, "scale": 2.0})
    torch.testing.assert_close(found.kernel, empirical_ntk(model.layer, 2 * a + b).kernel)


def test_statistics_are_chosen_by_the_caller():
    case = KERNEL_MODELS["bn"]
    x, _ = case.data()
    train, eval_ = case.make().train(), case.make().eval()
    assert torch.equal(empirical_ntk(train, x, batch_stats=False).kernel, empirical_ntk(eval_, x).kernel)
    assert torch.equal(empirical_ntk(eval_, x, batch_stats=True).kernel, empirical_ntk(train, x).kernel)
    assert not torch.equal(empirical_ntk(train, x).kernel, empirical_ntk(eval_, x).kernel)


# --- Precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in KERNEL_MODELS if name != "wn-zero-length"])
def test_single_precision_errs_by_less_than_the_floor(name):
    case = KERNEL_MODELS[name]
    x, _ = case.data(dtype=torch.float32)
    found = empirical_ntk(case.make(torch.float32).eval(), x, dtype=torch.float32)
    exact = empirical_ntk(case.make(torch.float32).eval().double(), x.double() if x.is_floating_point() else x)
    assert found.dtype == torch.float32
    assert found.kernel.dtype == torch.float64
    assert abs(found.lambda_min - exact.lambda_min) <= found.floor
    assert (found.kernel - exact.kernel).norm() <= 1e-5 * exact.kernel.norm()


def near_duplicates(distance: float) -> torch.Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    return torch.cat([x, x[:1] + distance])


def test_it_goes_to_double_precision_near_the_floor_only():
    model = MODELS["wn-hook-dim-0"].make(torch.float32)
    far, near = empirical_ntk(model, near_duplicates(1.0)), empirical_ntk(model, near_duplicates(1e-3))
    assert far.dtype == torch.float32
    assert near.dtype == torch.float64
    exact = empirical_ntk(MODELS["wn-hook-dim-0"].make(torch.float32).double(), near_duplicates(1e-3).double())
    assert near.lambda_min == pytest.approx(exact.lambda_min, rel=1e-6)
    assert near.lambda_min > 100 * near.floor
    wrong = empirical_ntk(model, near_duplicates(1e-3), dtype=torch.float32)
    assert abs(wrong.lambda_min - exact.lambda_min) > 0.01 * exact.lambda_min


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_in_single(dtype):
    model = MODELS["mlp"].make(dtype)
    x, _ = MODELS["mlp"].data(dtype=dtype)
    assert empirical_ntk(model, x, outputs="sum").dtype == torch.float32
    assert next(model.parameters()).dtype == dtype


def test_a_model_that_cannot_run_in_double_precision_keeps_its_floor():
    layer = torch.nn.Linear(4, 3)
    constant = torch.randn(4, 4)
    model = Graph(lambda m, x: m.layer(x @ constant), layer=layer)
    with pytest.warns(UserWarning, match="could not be repeated in float64"):
        found = empirical_ntk(model, near_duplicates(1e-4)[[0, 1, 6]])
    assert found.dtype == torch.float32


def test_a_parameter_in_an_unknown_place_is_not_overlooked():
    """It would not be lent in float64, and its part of the kernel would be missing."""

    class Hidden(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(0)))
            self.others = [self.weight]
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x * self.others[0])

    with pytest.raises(RuntimeError, match="keeps outside of its modules"):
        empirical_ntk(Hidden(), near_duplicates(1.0), dtype=torch.float64)
    with pytest.warns(UserWarning, match="could not be repeated in float64"):
        found = empirical_ntk(Hidden(), near_duplicates(1e-4)[[0, 1, 6]])
    assert found.dtype == torch.float32


# --- Spectrum ---------------------------------------------------------------------------------------------------------


def test_the_spectrum_is_that_of_the_kernel():
    found = empirical_ntk(MODELS["wn-hook-dim-0"].make(), MODELS["wn-hook-dim-0"].data()[0])
    values = torch.linalg.eigvalsh(found.kernel)
    assert found.lambda_min == pytest.approx(float(values[0]), rel=1e-12)
    assert found.lambda_max == pytest.approx(float(values[-1]), rel=1e-12)
    assert found.condition_number == pytest.approx(float(values[-1] / values[0]), rel=1e-9)
    assert found.effective_rank == pytest.approx(float(values.sum() ** 2 / values.square().sum()), rel=1e-12)
    assert 0 < found.floor < 1e-13 * found.lambda_max


def test_more_rows_than_parameters_are_said_to_be_singular():
    model, x = torch.nn.Linear(2, 3).double(), torch.randn(4, 2, dtype=torch.float64)
    with pytest.warns(UserWarning, match="12 rows, but its rank is at most 9"):
        found = empirical_ntk(model, x, outputs="full")
    assert abs(found.lambda_min) <= found.floor
    assert found.condition_number == float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert empirical_ntk(model, x).deficiency == ""  # k p gradients make up the average over k outputs


def test_the_direction_across_a_unit_only():
    """p counts g and v, but no gradient of v has a component along v."""
    layer = parametrized_weight_norm(torch.nn.Linear(3, 2, bias=False)).double()
    x = torch.randn(7, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="rank is at most 6"):
        found = empirical_ntk(layer, x, outputs="full")
    assert found.parameters == 8
    assert torch.linalg.matrix_rank(found.kernel) == 6


def test_samples_that_occur_twice_are_said_to_be_singular():
    case = MODELS["mlp"]
    x, _ = case.data(5)
    with pytest.warns(UserWarning, match="5 rows, but its rank is at most 4"):
        found = empirical_ntk(case.make(), x[[0, 1, 2, 3, 1]])
    assert abs(found.lambda_min) <= found.floor
    assert found.deficiency


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "x", "error", "message"),
    [
        (torch.nn.Linear(4, 3), torch.ones(0, 4), ValueError, "at least one sample"),
        (torch.nn.Linear(4, 3), 3.0, TypeError, "samples in front"),
        (Graph(lambda m, x: m.a(x).sum(), a=torch.nn.Linear(4, 3)), torch.ones(2, 4), TypeError, "samples in front"),
        (Graph(lambda m, x: {"y": m.a(x)}, a=torch.nn.Linear(4, 3)), torch.ones(2, 4), TypeError, "forward"),
        (
            Graph(lambda m, x: m.a(x).flatten(), a=torch.nn.Linear(4, 3)),
            torch.ones(2, 4),
            ValueError,
            "row for each of 2 samples, but got shape \\(6,\\)",
        ),
        (Graph(lambda m, x: m.a(x).argmax(1), a=torch.nn.Linear(4, 3)), torch.ones(2, 4), TypeError, "floating-point"),
        (Graph(lambda m, x: m.a(x).detach(), a=torch.nn.Linear(4, 3)), torch.ones(2, 4), ValueError, "no graph"),
        (Graph(lambda m, x: m.a(x)[:, :0], a=torch.nn.Linear(4, 3)), torch.ones(2, 4), ValueError, "got shape"),
        (torch.nn.Linear(4, 3).requires_grad_(False), torch.ones(2, 4), ValueError, "trainable"),
        (torch.nn.LazyLinear(3), torch.ones(2, 4), ValueError, "lazy"),
    ],
)
def test_bad_input_is_named(model, x, error, message):
    with pytest.raises(error, match=message):
        empirical_ntk(model, x)


def test_bad_options_are_named():
    model, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    with pytest.raises(ValueError, match="'full', 'trace' or 'sum', but got 'all'"):
        empirical_ntk(model, x, outputs="all")
    with pytest.raises(ValueError, match=r"torch.float64 or None, but got torch.float16"):
        empirical_ntk(model, x, dtype=torch.float16)
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        empirical_ntk(model, x)


def test_dropout_is_off():
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data()
    expected = empirical_ntk(model.eval(), x)
    assert torch.equal(empirical_ntk(model.train(), x).kernel, expected.kernel)
    assert model[1].training


def test_samples_that_see_each_other():
    """The derivative goes through the batch, and a warning says so."""
    model = Graph(
        lambda m, x: m.b(torch.tanh(m.a(x) - m.a(x).mean(0))), a=torch.nn.Linear(4, 5), b=torch.nn.Linear(5, 3)
    ).double()
    x, _ = MODELS["mlp"].data()
    with pytest.warns(UserWarning, match="samples see each other"):
        found = empirical_ntk(model, x)
    assert found.coupled
    assert_equal(found, dense_kernel(model, x, "trace"))


def test_samples_in_another_order_inside():
    """The structure does not hold, and is not used."""
    model = Graph(lambda m, x: m.a(x.flip(0)).tanh().flip(0), a=torch.nn.Linear(4, 3)).double()
    x, _ = MODELS["mlp"].data()
    found = empirical_ntk(model, x)
    assert not found.coupled
    assert_equal(found, dense_kernel(model, x, "trace"))


def test_a_graph_that_depends_on_the_samples():
    """The first samples take another way than the batch."""
    model = Graph(
        lambda m, x: m.b(m.a(x).tanh() if len(x) <= 3 else m.a(x).tanh() * 1.0 + m.a.bias * 0.0),
        a=torch.nn.Linear(4, 5),
        b=torch.nn.Linear(5, 3),
    ).double()
    x, _ = MODELS["mlp"].data()
    found = empirical_ntk(model, x)
    assert_equal(found, dense_kernel(model, x, "trace"))


def test_values_that_are_not_finite_are_reported_as_such():
    model = MODELS["mlp"].make()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    found = empirical_ntk(model, MODELS["mlp"].data()[0])
    assert found.lambda_min != found.lambda_min
    assert found.effective_rank != found.effective_rank


# --- Nothing is left behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("name", ["wn-hook-dim-0", "wn-parametrized-dim-0", "bn", "lstm", "checkpointed"])
def test_the_model_is_as_it_was(name, dtype):
    case = KERNEL_MODELS[name]
    model, (x, y) = case.make(torch.float32).train(), case.data(dtype=torch.float32)
    waiting = (model(x) - y).square().mean()  # a graph of the user's, for which the backward pass comes later
    before = {key: (value.clone(), value.data_ptr()) for key, value in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    exchanged = []  # as a strategy for several processes hooks itself in
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


def test_no_weight_gradients_are_computed(monkeypatch):
    """A backward pass asks for gradients at the outputs of layers, and for parameters on a few samples only."""
    asked = []
    grad = torch.autograd.grad

    def watch(outputs, inputs, *arguments, **options):
        asked.append((len(outputs), [isinstance(each, torch.Tensor) for each in inputs]))
        return grad(outputs, inputs, *arguments, **options)

    monkeypatch.setattr(torch.autograd, "grad", watch)
    case = MODELS["wn-hook-dim-0"]
    empirical_ntk(case.make(), case.data(20)[0])
    assert [samples for samples, tensors in asked if any(tensors)] == [3]
    assert sum(samples == 20 for samples, _ in asked) == 3  # one for each output
