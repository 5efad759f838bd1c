"""Whether everything works on a GPU: ``python -m benchmarks device``, a Markdown report to paste into an issue.

* ``trainings``: small trainings, and fits on a device
* ``environment``: which devices there are, versions, flags, what the device has
* ``compare``: every metric on the CPU and on the device
* ``report``: all of it
* ``memory``: what a measurement takes on a stand-in for a device, ``python -m benchmarks device_memory``
"""

from benchmarks.device.environment import choose
from benchmarks.device.report import report

__all__ = ["choose", "report"]
