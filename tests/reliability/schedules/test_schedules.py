"""Measuring by steps changes nothing in any schedule, and gives the numbers of the same step measured by epochs."""

import warnings
from functools import cache

import pytest

from reliability.schedules.schedule_cases import SCHEDULES, due, run
from reliability.schedules.witness import different, first_difference

EVERY = (1, 3, 7)
QUICK = (
    ("accumulation of 4, the last window cut short", 1),
    ("one player on the sum of three batches", 7),
    ("endless", 7),
)
TABLE = [
    pytest.param(name, n, marks=() if (name, n) in QUICK else pytest.mark.slow) for name in SCHEDULES for n in EVERY
]


@cache
def by_steps(name, n=None):
    """A run measured every n steps; without a callback if n is None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(name, [] if n is None else SCHEDULES[name].watch(every_n_steps=n))


@cache
def by_epochs(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(name, SCHEDULES[name].watch(every_n_epochs=1))


@pytest.mark.parametrize(("name", "n"), TABLE)
def test_training_is_bitwise_the_same(name, n):
    bare, watched = by_steps(name), by_steps(name, n)
    assert first_difference(bare.seen, watched.seen) == ""
    assert first_difference(bare.users, watched.users) == ""


@pytest.mark.parametrize(("name", "n"), TABLE)
def test_the_rows_come_at_the_right_steps(name, n):
    found = by_steps(name, n)
    measured = due(name, found, n)
    assert measured or found.steps[-1] < n
    for rows in found.rows.values():
        assert list(rows) == [found.steps[batch] for batch in measured]
    # In a logger, beside what the user logs in the same batch.
    assert found.logged == [found.places[batch] for batch in measured for _ in found.rows]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == QUICK[0][0] else pytest.mark.slow) for name in SCHEDULES],
)
def test_rows_by_steps_are_those_by_epochs(name):
    expected = by_epochs(name)
    last = expected.steps[-1]
    every = SCHEDULES[name].epoch or last
    found = by_steps(name, every)
    for prefix, rows in found.rows.items():
        assert sorted(rows) == list(range(every, last + 1, every))
        for step, row in rows.items():
            assert different(expected.rows[prefix][step], row) == []
            assert found.epochs[prefix][step] == expected.epochs[prefix][step]


# What depends on earlier measurements: on the last loss, the largest change of the kernel so far, and the vector with
# which the iteration of the Hessian starts.
BEFORE = ("loss_ratio", "certificate_rate_measured", "ntk_change_max")
WARM_START = ("hessian_lambda_max", "hessian_edge_distance", "hessian_stability_limit_distance")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_do_not_depend_on_how_often_they_are_measured(name):
    each, third = by_steps(name, 1), by_steps(name, 3)
    compared = 0
    for prefix, rows in third.rows.items():
        dependent = tuple(f"{prefix}/{metric}" for metric in BEFORE + WARM_START)
        for step, found in rows.items():
            expected = each.rows[prefix][step]
            independent = [
                {metric: value for metric, value in row.items() if not metric.startswith(dependent)}
                for row in (expected, found)
            ]
            assert different(*independent) == []
            compared += len(independent[0])
            top = f"{prefix}/hessian_lambda_max"
            error = expected[f"{top}_residual"] + found[f"{top}_residual"]
            assert abs(expected[top] - found[top]) <= error + 1e-6 * abs(expected[top])
    assert compared > 10
