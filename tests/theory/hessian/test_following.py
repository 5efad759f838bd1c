"""λ_max followed over measurements: constructed spectra that move, small trainings, state, budgets, memory."""

import gc
import statistics
from itertools import chain

import pytest
import torch
from torch import nn

from lightning_normtheory import hessian_top_eigenvalue
from lightning_normtheory.hessian import hessian_operator
from lightning_normtheory.hessian.following import _PERIOD, follow_top_eigenvalue
from lightning_normtheory.hessian.operator import LossHessian
from lightning_normtheory.hessian.warm_start import WarmStart

from support.theory.hessian_cases import assembled
from support.theory.moving_hessians import (
    CASES,
    LARGE,
    MEASUREMENTS,
    Case,
    MovingHessian,
    OneVector,
    Several,
    outcome,
)

LOSS = nn.functional.cross_entropy
LANCZOS = {"method": "lanczos", "tol": 1e-2, "max_hvps": 100}
CROSSINGS = [name for name, case in CASES.items() if "crossing" in name or name == "exchange"]
JUMPS = [name for name in CASES if "jump" in name]
CALM = [name for name in CASES if name not in CROSSINGS + JUMPS]


def test_every_case_is_tested():
    assert len(CROSSINGS) >= 6
    assert len(JUMPS) >= 4
    assert all(CASES[name].change < MEASUREMENTS for name in CROSSINGS + JUMPS)


