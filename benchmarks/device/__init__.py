"""Whether everything works on a GPU: ``python -m benchmarks device``, a Markdown report to paste into an issue.

* ``trainings``: small trainings, and fits on a device
* ``environment``: versions, flags, what the device has
* ``compare``: every metric on the CPU and on the device
* ``report``: all of it
"""

from benchmarks.device.report import main, report

__all__ = ["main", "report"]
