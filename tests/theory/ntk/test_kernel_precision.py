"""The accuracy of a tangent kernel: its dtype, its floor, its rank."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm

from lightning_normtheory import empirical_ntk

from support.models import MODELS, Graph, hook_weight_norm
from support.oracles import dense_kernel
from support.theory.kernel_cases import KERNEL_MODELS, SINGULAR

pytestmark = SINGULAR


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


def test_parts_near_their_floor_are_measured_in_double_precision():
    """The least eigenvalue of the lengths can be inaccurate although that of the kernel is accurate."""
    torch.manual_seed(0)
    layers = (nn.Linear(10, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    first, second, third = map(parametrized_weight_norm, layers)
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)
    x = torch.randn(100, 10)
    found, exact = empirical_ntk(model, x), empirical_ntk(model, x, dtype=torch.float64)
    assert found.dtype == torch.float64
    assert found.crossover == pytest.approx(exact.crossover)


def test_products_that_overflow_are_repeated_in_double_precision():
    x = 1e20 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    found = empirical_ntk(nn.Linear(4, 1), x)
    assert found.dtype == torch.float64
    assert found.lambda_max > 1e38


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


def test_a_model_that_insists_on_its_dtype_keeps_its_kernel():
    def connect(m, x):
        assert x.dtype == torch.float32
        return m.a(x)

    with pytest.warns(UserWarning, match="could not be repeated in float64: AssertionError"):
        found = empirical_ntk(Graph(connect, a=nn.Linear(4, 3)), near_duplicates(1e-4)[[0, 1, 6]])
    assert found.dtype == torch.float32


def test_a_parameter_in_an_unknown_place_is_not_overlooked():
    """It would not be converted to float64, and its part of the kernel would be missing."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(0)))
            self.others = [self.weight]
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x * self.others[0])

    with pytest.raises(
        RuntimeError, match="Expected parameters as attributes of modules, but Hidden uses one that it keeps"
    ):
        empirical_ntk(Hidden(), near_duplicates(1.0), dtype=torch.float64)
    with pytest.warns(UserWarning, match="could not be repeated in float64"):
        found = empirical_ntk(Hidden(), near_duplicates(1e-4)[[0, 1, 6]])
    assert found.dtype == torch.float32


def test_values_that_are_not_finite_are_reported_as_such():
    model = MODELS["mlp"].make()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    found = empirical_ntk(model, MODELS["mlp"].data()[0])
    assert found.lambda_min != found.lambda_min
    assert found.effective_rank != found.effective_rank


def test_the_spectrum_is_that_of_the_kernel():
    found = empirical_ntk(MODELS["wn-hook-dim-0"].make(), MODELS["wn-hook-dim-0"].data()[0])
    values = torch.linalg.eigvalsh(found.kernel)
    assert found.lambda_min == pytest.approx(float(values[0]), rel=1e-12)
    assert found.lambda_max == pytest.approx(float(values[-1]), rel=1e-12)
    assert found.condition_number == pytest.approx(float(values[-1] / values[0]), rel=1e-9)
    assert found.effective_rank == pytest.approx(float(values.sum() ** 2 / values.square().sum()), rel=1e-12)
    assert 0 < found.floor < 1e-13 * found.lambda_max


def test_a_kernel_that_is_zero():
    model = Graph(lambda m, x: m.a(x) * 0.0, a=nn.Linear(4, 3)).double()
    found = empirical_ntk(model, MODELS["mlp"].data()[0])
    assert found.lambda_min == found.lambda_max == found.effective_rank == 0.0
    assert found.shares == {"direction": 0.0, "length": 0.0, "rest": 0.0}


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


def test_the_rank_of_a_direction_with_a_second_use():
    layer = hook_weight_norm(nn.Linear(3, 2, bias=False))
    model = Graph(lambda m, x: (m.a(x).tanh() + x @ m.a.weight_v.t()).tanh(), a=layer).double()
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = empirical_ntk(model, x, outputs="full")
    assert found.rank_limit == 8 == int(torch.linalg.matrix_rank(found.kernel))


def test_samples_that_occur_twice_are_said_to_be_singular():
    case = MODELS["mlp"]
    x, _ = case.data(5)
    with pytest.warns(UserWarning, match="5 rows, but its rank is at most 4"):
        found = empirical_ntk(case.make(), x[[0, 1, 2, 3, 1]])
    assert abs(found.lambda_min) <= found.floor
    assert found.deficiency


class Shrinking(nn.Linear):
    """Each forward pass halves the weight, past autograd."""

    def forward(self, x):
        self.weight.data.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_forward_pass_begins_with_the_same_weights(dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Shrinking(5, 3)), torch.randn(7, 4)
    found = empirical_ntk(model, x, dtype=dtype)
    exact = dense_kernel(copy.deepcopy(model).double(), x.double(), "trace")["kernel"]
    torch.testing.assert_close(found.kernel, exact, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0.0)


@pytest.mark.filterwarnings("ignore:Some samples do not")
def test_a_random_function_is_not_repeated_with_other_draws():
    """λ_min is zero, since the inputs span two dimensions, but neither samples nor parameters are too few. From 16
    numbers on, torch draws others in float64 than in float32."""
    torch.manual_seed(0)
    x = torch.randn(20, 2) @ torch.randn(2, 30)
    model = Graph(lambda m, x: m.a(x * torch.randn(len(x), 1, dtype=x.dtype)), a=nn.Linear(30, 1, bias=False))
    found = empirical_ntk(model, x)
    assert found.near_floor
    assert found.dtype == torch.float32
    drawn = (x * torch.randn(20, 1, generator=torch.Generator().manual_seed(0))).double()
    assert (found.kernel - drawn @ drawn.t()).norm() <= 1e-6 * found.lambda_max
