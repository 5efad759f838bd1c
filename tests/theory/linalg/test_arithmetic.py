"""How products of float32 matrices are rounded, and torch's flags for it."""

import contextlib

import pytest
import torch

from lightning_normtheory.linalg import arithmetic
from lightning_normtheory.linalg.arithmetic import operand_eps, product_eps, without_autocast, without_tf32


@pytest.fixture
def forget():
    arithmetic._operand_eps.cache_clear()
    yield
    arithmetic._operand_eps.cache_clear()


def test_a_cpu_rounds_results_only(forget):
    assert operand_eps("cpu", torch.float32) == 0.0
    assert product_eps("cpu", torch.float32) == torch.finfo(torch.float32).eps
    with torch.autocast("cpu"):
        arithmetic._operand_eps.cache_clear()
        assert operand_eps("cpu", torch.float32) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(forget, dtype):
    """With precision="bf16-true", Lightning runs steps with another default."""
    torch.set_default_dtype(dtype)
    try:
        assert operand_eps("cpu", torch.float32) == 0.0
    finally:
        torch.set_default_dtype(torch.float32)


def rounded_to(bits, x):
    """Round to a number of bits, the leading one included."""
    mantissa, exponent = x.frexp()
    return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)


@pytest.mark.parametrize(("format", "bits"), [("tf32", 11), ("bfloat16", 8)])
@pytest.mark.parametrize("operation", ["__matmul__", "conv2d"])
def test_the_bits_that_are_kept_are_found(monkeypatch, forget, format, bits, operation):
    owner = torch.Tensor if operation == "__matmul__" else torch
    exact = getattr(owner, operation)
    monkeypatch.setattr(
        owner, operation, lambda x, y, **options: exact(rounded_to(bits, x), rounded_to(bits, y), **options)
    )
    assert operand_eps("cpu", torch.float32) == 2.0 ** (1 - bits)
    assert operand_eps("cpu", torch.float64) == 0.0


def test_the_arithmetic_is_found_again_when_a_flag_changes(monkeypatch, forget):
    found = []
    monkeypatch.setattr(arithmetic, "_kept_in_matrices", lambda device: found.append(device) or 24)
    for convolutions in (True, False, True):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", convolutions)
        operand_eps("cpu", torch.float32)
    assert len(found) == 2


def flags():
    """Every flag, or that it cannot be read since older and newer ones were mixed."""
    found = []
    newer = [torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn]
    newer += [getattr(each, kind, None) for each in newer[2:] for kind in ("matmul", "conv", "rnn")]
    for place, name in [
        *((each, "fp32_precision") for each in newer if each is not None),
        (torch.backends.cuda.matmul, "allow_tf32"),
        (torch.backends.cudnn, "allow_tf32"),
    ]:
        try:
            found.append(getattr(place, name, None))
        except RuntimeError:
            found.append("mixed")
    with contextlib.suppress(RuntimeError):
        found.append(torch.get_float32_matmul_precision())
    return found


@pytest.mark.parametrize("matrices", ["highest", "high", "medium", "allow_tf32"])
@pytest.mark.parametrize("convolutions", [True, False])
def test_tf32_is_off_inside_and_as_it_was_afterwards(monkeypatch, convolutions, matrices):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", convolutions)
    if matrices == "allow_tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    else:
        torch.set_float32_matmul_precision(matrices)
    try:
        expected = flags()
        with without_tf32():
            assert not torch.backends.cudnn.allow_tf32
            assert not torch.backends.cuda.matmul.allow_tf32
            assert torch.get_float32_matmul_precision() == "highest"
        assert flags() == expected
        with contextlib.suppress(ZeroDivisionError), without_tf32():
            raise ZeroDivisionError
        assert flags() == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 added these flags")
def test_newer_flags_of_the_user_stay():
    convolutions = torch.backends.cudnn.conv
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        expected = flags()
        with without_tf32():
            assert flags() == expected
        assert flags() == expected
    finally:
        convolutions.fp32_precision = before


def test_mixed_precision_is_switched_off_only_where_there_is_such_a_thing(monkeypatch):
    """Before torch 2.5, ``torch.autocast("mps")`` raises."""
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: False)
    monkeypatch.setattr(torch, "autocast", None)
    with without_autocast("mps"):
        pass
