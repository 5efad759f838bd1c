"""Compare the tangent kernel with full Jacobians on the table of models."""

import warnings

import pytest
import torch
from torch import nn

from lightning_normtheory import empirical_ntk
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.ntk import gradients, gram, memory, parameter_uses
from lightning_normtheory.ntk.empirical import tangent_kernel_of_batches

from support.models import MODELS, WEIGHT_NORM_FORMS, Graph
from support.oracles import contract, dense_kernel, jacobian
from support.theory.hessian_cases import without_dropout
from support.theory.kernel_cases import KERNEL_MODELS, ONE_BY_ONE, PARTS, SINGULAR, STRUCTURED, assert_equal, whole

pytestmark = SINGULAR


# Every model with its running statistics, those with a BatchNorm also with the statistics of the batch.
CASES = [
    (name, train) for name, case in KERNEL_MODELS.items() for train in ((False, True) if case.coupled else (False,))
]


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


@pytest.mark.parametrize("outputs", ["full", "trace", "sum"])
@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "conv", "wn-hook-dim-0", "wn-grouped-conv-dim-1", "bn", "lstm", "prelu", "wn-bias"),
        pytest.param("tied-language-model", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("numbers", [1, 150, 600])
def test_the_portions_in_which_it_is_computed_do_not_matter(name, outputs, numbers, monkeypatch):
    case = KERNEL_MODELS[name]
    model, (x, _) = case.make().eval(), case.data(11)
    expected = empirical_ntk(model, x, outputs=outputs)
    # A small limit, so that few samples and outputs are handled at once, and Gram matrices in small tiles.
    monkeypatch.setattr(memory, "MEMORY_LIMIT", 8 * numbers)
    monkeypatch.setattr(gram, "_TILE_BYTES", 8 * numbers)
    monkeypatch.setattr(gram, "_TILE_ROWS", 3)
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
    monkeypatch.setattr(gram, "_cost_of_positions", lambda *_, **__: 0.0 if positions else 2.0)
    monkeypatch.setattr(gram, "_cost_of_gradients", lambda *_, **__: 1.0)
    assert_equal(empirical_ntk(model, x, outputs=outputs), dense_kernel(model, x, outputs))


GROUPED = [name for name in STRUCTURED if "depthwise" in name or "grouped" in name or "transposed-conv-2d" in name]


@pytest.fixture(params=[(0, 0), (1000, 1), (1000, 2**20)], ids=["one operation", "samples", "all samples"])
def formed(monkeypatch, request):
    """Form gradients of groups by one operation or from patches of some samples; the numbers of samples of which."""
    samples = []
    original = parameter_uses.Convolution.gradients
    monkeypatch.setattr(parameter_uses, "_MANY_IN_LOOP", request.param[0])
    monkeypatch.setattr(parameter_uses, "_PATCHES", request.param[1])
    monkeypatch.setattr(
        parameter_uses.Convolution,
        "gradients",
        lambda self, axis, n, b: samples.append(n) or original(self, axis, n, b),
    )
    return samples


@pytest.mark.parametrize("outputs", ["full", "trace", "sum"])
@pytest.mark.parametrize("name", GROUPED)
def test_gradients_of_groups_are_formed_directly(name, outputs, formed):
    case = KERNEL_MODELS[name]
    model, (x, _) = case.make().eval(), case.data(11)
    assert_equal(empirical_ntk(model, x, outputs=outputs), dense_kernel(model, x, outputs))
    assert 11 in formed


@pytest.mark.parametrize("batches", [[1], [4, 4, 1]])
@pytest.mark.parametrize("name", GROUPED)
def test_gradients_of_groups_in_batches(name, batches, formed, monkeypatch):
    """One sample, a short last batch, and portions of two samples."""
    case = KERNEL_MODELS[name]
    model, (x, _) = case.make().eval(), case.data(sum(batches))
    expected = dense_kernel(model, x, "trace")
    assert_equal(tangent_kernel_of_batches(model, whole(x.split(batches))), expected)
    monkeypatch.setattr(memory, "MEMORY_LIMIT", 8 * 600)
    assert_equal(tangent_kernel_of_batches(model, whole(x.split(batches))), expected)
    assert formed


@pytest.mark.parametrize("outputs", ["full", "trace"])
@pytest.mark.parametrize("frozen", ["g", "v", None])
def test_images_of_different_sizes(outputs, frozen, monkeypatch):
    """The gradients of the large ones are formed by one operation, those of the small ones are not."""
    torch.manual_seed(0)
    conv = WEIGHT_NORM_FORMS["hook"](nn.Conv2d(2, 4, 2, groups=2))
    model = nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)).double()
    if frozen is not None:
        getattr(conv, f"weight_{frozen}").requires_grad_(False)
    monkeypatch.setattr(parameter_uses, "_MANY_IN_LOOP", 10)
    sizes = [torch.randn(3, 2, size, size, dtype=torch.float64) for size in (3, 5)]
    found = tangent_kernel_of_batches(model, whole(sizes), outputs=outputs)
    assert not found.one_by_one
    expected = contract(torch.cat([jacobian(model, x)[1] for x in sizes]), outputs)
    assert (found.kernel - expected).norm() <= 1e-10 * expected.norm()


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
    found = tangent_kernel_of_batches(model, whole(x.split(batches)))
    assert_equal(found, dense_kernel(model, x, "trace"))