@pytest.mark.parametrize("name", CASES)
def test_two_products_in_calm_and_the_right_eigenvalue_after_changes(name):
    found = outcome(CASES[name], Several, range(2), torch.float64)
    assert found.wrong == [0] * MEASUREMENTS
    if name.startswith("calm"):
        assert statistics.median(chain.from_iterable(found.products[1:])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_never_more_wrong_answers_than_from_one_vector(name):
    """Over 50 seeds; none at all in calm and at crossings, and at most a tenth at jumps that only noise can see."""
    case = CASES[name]
    before, after = (outcome(case, start, range(50)) for start in (OneVector, Several))
    assert all(new <= old for new, old in zip(after.wrong, before.wrong))
    assert max(after.wrong) <= (5 if name in JUMPS else 0)
    calm = [statistics.mean(chain.from_iterable(found.products[1 : case.change])) for found in (before, after)]
    assert calm[1] < calm[0] or "slow" in name or "wild" in name


@pytest.mark.parametrize("name", ["calm", "crossing", "crossing by the third", "large jump"])
def test_a_large_model_is_followed_as_well(name):
    found = outcome(CASES[name], Several, range(1), size=LARGE)
    assert found.wrong == [0] * MEASUREMENTS
    assert statistics.median(chain.from_iterable(found.products[1 : CASES[name].change])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_never_more_wrong_answers_than_from_one_vector_in_large_models(name):
    """At jumps that only noise can see, it has a smaller part along each of many directions."""
    case, seeds = CASES[name], range(4)
    before, after = (outcome(case, start, seeds, size=LARGE) for start in (OneVector, Several))
    assert all(new <= old for new, old in zip(after.wrong, before.wrong)) or name in JUMPS
    assert max(after.wrong) == 0 or name in JUMPS


@pytest.mark.parametrize(
    "values",
    [(0.05, 0.05, 0.95, 1.2), (0.05, 0.05, 0.7, 1.2), (0.05, 0.05, 0.95, 0.97, 1.05), (0.05, 0.3, 0.6, 0.9, 1.2)],
)
def test_an_eigenvector_that_comes_in_steps(values):
    """A search that finds it below the first must not make the next test blind: it did, for each of the seeds. What is
    left are test vectors that see little of it."""
    case = Case(lambda t: [1.0, 0.8, 0.6, values[min(t, len(values) - 1)]])
    assert max(outcome(case, Several, range(20)).wrong) <= 6


def test_one_vector_misses_crossings():
    """The cases are hard: if this fails, they prove nothing."""
    assert sum(sum(outcome(CASES[name], OneVector, range(3)).wrong) for name in CROSSINGS) > 5


@pytest.mark.parametrize("name", CROSSINGS)
def test_little_memory_finds_crossings(name):
    """Eight vectors, as the callback has them where memory is saved."""
    for seed in range(3):
        followed = Several()
        for hessian in CASES[name].sequence(seed):
            hessian.vectors = 8
            pair = followed.measure(hessian)
            assert not pair.converged or abs(hessian.top - pair.value) <= pair.residual + 1e-5


def test_after_a_number_of_measurements_the_iteration_is_long():
    """A hidden direction gets large while the test does not look: found after at most so many measurements."""
    hessian = CASES["calm"].sequence(0)[0]
    followed, products = Several(), []
    for _ in range(2 * _PERIOD + 1):
        products.append(followed.measure(hessian).hvps)
    assert [i for i, count in enumerate(products) if count > 4] == [0, _PERIOD, 2 * _PERIOD]


class Training:
    """Full-batch descent of a small network in float64."""

    def __init__(self, lr, seed, width=8):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()
        self.batches = [(torch.randn(60, 6, dtype=torch.float64), torch.randint(0, 3, (60,)))]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr)

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            LOSS(self.model(self.batches[0][0]), self.batches[0][1]).backward()
            self.optimizer.step()

    def open(self):
        return hessian_operator(self.model, LOSS, self.batches)


def follow_training(lr, steps, seed):
    """Follow λ_max over a training against the dense Hessian; return our products, and those from one vector."""
    training, last, vector, products = Training(lr, seed), WarmStart(), None, []
    for _ in range(15):
        with training.open() as hessian:
            pair, last = follow_top_eigenvalue(hessian, last, **LANCZOS)
        dense = torch.linalg.eigvalsh(assembled(training.model, LOSS, training.batches))
        assert pair.converged
        assert pair.residual <= 1e-2 * pair.value
        assert abs(float(dense[-1]) - pair.value) <= pair.residual
        before = hessian_top_eigenvalue(training.model, LOSS, training.batches, start=vector, **LANCZOS)
        vector = before.vector
        products.append((pair.hvps, before.hvps))
        training.steps(steps)
    return [sum(counts[1:]) for counts in zip(*products)]


@pytest.mark.parametrize(("lr", "steps"), [(0.5, 3), (2.0, 20)])
@pytest.mark.parametrize("seed", range(3))
def test_small_trainings_against_the_dense_hessian(lr, steps, seed):
    follow_training(lr, steps, seed)


def test_fewer_products_in_trainings_with_small_steps():
    ours, from_one_vector = (sum(counts) for counts in zip(*(follow_training(0.05, 5, seed) for seed in range(4))))
    assert ours < from_one_vector


def test_steady_turns_take_two_products_and_random_ones_three():
    steady, random = (
        statistics.mean(chain.from_iterable(outcome(CASES[name], Several, range(4)).products[3:]))
        for name in ("training, steady", "training")
    )
    assert steady < 2.2 < 2.8 < random


def test_where_the_hessian_changes_much_it_takes_hardly_more_products_than_from_one_vector():
    followed, before, products = Several(), OneVector(), []
    for seed in range(4):
        for hessian in CASES["training, wild"].sequence(seed):
            products.append((followed.measure(hessian).hvps, before.measure(hessian).hvps))
    ours, theirs = (sum(counts) for counts in zip(*products))
    assert ours < 1.25 * theirs


def test_parameters_that_come_and_go():
    training, last = Training(0.05, 0), WarmStart()
    for frozen in (False, True, True, False):
        training.model[0].requires_grad_(not frozen)
        with training.open() as hessian:
            pair, last = follow_top_eigenvalue(hessian, last, **LANCZOS)
        dense = torch.linalg.eigvalsh(assembled(training.model, LOSS, training.batches))
        assert float(dense[-1]) == pytest.approx(pair.value, abs=pair.residual)
        assert (
            set(last.first)
            == set(last.others)
            == {name for name, p in training.model.named_parameters() if p.requires_grad}
        )


# --- Limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 7, 19, 20, 21, 30])
def test_no_more_products_than_allowed(most):
    last = WarmStart()
    for hessian in CASES["crossing"].sequence(0):
        pair, last = follow_top_eigenvalue(hessian, last, method="lanczos", tol=1e-9, max_hvps=most)
        assert pair.hvps == hessian.products <= most
        assert not pair.converged or pair.residual < 1e-5


@pytest.mark.parametrize("most", [20, 30])
def test_all_products_are_used_before_it_gives_up(most):
    """The callback tells by their number that more of them would help."""
    last, spectrum = WarmStart(), torch.linspace(0.99, 1.0, 300)
    for _ in range(3):
        hessian = MovingHessian(torch.eye(300), spectrum, torch.ones(300), torch.float32)
        pair, last = follow_top_eigenvalue(hessian, last, method="lanczos", tol=1e-6, max_hvps=most)
        assert not pair.converged
        assert pair.hvps == most


class Asymmetric(MovingHessian):
    """Has a wrong derivative across the leading eigenvector, e₁."""

    def __matmul__(self, vector):
        product = super().__matmul__(vector)
        product[2] += 1.5 * vector[1]
        return product

    unchecked = __matmul__


def test_an_asymmetric_hessian_is_reported_at_every_measurement():
    last, spectrum = WarmStart(), torch.cat([torch.tensor([2.0]), torch.linspace(-0.1, 0.1, 60)])
    for _ in range(4):
        hessian = Asymmetric(torch.eye(61), spectrum, torch.ones(61), torch.float32)
        with pytest.warns(UserWarning, match="not symmetric"):
            pair, last = follow_top_eigenvalue(hessian, last, **LANCZOS)
        assert not pair.converged


def test_a_hessian_that_shrinks_is_followed_as_precisely():
    """Rounding is relative to what ‖H‖ is now, not to what it was."""
    followed = Several()
    for shrunk in (1.0, 1.0, 1e-5, 1e-10):
        hessian = CASES["calm"].sequence(0)[0]
        hessian._values *= shrunk
        pair = followed.measure(hessian)
        assert pair.converged
        assert pair.value == pytest.approx(shrunk * hessian.top, rel=1e-3)
        assert pair.residual <= 1e-2 * pair.value
        assert followed.last.check.scale <= 1.01 * float(hessian._values.abs().max())


@pytest.mark.parametrize("shrunk", [0.0, 1e-30, 1e-39, 1e-44])
def test_a_hessian_that_vanishes_for_one_measurement(shrunk):
    followed = Several()
    for factor in (1.0, 1.0, shrunk, 1.0, 1.0):
        hessian = CASES["calm"].sequence(0)[0]
        hessian._values *= factor
        pair = followed.measure(hessian)
        assert pair.converged
        # Below the smallest normal number, products lose all their digits.
        rounding = max(1e-3 * factor, torch.finfo(torch.float32).tiny)
        assert abs(float(hessian._values.max()) - pair.value) <= pair.residual + rounding
        assert factor == 1.0 or pair.hvps == 2


@pytest.mark.parametrize(
    "values", [[0.0], [2.0], [-2.0], [2.0, 1.0], [3.0, 2.0, 1.0], [0.0] * 5, [-1.0, -2.0, -3.0, -4.0]]
)
@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_tiny_and_vanishing_hessians(values, method):
    spectrum, last = torch.tensor(values), WarmStart()
    for _ in range(3):
        hessian = MovingHessian(torch.eye(len(values)), spectrum, torch.ones(len(values)), torch.float32)
        pair, last = follow_top_eigenvalue(hessian, last, **{**LANCZOS, "method": method})
        assert pair.converged
        assert pair.value == pytest.approx(max(values), abs=pair.residual + 1e-5)


def test_a_hessian_that_is_not_finite_is_refused():
    first, second = CASES["calm"].sequence(0)[:2]
    followed = Several()
    followed.measure(first)
    second._values[3] = torch.nan
    with pytest.raises(FloatingPointError, match="finite"):
        followed.measure(second)


def alive(size):
    """The vectors in float64 that are alive, by their place."""
    gc.collect()
    tensors = [
        each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.dtype == torch.float64
    ]
    tensors = [each for each in tensors if each.numel() % size == 0]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() / (8 * size) for each in tensors}


