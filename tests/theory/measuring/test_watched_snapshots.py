"""Several snapshots of one large container, and other threads that change it."""

import gc
import signal
import threading
from collections import deque
from typing import Any

import pytest

from lightning_normtheory.measuring import snapshot as snapshots
from lightning_normtheory.measuring import watched, watched_types
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.snapshot import Snapshot
from lightning_normtheory.measuring.watched import MANY, shared_copies

from support.measuring.large_containers import (
    CONTAINERS,
    as_dict,
    identities,
    keys,
    look,
    make,
    model_with,
    plain,
    write_sampled,
)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_another_thread_keeps_what_it_puts_in(kind):
    buffer = make(kind, "dict")
    model = model_with(buffer)
    entries = plain(buffer)
    new = [as_dict(i) for i in range(50)]

    def collect() -> None:
        for i, entry in enumerate(new):
            buffer.update({f"new {i}": entry}) if kind == "dict" else buffer.append(entry)

    with preserve_state(model) as reset:
        write_sampled(model.memory.buffer)
        thread = threading.Thread(target=collect)
        thread.start()
        write_sampled(model.memory.buffer)
        thread.join()
        reset()
        write_sampled(model.memory.buffer)
    assert model.memory.buffer is buffer
    expected = [*(entries.values() if kind == "dict" else entries), *new][-len(buffer) :]
    assert list(map(id, buffer.values() if kind == "dict" else buffer)) == list(map(id, expected))
    assert len(buffer) == MANY + 10 + (0 if kind == "full deque" else len(new))


def test_another_thread_may_change_a_list_while_it_is_copied_and_compared():
    buffer, done = [(float(i),) for i in range(2 * MANY)], threading.Event()

    def collect() -> None:
        while not done.is_set():
            buffer.extend([()] * 100)
            if len(buffer) > 50 * MANY:
                del buffer[2 * MANY :]

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        for _ in range(20):
            places = [buffer]
            snapshot = Snapshot(places)
            places[0].reverse()
            snapshot.reset()
            snapshot.restore()
            assert places[0] is buffer
    finally:
        done.set()
        thread.join()
    assert [entry[0] for entry in buffer[: 2 * MANY]] == list(range(2 * MANY))


def test_snapshots_of_two_models_lend_the_same_copy():
    buffer = make("dict", "dict")
    first, second = model_with(buffer), model_with(buffer)
    before = look(buffer)
    with preserve_state(first):
        with preserve_state(second):
            assert first.memory.buffer is second.memory.buffer is not buffer
            write_sampled(second.memory.buffer)
        assert second.memory.buffer is buffer
        write_sampled(first.memory.buffer)
    assert first.memory.buffer is buffer
    assert look(buffer) == before


@pytest.mark.parametrize("ends", ["restore", "close"])
def test_snapshots_that_end_in_any_order(ends):
    places = [buffer := make("list", "dict")]
    before = look(buffer)
    first, second, third = Snapshot(places), Snapshot(places), Snapshot(places)
    copied = places[0]
    write_sampled(copied)
    copied.clear()
    getattr(first, ends)()
    second.reset()
    assert places[0] is copied
    third.restore()
    assert places[0] is copied
    second.restore()
    assert places[0] is buffer
    assert look(buffer) == before
    assert not watched_types.watched


def test_a_snapshot_within_reach_of_another_one():
    """As a function that resets the model is, while the model's methods are replaced."""
    buffer = make("deque", "dict")
    model = model_with(buffer)
    with preserve_state(model) as reset:
        model.reset = reset
        with preserve_state(model):
            model.memory.buffer.clear()
        assert model.memory.buffer is not buffer
        model.memory.buffer.clear()
    assert model.memory.buffer is buffer
    assert len(buffer) == MANY + 10


def test_an_interrupt_while_copies_are_lent(monkeypatch):
    def interrupted(original: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return watched.lend(original)

    buffer = make("list", "dict")
    model = model_with(buffer)
    monkeypatch.setattr(snapshots, "lend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Snapshot(model)
    assert model.memory.buffer is model.again[0]["memory"] is buffer
    assert not watched_types.watched


CHANGES = {
    "nothing": lambda b: None,
    "one": lambda b: [b.__setitem__(key, None) for key in list(keys(b))[4:5]],
    "more": lambda b: b.update(new=1) if isinstance(b, dict) else b.extend([1, 2]),
    "fewer": lambda b: [b.__delitem__(key) for key in list(keys(b))[:89:-1]],
    "others": lambda b: [b.__setitem__(key, as_dict(1)) for key in keys(b)],
    "empty": lambda b: b.clear(),
}


@pytest.mark.parametrize("kind", ["list", "deque", "dict"])
@pytest.mark.parametrize("third", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("second", CHANGES.values(), ids=CHANGES)
def test_snapshots_in_each_other(kind, second, third):
    """Of different states of a container."""
    places = [buffer := make(kind, "dict")]
    before = identities(buffer)
    first = Snapshot(places)
    second(places[0])
    expected = identities(places[0])
    inner = Snapshot(places)
    for _ in range(2):
        third(places[0])
        inner.reset()
        assert identities(places[0]) == expected
    inner.restore()
    assert identities(places[0]) == expected
    first.reset()
    assert identities(places[0]) == before
    first.restore()
    assert places[0] is buffer
    assert identities(buffer) == before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_copy_is_lent_again(kind, change):
    """In the next snapshot of a measurement, unless the original is of another length or has other ends."""
    places = [buffer := make(kind, "dict")]
    with shared_copies():
        copies = []
        for _ in range(3):
            snapshot = Snapshot(places)
            copies.append(places[0])
            assert identities(places[0]) == identities(buffer)
            change(places[0])
            snapshot.restore()
        assert copies[0] is copies[1] is copies[2]
        buffer.popitem() if kind == "dict" else buffer.pop()
        snapshot = Snapshot(places)
        assert places[0] is not copies[0]
        assert identities(places[0]) == identities(buffer)
        snapshot.restore()
    assert watched._copies is None


def test_a_copy_that_was_not_restored_is_not_lent_again():
    places = [buffer := make("deque", "dict")]
    with shared_copies():
        snapshot = Snapshot(places)
        places[0][500] = None
        snapshot.close()
        assert places[0] is buffer
        snapshot = Snapshot(places)
        assert places[0][500] is buffer[500] is not None
        snapshot.restore()


def test_a_snapshot_that_is_dropped_takes_its_copies_back():
    places = [buffer := make("deque", "dict")]
    snapshot = Snapshot(places)
    assert places[0] is not buffer
    del snapshot
    gc.collect()
    assert places[0] is buffer
    assert type(buffer) is deque