@pytest.mark.parametrize("outputs", ["full", "trace"])
def test_batches_of_sequences_of_different_lengths(outputs):
    """They cannot be joined, and layers have another number of positions in each."""
    model = KERNEL_MODELS["attention"].make().eval()
    lengths = [torch.randn(n, t, 4, dtype=torch.float64) for n, t in ((3, 2), (2, 5), (1, 3))]
    found = tangent_kernel_of_batches(model, whole(lengths), outputs=outputs)
    assert not found.one_by_one
    rows = torch.cat([jacobian(model, x)[1] for x in lengths])
    expected = contract(rows, outputs)
    assert (found.kernel - expected).norm() <= 1e-10 * expected.norm()


def test_batch_statistics_are_those_of_each_batch():
    case = KERNEL_MODELS["bn"]
    model, (x, _) = case.make().train(), case.data()
    found = tangent_kernel_of_batches(model, [SampleBatch(x[:4], 4, 4), SampleBatch(x[4:], 3, 2)])
    rows = torch.cat([jacobian(model, x[:4])[1], jacobian(model, x[4:])[1][:2]])
    assert found.coupled
    torch.testing.assert_close(found.kernel, contract(rows, "trace"), rtol=1e-10, atol=1e-12)


def test_statistics_are_chosen_by_the_caller():
    case = KERNEL_MODELS["bn"]
    x, _ = case.data()
    train, eval_ = case.make().train(), case.make().eval()
    assert torch.equal(empirical_ntk(train, x, batch_stats=False).kernel, empirical_ntk(eval_, x).kernel)
    assert torch.equal(empirical_ntk(eval_, x, batch_stats=True).kernel, empirical_ntk(train, x).kernel)
    assert not torch.equal(empirical_ntk(train, x).kernel, empirical_ntk(eval_, x).kernel)


def test_what_autograd_keeps_is_part_of_a_portion(monkeypatch):
    """Also what it keeps of layers without parameters."""
    model = nn.Sequential(nn.Linear(4, 8), *[Graph(lambda m, x: x.sin()) for _ in range(50)]).double()
    handled = []
    original = gradients.IndependentSamples.gradients
    monkeypatch.setattr(
        gradients.IndependentSamples,
        "gradients",
        lambda self, group, which, *rest: handled.append(which) or original(self, group, which, *rest),
    )
    monkeypatch.setattr(memory, "MEMORY_LIMIT", 8 * 4 * 50 * 8)  # eight samples with their saved tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        empirical_ntk(model, torch.randn(32, 4, dtype=torch.float64), outputs="sum")
    assert 4 <= max(which.stop - which.start for which in handled) <= 8


def test_no_weight_gradients_are_computed(monkeypatch):
    """Backward passes compute gradients at the outputs of layers, and those of parameters only for a few samples."""
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
