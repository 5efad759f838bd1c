"""The messages between processes: whatever one of them does, the others hear of it, and nothing is kept."""

import contextlib
import gc
import os
import signal
import socket
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import multiprocessing

from lightning_normtheory.callbacks.measurement.ranks import TrainerProcesses, stopped_together
from lightning_normtheory.measuring.processes import FailedElsewhereError, OutOfMemoryElsewhereError, Refusal

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch cannot distribute")


class Large:
    """What an attempt holds on to."""


def _run(rank, count, port, action):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    patience = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=patience)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    action(TrainerProcesses(SimpleNamespace(global_rank=rank, world_size=count, strategy=strategy)))
    torch.distributed.destroy_process_group()


def in_processes(action, count=2):
    """Every assertion that fails in one of them fails here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(_run, (count, port, action), nprocs=count, start_method="fork")


def test_sums_are_those_of_all():
    def action(processes):
        assert processes.sum(torch.tensor([1.0, processes.rank])).tolist() == [3.0, 3.0]
        assert processes.run_on_all(lambda: processes.rank) == processes.rank
        assert not processes.end(failed=False)

    in_processes(action, 3)


def test_a_signal_to_one_process_stops_all():
    def action(processes):
        noted = []
        signal.signal(signal.SIGTERM, lambda *arguments: noted.append("the signal"))

        def measure(wait):
            with stopped_together():
                assert processes.sum(torch.ones(1)) == 3
                if processes.rank == 1:
                    signal.raise_signal(signal.SIGTERM)
                    assert not noted  # its handler may exchange messages
                wait()

        for wait in (lambda: processes.sum(torch.ones(1)), lambda: processes.end(failed=False)):
            with pytest.raises(SIGTERMException):
                measure(wait)
            assert noted == ["the signal"] * (processes.rank == 1)
            noted.clear()
            assert processes.sum(torch.ones(1)) == 3  # all are in step

    in_processes(action, 3)


def test_the_gravest_error_is_raised_everywhere():
    """A refusal by one process is returned in all; an error of another process counts for more."""
    errors = {1: MemoryError, 2: RuntimeError}

    def refuse_or_raise(rank, *ranks):
        if rank in ranks and rank in errors:
            raise errors[rank]("mine")
        return Refusal(0) if rank in ranks else "result"

    def action(processes):
        rank = processes.rank
        assert processes.run_on_all(lambda: refuse_or_raise(rank, 0)) == Refusal(0)
        assert processes.run_on_all(lambda: Refusal(rank) if rank else "result") == Refusal(2)
        with pytest.raises(MemoryError) as caught:
            processes.run_on_all(lambda: refuse_or_raise(rank, 0, 1))
        assert (type(caught.value) is OutOfMemoryElsewhereError) == (rank != 1)
        with pytest.raises(RuntimeError) as failed:
            processes.run_on_all(lambda: refuse_or_raise(rank, 0, 1, 2))
        assert (type(failed.value) is FailedElsewhereError) == (rank != 2)
        assert processes.sum(torch.ones(1)) == 3  # and all are in step again

    in_processes(action, 3)


def test_who_ends_early_is_heard_in_the_next_sum():
    def action(processes):
        failed = processes.rank == 1
        if not failed:
            with pytest.raises(FailedElsewhereError):
                processes.sum(torch.ones(5))
        assert processes.end(failed=True)
        assert processes.sum(torch.ones(1)) == 2

    in_processes(action)


def test_processes_that_are_about_to_add_up_different_things_are_stopped():
    def action(processes):
        with pytest.raises(FailedElsewhereError):
            processes.sum(torch.ones(5 * processes.rank + 5))
        if processes.rank == 2:  # one more agreement than the others, which add up already
            with pytest.raises(FailedElsewhereError):
                processes.run_on_all(lambda: None)
        else:
            with pytest.raises(FailedElsewhereError):
                processes.sum(torch.ones(4))
        assert processes.sum(torch.ones(1)) == 3

    in_processes(action, 3)


def test_a_refusal_stops_a_process_that_adds_up():
    def action(processes):
        with pytest.raises(FailedElsewhereError):
            processes.run_on_all(lambda: Refusal(1)) if processes.rank else processes.sum(torch.ones(5))
        assert processes.sum(torch.ones(1)) == 2

    in_processes(action)


def test_what_a_failed_attempt_held_is_let_go_at_once():
    held = []

    def attempt():
        large = Large()
        held.append(weakref.ref(large))
        raise MemoryError

    def action(processes):
        gc.disable()  # a cycle would be freed some time, not before the next attempt
        for _ in range(2):
            with contextlib.suppress(MemoryError):
                processes.run_on_all(attempt)
            assert held[-1]() is None

    in_processes(action)
