"""Samples that interact, or whose order or number inside the network differs from the input."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from lightning_normtheory import empirical_ntk
from lightning_normtheory.measuring.processes import Processes
from lightning_normtheory.ntk import assembly, memory
from lightning_normtheory.ntk.empirical import tangent_kernel_of_batches
from lightning_normtheory.ntk.gradients import IndependentSamples
from lightning_normtheory.ntk.memory import Portion
from lightning_normtheory.ntk.verification import SAMPLES_INTERACT, STRUCTURE_DIFFERS

from support.models import MODELS, Graph
from support.oracles import dense_kernel
from support.theory.kernel_cases import SINGULAR, assert_equal, whole

pytestmark = SINGULAR


def quiet_kernel(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return empirical_ntk(model.double(), x)


def graph_of_samples(edges):
    """A network that adds the features of sample j to sample i for each edge (i, j)."""

    def connect(m, x):
        h = m.a(x).tanh()
        others = [h[[j for k, j in edges if k == i]].sum(0) for i in range(len(x))]
        return m.b((h + torch.stack(others)).tanh())

    return connect


COUPLED = {
    "centered": lambda m, x: m.b(torch.tanh(m.a(x) - m.a(x).mean(0))),
    "causal": lambda m, x: m.b(m.a(x).tanh().cumsum(0).tanh()),
    "the last two": graph_of_samples([(-1, -2)]),
    "neighbors": lambda m, x: m.b(m.a(x + 0.1 * x.roll(1, 0)).tanh()),
    "random": lambda m, x: m.b(nn.functional.dropout(m.a(x), 0.5, training=True)),
}


@pytest.mark.parametrize("n", [2, 3, 5, 7, 20])
@pytest.mark.parametrize("name", ["centered", "causal", "neighbors"])
def test_samples_that_see_each_other(name, n):
    """The derivative goes through the batch, also for few samples."""
    model = Graph(COUPLED[name], a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data(n)
    found = quiet_kernel(model, x)
    assert_equal(found, dense_kernel(model, x, "trace"))


def test_a_warning_says_that_samples_see_each_other():
    model = Graph(COUPLED["centered"], a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    with pytest.warns(UserWarning, match="samples interact"):
        assert empirical_ntk(model, MODELS["mlp"].data(20)[0]).coupled


@pytest.mark.parametrize("edges", [[(3, 4), (4, 5)], [(0, 1), (5, 4)], [(1, 2)]], ids=str)
def test_a_few_samples_that_see_each_other(edges):
    model = Graph(graph_of_samples(edges), a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data(6)
    assert_equal(quiet_kernel(model, x), dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("layer", [nn.LSTM(4, 3), nn.GRU(4, 3), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)])
@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_a_forgotten_batch_first(layer, n):
    """A recurrent layer then treats the samples as a sequence."""
    model = Graph(
        lambda m, x: m.out((m.layer(x)[0] if isinstance(m.layer, nn.RNNBase) else m.layer(x))[:, -1]),
        layer=layer,
        out=nn.Linear(3 if isinstance(layer, nn.RNNBase) else 4, 2),
    ).double()
    x = torch.randn(n, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_equal(quiet_kernel(model, x), dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("numbers", [1, 40, 200])
def test_portions_of_samples_that_see_each_other(numbers, monkeypatch):
    monkeypatch.setattr(memory, "MEMORY_LIMIT", 8 * numbers)
    model = Graph(COUPLED["centered"], a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data()
    assert_equal(quiet_kernel(model, x), dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("sizes", [[20], [8, 8, 4]], ids=str)
def test_whatever_is_random_is_drawn_once(sizes):
    """The kernel is that of one function, so it is a Gram matrix."""
    model = Graph(COUPLED["random"], a=nn.Linear(4, 50), b=nn.Linear(50, 3)).double()
    x, _ = MODELS["mlp"].data(20)
    found = tangent_kernel_of_batches(model, whole(x.split(sizes)))
    assert "one draw" in found.remark
    assert found.lambda_min >= -found.floor


class RefusedElsewhere(Processes):
    """Return, in place of one result, the refusal of another process, as `run_on_all` of several processes does."""

    def __init__(self, refusal, is_step):
        self._refusal, self._is_step, self.refused = refusal, is_step, False

    def run_on_all(self, action):
        result = action()
        if self.refused or not self._is_step(result):
            return result
        self.refused = True
        return self._refusal


@pytest.mark.parametrize("refusal", [STRUCTURE_DIFFERS, SAMPLES_INTERACT], ids=["structure", "samples"])
@pytest.mark.parametrize(
    "is_step",
    [
        lambda result: isinstance(result, IndependentSamples),
        lambda result: isinstance(result, tuple) and callable(result[0]),
        lambda result: result is None,
    ],
    ids=["plan", "gradients", "block"],
)
def test_the_refusal_of_another_process_leads_to_the_same_strategy(is_step, refusal):
    case = MODELS["wn-hook-dim-0"]
    model, (x, _) = case.make(), case.data()
    processes = RefusedElsewhere(refusal, is_step)
    found = tangent_kernel_of_batches(model, whole([x]), processes=processes)
    assert processes.refused
    assert found.coupled == (refusal == SAMPLES_INTERACT)
    every = [name for name, _ in model.named_parameters()]
    assert list(found.one_by_one) == ([] if found.coupled else every)
    assert_equal(found, dense_kernel(model, x, "trace"))


def test_samples_in_another_order_inside():
    """The structure does not hold and is not used."""
    model = Graph(lambda m, x: m.a(x.flip(0)).tanh().flip(0), a=nn.Linear(4, 3)).double()
    x, _ = MODELS["mlp"].data()
    found = empirical_ntk(model, x)
    assert not found.coupled
    assert_equal(found, dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("order", [[3, 2, 1, 5, 4, 6], [1, 2, 3, 4, 6, 5], [2, 1, 3, 4, 5, 6]], ids=str)
@pytest.mark.parametrize("copies", [1, 4])
def test_samples_sorted_inside(order, copies):
    """Like sequences sorted by length."""

    def connect(m, x):
        index = x[:, 0].argsort(descending=True)
        return m.b(m.a(x[index]).tanh())[index.argsort()]

    model = Graph(connect, a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data(6 * copies)
    x[:, 0] = torch.tensor(order * copies) + 10 * torch.arange(6 * copies) // 6
    assert_equal(quiet_kernel(model, x), dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("outputs", [[3], [1, 2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("portions", [1, 2])
def test_samples_sorted_inside_with_some_outputs_at_once(portions, outputs, monkeypatch):
    """Neighbors are exchanged in a batch, but the few samples that are tried by themselves keep their order."""

    def connect(m, x):
        index = x[:, 0].argsort()
        return m.b(m.a(x[index]).tanh())[index.argsort()]

    n = 24
    slices = [slice(*each) for each in itertools.pairwise(itertools.accumulate(outputs, initial=0))]
    samples = [Portion(0, slice(first, first + n // portions), first) for first in range(0, n, n // portions)]
    monkeypatch.setattr(assembly, "portions_within_limit", lambda *_, **__: (slices, samples))
    model = Graph(connect, a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    x, _ = MODELS["mlp"].data(n)
    x[:, 0] = torch.arange(n).view(-1, 2).flip(1).flatten()
    x[0, 0], x[1, 0] = 0, 1  # the first sample is tried
    found = quiet_kernel(model, x)
    assert found.one_by_one
    assert_equal(found, dense_kernel(model, x, "trace"))


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
    assert_equal(quiet_kernel(model, x), dense_kernel(model, x, "trace"))


def test_tokens_without_their_padding():
    def connect(m, x):
        mask = x[..., 0] > 0
        out = x.new_zeros(*x.shape[:2], 3)
        return out.masked_scatter(mask[..., None], m.a(x[mask]).tanh()).sum(1)

    model = Graph(connect, a=nn.Linear(4, 3)).double()
    x = torch.randn(12, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_equal(quiet_kernel(model, x), dense_kernel(model, x, "trace"))


def test_a_graph_that_depends_on_the_samples():
    """Few samples take another branch than the batch."""
    model = Graph(
        lambda m, x: m.b(m.a(x).tanh() if len(x) <= 3 else m.a(x).tanh() * 1.0 + m.a.bias * 0.0),
        a=nn.Linear(4, 5),
        b=nn.Linear(5, 3),
    ).double()
    x, _ = MODELS["mlp"].data()
    found = empirical_ntk(model, x)
    assert_equal(found, dense_kernel(model, x, "trace"))


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
    assert_equal(quiet_kernel(Masked(), x), dense_kernel(Masked(), x, "trace"))
