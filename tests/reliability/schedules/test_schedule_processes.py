"""Measuring by steps in two processes."""

import warnings
from functools import cache

import pytest
import torch

from reliability.schedules.schedule_cases import SCHEDULES, due, run
from reliability.schedules.witness import different, first_difference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch cannot distribute"),
]
# The optimizer steps of an epoch. Each process has four batches; both read all of a stream.
EPOCHS = {
    "accumulation of 3, no validation": 2,
    "one player on the sum of three batches": 5,
    "iterable": 7,
    "endless": 15,
    "shuffled, 2 workers": 4,
}


@cache
def in_two(name, **schedule):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(name, SCHEDULES[name].watch(**schedule) if schedule else [], processes=2)


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("name", EPOCHS)
def test_training_in_two_processes_is_not_disturbed(name, n):
    bare, watched = in_two(name), in_two(name, every_n_steps=n)
    assert first_difference(bare.seen, watched.seen) == ""
    assert first_difference(bare.users, watched.users) == ""
    for rows in watched.rows.values():
        assert list(rows) == [watched.steps[batch] for batch in due(name, watched, n, processes=2)]


@pytest.mark.parametrize("name", EPOCHS)
def test_rows_by_steps_are_those_by_epochs(name):
    by_epochs, by_steps = in_two(name, every_n_epochs=1), in_two(name, every_n_steps=EPOCHS[name])
    assert by_steps.rows
    for prefix, rows in by_steps.rows.items():
        assert rows
        for step, row in rows.items():
            assert different(by_epochs.rows[prefix][step], row) == []
