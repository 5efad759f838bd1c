"""The tangent kernel against full Jacobians, on the table of models."""

import warnings
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm

from lightning_normtheory import empirical_ntk, gram, kernel_assembly
from lightning_normtheory.tangent_kernel import tangent_kernel_of_batches

from hessian_cases import without_dropout
from kernel_cases import KERNEL_MODELS, ONE_BY_ONE, STRUCTURED
from models import MODELS, Graph, hook_weight_norm
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
    model = Graph(lambda m, x: m.layer(x["a"] * x["scale"] + x["b"]), layer=nn.Linear(4, 3).double())
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
    layer = nn.Linear(4, 3)
    constant = torch.randn(4, 4)
    model = Graph(lambda m, x: m.layer(x @ constant), layer=layer)
    with pytest.warns(UserWarning, match="could not be repeated in float64"):
        found = empirical_ntk(model, near_duplicates(1e-4)[[0, 1, 6]])
    assert found.dtype == torch.float32


def test_a_parameter_in_an_unknown_place_is_not_overlooked():
    """It would not be lent in float64, and its part of the kernel would be missing."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(0)))
            self.others = [self.weight]
            self.layer = nn.Linear(4, 3)

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
    model, x = nn.Linear(2, 3).double(), torch.randn(4, 2, dtype=torch.float64)
    with pytest.warns(UserWarning, match="12 rows, but its rank is at most 9"):
        found = empirical_ntk(model, x, outputs="full")
    assert abs(found.lambda_min) <= found.floor
    assert found.condition_number == float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert empirical_ntk(model, x).deficiency == ""  # k p gradients make up the average over k outputs


def test_the_direction_across_a_unit_only():
    """p counts g and v, but no gradient of v has a component along v."""
    layer = parametrized_weight_norm(nn.Linear(3, 2, bias=False)).double()
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


def test_dropout_is_off():
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data()
    expected = empirical_ntk(model.eval(), x)
    assert torch.equal(empirical_ntk(model.train(), x).kernel, expected.kernel)
    assert model[1].training


def first_kernel(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return empirical_ntk(model.double(), x)


def graph_of_samples(edges):
    """A network that adds to some samples what another one has."""

    def connect(m, x):
        h = m.a(x).tanh()
        others = [h[[j for k, j in edges if k == i]].sum(0) for i in range(len(x))]
        return m.b((h + torch.stack(others)).tanh())

    return connect


COUPLED = {
    "centred": lambda m, x: m.b(torch.tanh(m.a(x) - m.a(x).mean(0))),
    "causal": lambda m, x: m.b(m.a(x).tanh().cumsum(0).tanh()),
    "the last two": graph_of_samples([(-1, -2)]),
    "neighbours": lambda m, x: m.b(m.a(x + 0.1 * x.roll(1, 0)).tanh()),
    "random": lambda m, x: m.b(nn.functional.dropout(m.a(x), 0.5, training=True)),
}


@pytest.mark.parametrize("n", [2, 3, 5, 7, 20])
@pytest.mark.parametrize("name", ["centred", "causal", "neighbours"])
def test_samples_that_see_each_other(name, n):
    """The derivative goes through the batch, however few samples there are."""
    model = Graph(COUPLED[name], a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data(n)
    found = first_kernel(model, x)
    assert_equal(found, dense_kernel(model, x, "trace"))


def test_a_warning_says_that_samples_see_each_other():
    model = Graph(COUPLED["centred"], a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    with pytest.warns(UserWarning, match="samples see each other"):
        assert empirical_ntk(model, MODELS["mlp"].data(20)[0]).coupled


@pytest.mark.parametrize("edges", [[(3, 4), (4, 5)], [(0, 1), (5, 4)], [(1, 2)]], ids=str)
def test_a_few_samples_that_see_each_other(edges):
    model = Graph(graph_of_samples(edges), a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data(6)
    assert_equal(first_kernel(model, x), dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("layer", [nn.LSTM(4, 3), nn.GRU(4, 3), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)])
@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_a_forgotten_batch_first(layer, n):
    """A recurrent layer then takes the samples for a sequence."""
    model = Graph(
        lambda m, x: m.out((m.layer(x)[0] if isinstance(m.layer, nn.RNNBase) else m.layer(x))[:, -1]),
        layer=layer,
        out=nn.Linear(3 if isinstance(layer, nn.RNNBase) else 4, 2),
    ).double()
    x = torch.randn(n, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_equal(first_kernel(model, x), dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("numbers", [1, 40, 200])
def test_portions_of_samples_that_see_each_other(numbers, monkeypatch):
    monkeypatch.setattr(kernel_assembly, "_BYTES", 8 * numbers)
    model = Graph(COUPLED["centred"], a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data()
    assert_equal(first_kernel(model, x), dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("sizes", [[20], [8, 8, 4]], ids=str)
def test_whatever_is_random_is_drawn_once(sizes):
    """So that it is the kernel of one function, a Gram matrix."""
    model = Graph(COUPLED["random"], a=nn.Linear(4, 50), b=nn.Linear(50, 3)).double()
    x, _ = MODELS["mlp"].data(20)
    found = tangent_kernel_of_batches(model, [(part, len(part), len(part)) for part in x.split(sizes)])
    assert "one draw" in found.remark
    assert found.lambda_min >= -found.floor


@pytest.mark.parametrize("order", [[3, 2, 1, 5, 4, 6], [1, 2, 3, 4, 6, 5], [2, 1, 3, 4, 5, 6]], ids=str)
@pytest.mark.parametrize("copies", [1, 4])
def test_samples_sorted_inside(order, copies):
    """As by their length."""

    def connect(m, x):
        index = x[:, 0].argsort(descending=True)
        return m.b(m.a(x[index]).tanh())[index.argsort()]

    model = Graph(connect, a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data(6 * copies)
    x[:, 0] = torch.tensor(order * copies) + 10 * torch.arange(6 * copies) // 6
    assert_equal(first_kernel(model, x), dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("lengths", [[2, 2, 2, 2, 1], [2, 1, 2, 1, 2], [1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("copies", [1, 4])
def test_packed_sequences(lengths, copies):
    lengths = lengths * copies

    def connect(m, x):
        index = x[:, 0, 0].long()
        packed = nn.utils.rnn.pack_padded_sequence(x, index, batch_first=True, enforce_sorted=False)
        return m.out(m.lstm(packed)[1][0][0])

    model = Graph(connect, lstm=nn.LSTM(2, 3, batch_first=True), out=nn.Linear(3, 2)).double()
    x = torch.randn(len(lengths), 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 0, 0] = torch.tensor(lengths).double()
    assert_equal(first_kernel(model, x), dense_kernel(model, x, "trace"))


def test_tokens_without_their_padding():
    def connect(m, x):
        mask = x[..., 0] > 0
        out = x.new_zeros(*x.shape[:2], 3)
        return out.masked_scatter(mask[..., None], m.a(x[mask]).tanh()).sum(1)

    model = Graph(connect, a=nn.Linear(4, 3)).double()
    x = torch.randn(12, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_equal(first_kernel(model, x), dense_kernel(model, x, "trace"))


def test_a_transposed_parameter_that_the_few_samples_do_not_use():
    weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = weight

        def forward(self, x):
            mask = (x[:, :1, :1] > 0).to(x)
            norm = nn.functional.layer_norm
            return (norm(x, (3, 3), self.w) + mask * norm(x, (3, 3), self.w.t())).flatten(1)

    x = torch.randn(9, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[[0, 1, 2, 3, 5, 6, 7, 8], 0, 0] = -1.0
    x[4, 0, 0] = 1.0
    assert_equal(first_kernel(Masked(), x), dense_kernel(Masked(), x, "trace"))


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


def test_autocast_is_off():
    model, x = MODELS["mlp"].make(torch.float32), MODELS["mlp"].data(dtype=torch.float32)[0]
    expected = empirical_ntk(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(empirical_ntk(model, x).kernel, expected.kernel)


def test_products_that_overflow_are_repeated_in_double_precision():
    x = 1e20 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    found = empirical_ntk(nn.Linear(4, 1), x)
    assert found.dtype == torch.float64
    assert found.lambda_max > 1e38


def test_a_model_that_insists_on_its_dtype_keeps_its_kernel():
    def connect(m, x):
        assert x.dtype == torch.float32
        return m.a(x)

    with pytest.warns(UserWarning, match="could not be repeated in float64: AssertionError"):
        found = empirical_ntk(Graph(connect, a=nn.Linear(4, 3)), near_duplicates(1e-4)[[0, 1, 6]])
    assert found.dtype == torch.float32


def test_parts_near_their_floor_are_measured_in_double_precision():
    """The least eigenvalue of the lengths can be lost where that of the kernel is not."""
    torch.manual_seed(0)
    layers = (nn.Linear(10, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    first, second, third = map(parametrized_weight_norm, layers)
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)
    x = torch.randn(100, 10)
    found, exact = empirical_ntk(model, x), empirical_ntk(model, x, dtype=torch.float64)
    assert found.dtype == torch.float64
    assert found.crossover == pytest.approx(exact.crossover)


def test_a_kernel_that_is_zero():
    model = Graph(lambda m, x: m.a(x) * 0.0, a=nn.Linear(4, 3)).double()
    found = first_kernel(model, MODELS["mlp"].data()[0])
    assert found.lambda_min == found.lambda_max == found.effective_rank == 0.0
    assert found.shares == {"direction": 0.0, "length": 0.0, "rest": 0.0}


def test_the_rank_of_a_direction_with_a_second_use():
    layer = hook_weight_norm(nn.Linear(3, 2, bias=False))
    model = Graph(lambda m, x: (m.a(x).tanh() + x @ m.a.weight_v.t()).tanh(), a=layer).double()
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = empirical_ntk(model, x, outputs="full")
    assert found.rank_limit == 8 == int(torch.linalg.matrix_rank(found.kernel))


def test_a_mapping_that_is_no_dict():
    x, _ = MODELS["mlp"].data(9)
    model = Graph(lambda m, x: m.a(x["ids"], x["ids"]), a=nn.Bilinear(4, 4, 2)).double()
    found = tangent_kernel_of_batches(model, [(UserDict(ids=x), 9, 9)])
    expected = dense_kernel(Graph(lambda m, x: m.a(x, x), a=model.a), x, "trace")
    assert_equal(found, expected)


@pytest.mark.parametrize("asked", [3, 4, 5])
def test_a_constant_beside_the_samples(asked):
    """Whatever is as long as the number of samples asked for."""
    x, _ = MODELS["mlp"].data(14)
    constant = torch.arange(4).double()
    model = Graph(lambda m, x: m.a(x["x"] * x["constant"]).tanh(), a=nn.Linear(4, 3)).double()
    batches = [({"x": part, "constant": constant}, 7, asked) for part in x.split(7)]
    found = tangent_kernel_of_batches(model, batches)
    expected = dense_kernel(
        nn.Sequential(model.a, nn.Tanh()), torch.cat([part[:asked] for part in x.split(7)]) * constant, "trace"
    )
    assert_equal(found, expected)


def test_what_autograd_keeps_is_part_of_a_portion(monkeypatch):
    """Also of layers without parameters."""
    model = nn.Sequential(nn.Linear(4, 8), *[Graph(lambda m, x: x.sin()) for _ in range(50)]).double()
    handled = []
    gradients = kernel_assembly.Independent.gradients
    monkeypatch.setattr(
        kernel_assembly.Independent,
        "gradients",
        lambda self, group, which, *rest: handled.append(which) or gradients(self, group, which, *rest),
    )
    monkeypatch.setattr(kernel_assembly, "_BYTES", 8 * 4 * 50 * 8)  # eight samples and what is kept of them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        empirical_ntk(model, torch.randn(32, 4, dtype=torch.float64), outputs="sum")
    assert 4 <= max(which.stop - which.start for which in handled) <= 8


def test_samples_in_another_order_inside():
    """The structure does not hold, and is not used."""
    model = Graph(lambda m, x: m.a(x.flip(0)).tanh().flip(0), a=nn.Linear(4, 3)).double()
    x, _ = MODELS["mlp"].data()
    found = empirical_ntk(model, x)
    assert not found.coupled
    assert_equal(found, dense_kernel(model, x, "trace"))


def test_a_graph_that_depends_on_the_samples():
    """The first samples take another way than the batch."""
    model = Graph(
        lambda m, x: m.b(m.a(x).tanh() if len(x) <= 3 else m.a(x).tanh() * 1.0 + m.a.bias * 0.0),
        a=nn.Linear(4, 5),
        b=nn.Linear(5, 3),
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
    assert [samples for samples, tensors in asked if any(tensors)] == [8]
    assert sum(samples == 20 for samples, _ in asked) == 3  # one for each output
