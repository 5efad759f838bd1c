"""Every diagnostic on a CUDA-like and an MPS-like device, against the CPU.

- ``device_models``: the table of trainings.
- ``device_cases``: one training on the CPU and on a device, and what differs.
- ``tolerances``: how far apart two numbers may be.
"""
