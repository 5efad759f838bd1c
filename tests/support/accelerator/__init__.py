"""A stand-in for a GPU, so that device code is tested where there is none: the device "standin".

It is torch's PrivateUse1 on host memory, for Linux, built from ``standin.cpp`` when the first test asks for it (10
seconds; later runs find it in the temporary folder). A process has one kind of device, ``"cuda"`` or ``"mps"``, for all
its life. So a device test runs in a process of its kind, which is started once and kept::

    from support.accelerator import on_device

    @on_device("cuda", "mps")
    def test_something(device):              # device is torch.device("standin:0"), in the other process
        model = nn.Linear(3, 2).to(device)
        assert ...

    @on_device("cuda")
    @pytest.mark.parametrize("width", [1, 8])
    def test_with_arguments(device, width, tmp_path): ...

The body runs there from begin to end, in the same working directory. Parameters and fixtures are sent: they must be
picklable, so ``monkeypatch`` and the like are not for it. A failed assertion comes back with its traceback. Each call
starts with the generators seeded, no memory limit, TF32 off, cuDNN on. ``run(kind, function, *arguments)`` calls a
function of a module there, with ``device`` as a keyword, and returns what it returns.

In the body::

    from support.accelerator import device as standin, trainer   # at the head of the test's module

    standin.kind()                           # "cuda" or "mps"
    torch.get_device_module(device)          # has what torch.cuda or torch.mps has
    with standin.memory_limit(10_000): ...   # out of memory beyond 10,000 further bytes, with the error of the kind
    with standin.failing_allocation(7): ...  # the seventh allocation runs out of memory
    standin.peak(function)                   # by how many bytes the allocated memory grows, at most
    with standin.synchronizations() as seen: ...  # seen.counts: {"item": 3, "copy to host": 2}
    with standin.synchronizations(inside="hessian/") as seen: ...   # and seen.places, lines of files with this path
    with standin.tf32(): ...                 # products round their operands to 10 bits; torch's flags say so
    Trainer(**trainer.arguments())           # one device, for pytorch_lightning

Lightning makes mixed precision for CUDA, whatever the device: pass ``plugins=MixedPrecision("bf16-mixed",
device=device.type)`` instead of ``precision=``, which does nothing here.

What it imitates:

- mixed devices are refused, as by CUDA; MPS also refuses float64, with its TypeError, and a copy to float64 on the CPU;
- CUDA's label or index out of bounds ends the context: every later call fails (until the next test);
- random numbers come from generators of the device; ``torch.Generator("standin")`` makes one;
- autograd's nodes. cuDNN: BatchNorm, LSTM, GRU and RNN; with cuDNN off the fused cells. MPS: Linear, MaxPool2d, LSTM.
  Both: the fused WeightNorm and dropout. Those without a second derivative have none here either;
- autocast, and what a GradScaler needs;
- memory: allocated, peak, free, out of memory with the error of the kind.

What it does not: speed, asynchrony, the rounding of other kernels, the memory inside a kernel, several devices. A
module that is moved has new parameters, though tied ones stay tied; on CUDA they are the same objects.

- ``build``: the compiler's call; why the stand-in cannot be built here.
- ``process``: `on_device`, `run`, and the processes that they keep.
- ``device``: the device in such a process, and what tests ask of it.
- ``cudnn``, ``mps``, ``recurrent``, ``autocast``: kernels that give autograd the nodes of the real devices.
- ``trainer``: Lightning's accelerator.
"""

from support.accelerator.process import KINDS, on_device, run

__all__ = ["KINDS", "on_device", "run"]
