"""`isolated_rng`: random numbers inside repeat, and those outside do not change."""

import contextlib
import os
import random
import subprocess
import sys
from types import ModuleType

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


class DeviceType:
    """Install a device type in torch whose generators are those of the CPU; ``module`` is what torch.cuda is."""

    def __init__(self, monkeypatch, devices, *, of_all=True, initialized=True):
        self.generators, self.current = [torch.Generator().manual_seed(40 + i) for i in range(devices)], 0
        self.module = ModuleType("torch.other")
        self.module.device_count = lambda: devices
        self.module.manual_seed = lambda seed: self.generators[self.current].manual_seed(seed)
        if devices == 1:  # as torch.mps, which knows no other device
            self.module.get_rng_state = lambda: self.generators[0].get_state()
            self.module.set_rng_state = lambda state: self.generators[0].set_state(state)
        else:
            self.module.get_rng_state = lambda device: self.generators[device].get_state()
            self.module.set_rng_state = lambda state, device: self.generators[device].set_state(state)
            self.module.device = self.at
        if of_all:
            self.module.get_rng_state_all = self.states
            self.module.set_rng_state_all = lambda states: [g.set_state(s) for g, s in zip(self.generators, states)]
            self.module.manual_seed_all = lambda seed: [g.manual_seed(seed) for g in self.generators]
        if not initialized:
            self.module.is_initialized = lambda: False
        monkeypatch.setattr(torch, "other", self.module, raising=False)

    @contextlib.contextmanager
    def at(self, device):
        before, self.current = self.current, device
        yield
        self.current = before

    def states(self):
        return [generator.get_state() for generator in self.generators]

    def draw(self):
        return [float(torch.rand((), generator=generator)) for generator in self.generators]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("of_all", [True, False])
def test_every_device_of_every_type_is_seeded_and_restored(monkeypatch, devices, of_all):
    there = DeviceType(monkeypatch, devices, of_all=of_all)
    expected = DeviceType(monkeypatch, devices).draw()
    monkeypatch.setattr(torch, "other", there.module)
    with isolated_rng(3):
        first = there.draw()
    assert len(set(first)) == 1
    with isolated_rng(3):
        assert there.draw() == first
    assert there.draw() == expected
    assert there.current == 0


def test_a_device_type_that_is_not_initialized_is_not_touched(monkeypatch):
    there = DeviceType(monkeypatch, 2, initialized=False)
    before = there.draw()
    for name in set(vars(there.module)) - {"is_initialized", "__name__"}:
        setattr(there.module, name, None)
    with isolated_rng(3):
        pass
    assert before == DeviceType(monkeypatch, 2).draw()


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
