"""Run device tests in processes that have the device: one for each kind, started when needed and kept."""

import atexit
import contextlib
import functools
import inspect
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from support.accelerator.build import library, reason_against

__all__ = ["KINDS", "on_device", "run"]

KINDS = ("cuda", "mps")
PATIENCE = 900.0  # seconds after which a call counts as hanging


class DeviceError(AssertionError):
    """An error in the process of a device, with its traceback there."""


def on_device(*kinds: str) -> Callable[[Callable], Callable]:
    """Let a test run on a device of each kind: its argument ``device`` is the device, in the process that has it."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def there(device: str, **arguments: Any) -> None:
            __tracebackhide__ = True
            run(device, test, **arguments)

        return pytest.mark.parametrize("device", kinds)(there)

    return decorate


def run(kind: str, function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """Call a function of a module in the process of this kind of device, and return what it returns.

    If it has an argument ``device``, it is given the device.
    """
    __tracebackhide__ = True
    if reason := reason_against():
        pytest.skip(reason)
    return _process(kind).call(function, arguments, keywords)


@functools.cache
def _process(kind: str) -> "Process":
    return Process(kind)


class Process:
    """A process with a device, which calls functions until this process ends."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.process: Any = None
        atexit.register(self.stop)

    def call(self, function: Callable, arguments: tuple, keywords: dict) -> Any:
        __tracebackhide__ = True
        if self.process is None:
            self._start()
        place = (function.__module__, function.__qualname__)
        try:
            self.connection.send((sys.path, os.getcwd(), place, arguments, keywords))
            if not self.connection.poll(PATIENCE):
                self.stop()
                raise DeviceError(f"{place[1]} did not end within {PATIENCE:g} s on the {self.kind}-like device")
            result, error = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code, self.process = self.process.exitcode, None
            raise DeviceError(f"the process of the {self.kind}-like device ended with {code} in {place[1]}") from None
        if error is not None:
            raise DeviceError(f"on the {self.kind}-like device:\n{error}")
        return result

    def _start(self) -> None:
        path = library()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.kind, path, theirs))
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        if self.process is not None:
            self.connection.close()  # an idle one ends by itself
            self.process.join(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with all that it has started
            self.process.join()
            self.process = None


def _serve(kind: str, path: Any, connection: Any) -> None:
    """Call what is asked for, in this process, until the connection closes."""
    os.setsid()
    device = import_module("support.accelerator.device")
    device.start(kind, path)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            paths, folder, (module, name), arguments, keywords = connection.recv()
            sys.path[:] = paths
            os.chdir(folder)
            device.reset()
            try:
                answer = (_call(module, name, arguments, keywords), None)
            except BaseException:  # noqa: BLE001  # pytest's failures too: the other process raises it
                answer = (None, traceback.format_exc())
            connection.send(answer)


def _call(module: str, name: str, arguments: tuple, keywords: dict) -> Any:
    function = inspect.unwrap(functools.reduce(getattr, name.split("."), import_module(module)))
    if "device" in inspect.signature(function).parameters:
        keywords["device"] = import_module("support.accelerator.device").DEVICE
    return function(*arguments, **keywords)