class Watched(MovingHessian):
    """Counts the vectors that are alive in each product, beside those of before."""

    def watch(self, vectors):
        self.vectors, self.most, self._before = vectors, 0.0, set(alive(self.space.size))

    def __matmul__(self, vector):
        self.most = max(self.most, sum(n for place, n in alive(len(vector)).items() if place not in self._before))
        return super().__matmul__(vector)

    unchecked = __matmul__


@pytest.mark.parametrize(("vectors", "least"), [(4, 4), (6, 6), (8, 6)])
def test_memory_in_a_product_is_that_of_the_basis_and_two_vectors(vectors, least):
    followed, most = Several(), []
    for hessian in CASES["crossing"].sequence(0, torch.float64, 211)[2:6]:
        hessian.__class__ = Watched
        hessian.watch(vectors)
        followed.measure(hessian)
        most.append(hessian.most)
    assert least <= max(most) <= vectors + 2


@pytest.mark.parametrize("vectors", [None, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 9])
def test_few_parameters(size, vectors):
    """No more vectors than parameters, also where more are allowed."""
    generator = torch.Generator().manual_seed(size)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    w, H, last = draw(size).requires_grad_(), draw(size, size), WarmStart()
    for _ in range(8):
        H, b = H + 0.1 * draw(size, size), draw(size)
        S = (H + H.t()) / 2
        losses = [lambda S=S, b=b: (0.5 * w @ S @ w + b @ w + 10, 1)]
        with LossHessian({"w": w}, losses, memory="low", vectors=vectors) as hessian:
            pair, last = follow_top_eigenvalue(hessian, last, **LANCZOS)
        top = float(torch.linalg.eigvalsh(S)[-1])
        assert pair.value <= top + 1e-12
        assert not pair.converged or abs(pair.value - top) <= max(1e-2 * abs(top), pair.residual + 1e-12)
