"""Eigenvalues of the loss's Hessian against the dense Hessian, on the table of models."""

import warnings

import pytest
import torch
from torch import nn

from lightning_normtheory import Eigenpair, hessian_eigenpairs, hessian_top_eigenvalue, hessian_vector_product
from lightning_normtheory.hessian.eigenvalues import leading_eigenpairs
from lightning_normtheory.model.parameters import FlatParameters

from support.models import MODELS, Graph
from support.oracles import difference_hessian
from support.theory.hessian_cases import CASES, LOSSES, batches_of, prepared, sum_square

METHODS = pytest.mark.parametrize("method", ["power", "lanczos"])
# Small models have crowded spectra: the budget is no concern here, the answer is.
PATIENT = {"tol": 1e-4, "max_hvps": 3000}


def flat(vector):
    return torch.cat([part.flatten() for part in vector.values()])


def negated(output, y):
    return -sum_square(output, y)


@pytest.mark.parametrize(("name", "loss", "train"), CASES)
def test_largest_eigenvalue_of_the_table(name, loss, train):
    model, batches = prepared(name, train), batches_of(MODELS[name], loss)
    eigenvalues = torch.linalg.eigvalsh(difference_hessian(model, LOSSES[loss], batches))
    for method in ("power", "lanczos"):
        pair = hessian_top_eigenvalue(model, LOSSES[loss], batches, method=method, **PATIENT)
        assert isinstance(pair, Eigenpair)
        assert pair.converged
        assert pair.value == pytest.approx(float(eigenvalues[-1]), rel=1e-6)
        assert pair.residual <= 1e-4 * pair.value
        product = flat(hessian_vector_product(model, LOSSES[loss], batches, pair.vector))
        residual = float((product - pair.value * flat(pair.vector)).norm())
        assert residual == pytest.approx(pair.residual, rel=1e-3, abs=1e-11)


@METHODS
@pytest.mark.parametrize("name", ["mlp", "wn-hook-dim-0", "wn-parametrized-dim-None", "bn", "conv", "tied"])
@pytest.mark.parametrize("size", [1.0, 0.1])
def test_negative_dominant_spectra(name, size, method):
    """The square loss upside down: −λ_max of before is now the largest in magnitude, and with small targets by far."""
    model, batches = MODELS[name].make().eval(), [(x, size * y) for x, y in batches_of(MODELS[name])]
    eigenvalues = torch.linalg.eigvalsh(difference_hessian(model, negated, batches))
    top, bottom = float(eigenvalues[-1]), float(eigenvalues[0])
    assert 0 < top < -bottom
    options = {"method": method, **PATIENT}
    assert hessian_top_eigenvalue(model, negated, batches, **options).value == pytest.approx(top, rel=1e-6)
    for which in ("magnitude", "smallest"):
        pair = hessian_top_eigenvalue(model, negated, batches, which=which, **options)
        assert pair.value == pytest.approx(bottom, rel=1e-6)


@METHODS
def test_k_leading_ones(method):
    model, batches = MODELS["wn-hook-dim-0"].make(), batches_of(MODELS["wn-hook-dim-0"])
    eigenvalues = torch.linalg.eigvalsh(difference_hessian(model, sum_square, batches))
    for which, expected in (("algebraic", eigenvalues.flip(0)[:4]), ("smallest", eigenvalues[:4])):
        pairs = hessian_eigenpairs(model, sum_square, batches, 4, method=method, which=which, tol=1e-5, max_hvps=5000)
        torch.testing.assert_close(torch.tensor([p.value for p in pairs]).double(), expected, rtol=1e-6, atol=0)
        vectors = torch.stack([flat(p.vector) for p in pairs])
        torch.testing.assert_close(vectors @ vectors.t(), torch.eye(4, dtype=torch.float64), atol=1e-8, rtol=0)
        for pair in pairs:
            product = flat(hessian_vector_product(model, sum_square, batches, pair.vector))
            true = float((product - pair.value * flat(pair.vector)).norm())
            assert true <= pair.residual + 1e-12


@METHODS
def test_eigenvalues_that_coincide_are_found_as_often_as_they_occur(method):
    """Every output of a linear model with the square loss has the same block."""
    model = nn.Linear(2, 3, bias=False).double()
    x, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    pairs = hessian_eigenpairs(model, sum_square, [(x, y)], 6, method=method)
    assert [round(pair.value, 6) for pair in pairs] == [4.0, 4.0, 4.0, 1.0, 1.0, 1.0]


def quadratic(values, minimum=None):
    """A model whose loss is ½Σλ_i(w_i − m_i)², with its batches: inputs are rows √λ_i e_i."""
    eigenvalues = torch.tensor(values)
    model = nn.Linear(len(values), 1, bias=False)
    nn.init.zeros_(model.weight) if minimum is None else model.weight.data.copy_(minimum)

    def loss(output, _):
        return 0.5 * (eigenvalues * model.weight.square()).sum() + 0 * output.sum()

    return model, loss, [(torch.zeros(1, len(values)), torch.zeros(1))]


