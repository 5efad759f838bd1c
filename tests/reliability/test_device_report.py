"""``python -m benchmarks device`` on a device that is none."""

import sys
from pathlib import Path

import pytest

from support.accelerator import device as standin
from support.accelerator import on_device, trainer

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@on_device("cuda", "mps")
def test_it_finds_no_difference(device):
    sys.path.insert(0, str(ROOT))
    from benchmarks.device import report

    lines, names = [], ["MLP with noise", "BatchNorm conv net", "LSTM"]
    device_options = {"where": trainer.arguments, "limited": standin.memory_limit, "limits": [12]}
    found = report(device, names=names, width=16, **device_options, show=lines.append)
    text = "\n".join(lines)
    assert found == 0, text
    assert "**0 differences**" in text
    assert "| BatchNorm conv net | equal | equal |" in text
    assert "gradients computed sample by sample: none" in text
    assert "nan G" not in text


def test_without_an_accelerator_it_says_so(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import device

    monkeypatch.setattr(sys.modules["benchmarks.device.report"], "_accelerator", lambda: None)
    assert device.main(None) == 1
    assert "no accelerator on this machine" in capsys.readouterr().out
