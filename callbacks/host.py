"""One callback class for both packages that Lightning is published under."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__all__ = ["HostCallback"]

if TYPE_CHECKING:
    from pytorch_lightning import Callback as HostCallback
else:
    # A trainer of `lightning` accepts a callback of `pytorch_lightning` in a list, but neither as a bare argument nor
    # from LightningCLI. A class with both bases passes everywhere.
    _packages = [name for name in ("pytorch_lightning", "lightning.pytorch") if find_spec(name.split(".")[0])]

    class HostCallback(*(import_module(name).Callback for name in _packages)):
        """A callback of every Lightning package that is installed."""