@METHODS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairs_that_were_found_do_not_come_back(method, dtype):
    """A projected map has the eigenvalue zero for them, which leads when all others are on its far side."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1, bias=False, dtype=dtype)
    x, y = torch.randn(200, 6, dtype=dtype) + 1, torch.randn(200, 1, dtype=dtype)
    eigenvalues = torch.linalg.eigvalsh(2 * x.t().double() @ x.double() / 200)
    options = {"method": method, "max_hvps": 3000}
    for tol in (1e-3, 1e-5):
        smallest = hessian_eigenpairs(model, nn.functional.mse_loss, [(x, y)], 6, which="smallest", tol=tol, **options)
        assert [p.value for p in smallest] == pytest.approx(eigenvalues.tolist(), rel=1e-3)
        negative = hessian_eigenpairs(
            model, lambda o, t: -nn.functional.mse_loss(o, t), [(x, y)], 6, tol=tol, **options
        )
        assert [p.value for p in negative] == pytest.approx((-eigenvalues).tolist(), rel=1e-3)


@METHODS
def test_convergence_of_later_pairs_is_judged_by_their_own_residual(method):
    model, loss, batches = quadratic([10.0, 9.0, 1e-3, *[0.0] * 20])
    for pair in hessian_eigenpairs(model, loss, batches, 3, method=method, tol=1e-2):
        assert not pair.converged or pair.residual <= 1e-2 * abs(pair.value)


@pytest.mark.parametrize(("method", "top"), [("lanczos", 10.0), ("lanczos", 7.0), ("power", 10.0)])
def test_a_gradient_and_a_start_along_another_eigenvector(method, top):
    """In ten thousand dimensions next to nothing of the noise lies along the leading one. Power iteration brings it up
    by top/5 in each of the first steps only, and needs a larger gap."""
    values = [top, 5.0, *[0.0] * 9998]
    second = torch.zeros(1, 10_000)
    second[0, 1] = 1.0
    model, loss, batches = quadratic(values, second)
    for start in (None, {"weight": second}):
        pair = hessian_top_eigenvalue(model, loss, batches, method=method, start=start, tol=1e-2)
        assert pair.value == pytest.approx(top, rel=1e-2)


@METHODS
def test_a_tolerance_below_rounding_ends_at_rounding(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
    x, y = torch.randn(64, 10), torch.randint(0, 3, (64,))
    exact = hessian_top_eigenvalue(model, nn.functional.cross_entropy, [(x, y)], method="lanczos", tol=1e-4)
    for tol in (1e-5, 1e-6, 1e-9):
        pair = hessian_top_eigenvalue(model, nn.functional.cross_entropy, [(x, y)], method=method, tol=tol)
        assert pair.value == pytest.approx(exact.value, rel=1e-4)


@METHODS
def test_a_start_saves_products_and_may_be_wrong(method):
    case = MODELS["wn-parametrized-dim-0"]
    model, batches = case.make(), batches_of(case)
    options = {"method": method, "tol": 1e-2}
    cold = hessian_top_eigenvalue(model, sum_square, batches, **options)
    exact = hessian_top_eigenvalue(model, sum_square, batches, method="lanczos", tol=1e-6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * torch.ones_like(parameter)
    warm = hessian_top_eigenvalue(model, sum_square, batches, start=exact.vector, **options)
    assert warm.converged
    assert warm.hvps < cold.hvps
    # The second eigenvector is as converged as can be, and is left all the same.
    second = hessian_eigenpairs(model, sum_square, batches, 2, method="lanczos", tol=1e-7)[1]
    found = hessian_top_eigenvalue(model, sum_square, batches, start=second.vector, **options)
    assert found.value == pytest.approx(warm.value, rel=1e-3)


@METHODS
def test_the_result_repeats_and_uses_a_generator_of_its_own(method):
    case = MODELS["bn"]
    model, batches = case.make(), batches_of(case)
    state = torch.get_rng_state()
    first = hessian_top_eigenvalue(model, sum_square, batches, method=method)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    second = hessian_top_eigenvalue(model, sum_square, batches, method=method)
    assert (second.value, second.hvps, second.residual) == (first.value, first.hvps, first.residual)
    other = hessian_top_eigenvalue(model, sum_square, batches, method=method, seed=1)
    assert other.value != first.value
    assert other.value == pytest.approx(first.value, rel=1e-3)


@METHODS
def test_a_budget_that_is_too_small_is_admitted(method):
    case = MODELS["wn-hook-dim-0"]
    pair = hessian_top_eigenvalue(case.make(), sum_square, batches_of(case), method=method, tol=1e-6, max_hvps=3)
    assert (pair.converged, pair.hvps) == (False, 3)
    assert pair.residual > 1e-6 * pair.value


@METHODS
def test_at_a_stationary_point_there_is_no_gradient_to_start_from(method):
    """L = ½(w₁² + 3w₂²) at w = 0."""
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0**0.5]], dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    pair = hessian_top_eigenvalue(model, nn.functional.mse_loss, [(x, y)], method=method)
    assert pair.value == pytest.approx(3.0, rel=1e-5)


@METHODS
def test_a_loss_without_curvature(method):
    model = nn.Linear(4, 3).double()
    pair = hessian_top_eigenvalue(model, lambda output, _: output.mean(), batches_of(MODELS["mlp"]), method=method)
    assert (pair.value, pair.residual, pair.converged) == (0.0, 0.0, True)


@METHODS
def test_one_parameter(method):
    model = nn.Linear(1, 1, bias=False).double()
    x, y = torch.tensor([[1.0], [3.0]], dtype=torch.float64), torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    pair = hessian_top_eigenvalue(model, nn.functional.mse_loss, [(x, y)], method=method)
    assert (pair.value, pair.converged) == (pytest.approx(10.0), True)


class WrongTwice(torch.autograd.Function):
    """a·b², whose gradient in b hides from autograd that it depends on a."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b**2

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient * b**2, 2 * gradient * a.detach() * b


