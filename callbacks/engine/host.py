"""One callback base class for both Lightning packages, `pytorch_lightning` and `lightning`."""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["HostCallback"]

if TYPE_CHECKING:
    from pytorch_lightning import Callback as HostCallback
else:
    # A trainer of `lightning` accepts a callback of `pytorch_lightning` in a list, but neither as a bare argument nor
    # from LightningCLI. A class with both bases passes everywhere.
    _bases = [import_module("pytorch_lightning").Callback]
    with suppress(ImportError):
        _bases.append(import_module("lightning.pytorch").Callback)

    class HostCallback(*_bases):
        """A callback of every Lightning package that is installed."""
