"""``python -m benchmarks device`` on a device that is none."""

import re
import sys
from pathlib import Path

import pytest
import torch

from support.accelerator import device as standin
from support.accelerator import on_device, trainer

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@on_device("cuda", "mps")
def test_it_finds_no_difference(device):
    sys.path.insert(0, str(ROOT))
    from benchmarks.device import report

    lines, names = [], ["MLP with noise", "BatchNorm conv net", "LSTM"]
    device_options = {"where": trainer.arguments, "limited": standin.memory_limit, "limits": [8, 12]}
    found = report(device, names=names, width=16, **device_options, show=lines.append)
    text = "\n".join(lines)
    assert found == 0, text
    assert "**0 differences**" in text
    assert re.search(r"\| MLP with noise \| \d+ \| 0 \| 0 \| 0 \|", text)
    assert "| BatchNorm conv net | equal | equal |" in text
    passes = re.search(r"(\d+) calls of autograd on the device, (\d+) on the CPU", text)
    assert passes[1] == passes[2]
    assert "gradients computed sample by sample: none" in text
    assert "nan G" not in text
    assert ("only what is allocated at the moment" in text) == (standin.kind() == "mps")
    assert "cuDNN" not in text
    assert re.search(r"\| 8 × \| as without the callbacks \| \d+ of \d+, without normtheory/hessian_lambda_max, ", text)


@pytest.fixture
def run(monkeypatch):
    """The command, on a machine with these accelerators."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import __main__, device

    def run(accelerators, *arguments):
        monkeypatch.setattr(sys.modules["benchmarks.device.environment"], "_accelerators", lambda: accelerators)
        monkeypatch.setattr(sys, "argv", ["benchmarks", "device", *arguments])
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        return ended.value.code

    monkeypatch.setattr(device, "report", lambda device: 3 if device == torch.device("cuda", 1) else 0)
    return run


def test_without_an_accelerator_it_says_so(run, capsys):
    assert run({}) == 2
    said = capsys.readouterr()
    assert "no accelerator on this machine" in said.err
    assert said.out == ""


@pytest.mark.parametrize("name", ["mps", "foo", "cuda:2", "", "meta", "cuda:x"])
def test_a_device_that_is_not_there_is_an_error_in_one_line(run, capsys, name):
    assert run({"cuda": 2}, "--device", name) == 2
    said = capsys.readouterr()
    assert said.err == f"--device: expected a device of this machine (cpu, cuda:0, cuda:1), got {name!r}.\n"
    assert said.out == ""


def test_the_exit_code_says_whether_something_differs(run):
    assert run({"cuda": 2}) == run({"cuda": 2}, "--device", "cpu") == 0
    assert run({"cuda": 2}, "--device", "cuda:1") == 1


def test_numbers_of_another_kind_of_device_are_not_shown(run, monkeypatch):
    from benchmarks.device.environment import environment

    found = environment(torch.device("cpu"))
    assert not {"libraries", "driver", "flags"} & set(found)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    monkeypatch.setenv("PATH", "")
    assert "commit" not in environment(torch.device("cpu"))


def test_the_metrics_that_are_missing_are_named(run):
    from benchmarks.device.compare import not_finite
    from benchmarks.device.report import _few

    nan = float("nan")
    assert not_finite({"a": 1.0, "b": nan, "d": nan}, {"a": 2.0, "b": 1.0, "c": 1.0, "d": nan}) == ["b", "c"]
    assert _few(["b", "c"]) == "b, c"
    assert _few(["p/max", "p/max_residual", "p/trace"]) == "p/max, p/trace and 1 more"
