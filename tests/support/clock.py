"""A clock that the tests control."""

from types import SimpleNamespace

NOW = SimpleNamespace(seconds=0.0)


def stop_clock(monkeypatch, *modules):
    """Stop the clock of some modules; it advances only where a test waits."""
    NOW.seconds = 0.0
    for module in modules:
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: NOW.seconds))


def wait(seconds):
    NOW.seconds += seconds
