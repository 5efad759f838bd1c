"""Processes with a device each, connected by a backend that takes tensors of the device only, as NCCL does."""

import os
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch._C._distributed_c10d import Work, _create_work_from_future
from torch.futures import Future

from support.accelerator.trainer import StandinAccelerator

NAME = "deviceonly"
DEVICE = "standin"


class DeviceGroup(dist.ProcessGroup):
    """Gloo on copies in the host's memory. Refuses tensors that are there already, with NCCL's error."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def _device_types(self) -> list[torch.device]:  # which torch sends pickled objects by
        return [torch.device(DEVICE)]

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def getBackendName(self) -> str:  # torch's
        return NAME

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        copies, ours = _on_host(tensors), dist.AllreduceOptions()
        mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG  # Gloo cannot average integers
        if opts is not None and not mean:
            ours.reduceOp = opts.reduceOp
        self._gloo.allreduce(copies, ours).wait()
        if mean:
            copies = [torch.div(copy, self.size(), rounding_mode=_rounding(copy)) for copy in copies]
        return _done(tensors, copies)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        copies = _on_host(tensors)
        self._gloo.broadcast(copies, opts or dist.BroadcastOptions()).wait()
        return _done(tensors, copies)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        copies = [_on_host(each) for each in outputs]
        self._gloo.allgather(copies, _on_host(inputs)).wait()
        return _done([*chain(*outputs)], [*chain(*copies)])

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Work:
        return self.allgather([list(output.view(self.size(), -1).unbind())], [own.view(-1)])

    all_gather_single = _allgather_base  # its name in newer versions of torch

    def barrier(self, opts: Any = None) -> Work:
        self._gloo.barrier().wait()
        return _done([], [])


def _on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        if tensor.device.type != DEVICE:
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
    return [tensor.cpu() for tensor in tensors]


def _rounding(tensor: torch.Tensor) -> str | None:
    return None if tensor.is_floating_point() else "trunc"


def _done(tensors: list[torch.Tensor], results: list[torch.Tensor]) -> Work:
    for tensor, result in zip(tensors, results):
        tensor.copy_(result)
    future: Future = Future()
    future.set_result(list(tensors))
    return _create_work_from_future(future)


class DeviceDDP(DDPStrategy):
    """DDP on the stand-in. Lightning believes that every other device than a CPU is CUDA."""

    def determine_ddp_device_ids(self) -> None:
        return None


def arguments(**options: Any) -> dict[str, Any]:
    """Return what a `Trainer` needs to train in ``devices`` processes, forked from this one."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # torch's flight recorder cannot record a group that is written in python
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, DeviceGroup, devices=[DEVICE])
    strategy = DeviceDDP(start_method="fork", process_group_backend=NAME, **options)
    return {"accelerator": StandinAccelerator(), "strategy": strategy}