@METHODS
def test_a_wrong_second_derivative_is_noticed(method):
    case = MODELS["mlp"]
    model = Graph(
        lambda m, x: m.product(m.first(x), m.second(x)),
        first=nn.Linear(4, 3),
        second=nn.Linear(4, 3),
        product=nn.Identity(),
    ).double()
    model.product.forward = WrongTwice.apply
    with pytest.warns(UserWarning, match="not symmetric.*custom autograd functions"):
        pair = hessian_top_eigenvalue(model, sum_square, batches_of(case), method=method)
    assert not pair.converged
    model.product.forward = lambda a, b: a * b**2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hessian_top_eigenvalue(model, sum_square, batches_of(case), method=method)
        hessian_top_eigenvalue(model.float(), sum_square, batches_of(case, dtype=torch.float32), method=method)


class RoundedHessian:
    """diag(−10⁴, …, 30), each product rounded relative to ‖H‖, as float32 does behind nearly constant channels."""

    def __init__(self, dtype, rounding):
        self.diagonal = torch.cat([torch.tensor([-1e4]), torch.linspace(-30.0, 30.0, 40)]).to(dtype)
        self.noise = rounding * torch.randn(41, 41, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.gradient = torch.ones(41, dtype=dtype)
        self.space = FlatParameters({"w": torch.zeros(41, dtype=dtype, requires_grad=True)})
        self.vectors = self.space.size

    def forget_gradient(self):
        pass

    def __matmul__(self, vector):
        return self.diagonal * vector + self.noise @ vector

    unchecked = __matmul__


@METHODS
@pytest.mark.parametrize(("dtype", "reason"), [(torch.float32, "within the rounding"), (torch.float64, "wrong second")])
def test_rounding_relative_to_a_large_negative_eigenvalue_is_called_rounding(method, dtype, reason):
    """Seen: mobilenet_v2, asymmetry 5.8 beside λ_max = 32.8, and "an operation has a wrong second derivative"."""
    hessian = RoundedHessian(dtype, 3.0)
    with pytest.warns(UserWarning, match=reason):
        (pair,) = leading_eigenpairs(hessian, 1, method=method, which="algebraic", tol=1e-3, max_hvps=40)
    assert not pair.converged
    assert pair.residual > 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = RoundedHessian(dtype, 0.0)
        (pair,) = leading_eigenpairs(exact, 1, method="lanczos", which="algebraic", tol=1e-3, max_hvps=60)
    assert pair.value == pytest.approx(30.0, abs=pair.residual + 1e-3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "arnoldi"}, "method to be one of 'power', 'lanczos', but got 'arnoldi'"),
        ({"which": "LA"}, "which to be one of 'algebraic', 'magnitude', 'smallest', but got 'LA'"),
        ({"tol": 0.0}, "tol.*between 0 and 1, but got 0.0"),
        ({"max_hvps": 0}, "max_hvps to be a positive integer, but got 0"),
        ({"memory": "none"}, "memory to be one of 'high', 'low', but got 'none'"),
        ({"start": {"0.weight": torch.ones(6, 4)}}, "is missing"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        hessian_top_eigenvalue(MODELS["mlp"].make(), sum_square, batches_of(MODELS["mlp"]), **options)


def test_bad_starts_and_counts_are_refused():
    model, batches = MODELS["mlp"].make(), batches_of(MODELS["mlp"])
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="finite, nonzero start"):
        hessian_top_eigenvalue(model, sum_square, batches, start=zero)
    for k in (0, 52):
        with pytest.raises(ValueError, match="k between 1 and the number of parameters, 51"):
            hessian_eigenpairs(model, sum_square, batches, k)
