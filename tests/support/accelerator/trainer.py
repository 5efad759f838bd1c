"""Lightning's trainer on the stand-in."""

from typing import Any

import torch
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.strategies import SingleDeviceStrategy

__all__ = ["StandinAccelerator", "arguments"]


class StandinAccelerator(Accelerator):
    """The device "standin" as Lightning knows devices."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> list[torch.device]:
        return [torch.device("standin", 0)] * int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("standin", 0)] * (devices if isinstance(devices, int) else len(devices))

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "standin"

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        return {}


def arguments() -> dict[str, Any]:
    """Return what a `Trainer` needs to train on the device."""
    strategy = SingleDeviceStrategy(device=torch.device("standin", 0))
    return {"accelerator": StandinAccelerator(), "strategy": strategy, "devices": 1}
