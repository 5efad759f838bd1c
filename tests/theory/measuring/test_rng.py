"""`isolated_rng`: random numbers inside repeat, and those outside do not change."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from lightning_normtheory.measuring.rng import isolated_rng


def draw() -> tuple:
    return random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.randn(()))


def states() -> tuple:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def test_outside_nothing_is_noticed():
    draw()
    before = states()
    with isolated_rng(3):
        draw()
        assert states() != before
    assert states() == before


def test_inside_everything_repeats():
    with isolated_rng(3):
        first = draw()
    draw()
    with isolated_rng(3):
        assert draw() == first
    with isolated_rng(4):
        second = draw()
    assert all(a != b for a, b in zip(first, second))


def test_nested():
    with isolated_rng(1):
        expected = (draw(), draw())
    with isolated_rng(1):
        first = draw()
        with isolated_rng(2):
            draw()
        assert (first, draw()) == expected


def fail_inside(before: list) -> None:
    with isolated_rng():
        before.append(draw())
        raise KeyError("inside")


def test_an_exception_restores_too():
    before, drawn = states(), []
    with pytest.raises(KeyError, match="inside"):
        fail_inside(drawn)
    assert len(drawn) == 1
    assert states() == before


def test_seeding_inside_is_undone():
    before = states()
    with isolated_rng():
        random.seed(9)
        np.random.seed(9)
        torch.manual_seed(9)
    assert states() == before


def test_a_pending_normal_deviate_survives():
    # random.gauss and numpy's legacy normal store a second value, which is part of the state.
    random.gauss(0, 1)
    np.random.randn()
    before = states()
    with isolated_rng():
        random.gauss(0, 1)
        np.random.randn()
    assert states() == before


def test_a_float_seed_sequence_is_not_shared_with_generators_of_the_user():
    own = (random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1))
    with isolated_rng(3):
        first = (own[0].random(), own[1].random(), float(torch.rand((), generator=own[2])))
    again = (random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1))
    assert first == (again[0].random(), again[1].random(), float(torch.rand((), generator=again[2])))


def test_cuda_is_not_initialized():
    with isolated_rng():
        pass
    assert not torch.cuda.is_initialized()


def test_numpy_is_not_needed():
    """It works in a process where numpy cannot be imported."""
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import random, torch\n"
        "from lightning_normtheory.measuring.rng import isolated_rng\n"
        "before = torch.get_rng_state(), random.getstate()\n"
        "with isolated_rng():\n"
        "    torch.rand(1), random.random()\n"
        "assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=os.environ)
