"""Where the fused pointwise kernels run, and where plain PyTorch does."""

import logging

import pytest
import torch
from tests.support import FP32, relative_rms

from trellis.ops import unit_length
from trellis.ops.native import pointwise

LARGE = torch.ones(pointwise.SMALLEST)


def test_on_large_tensors_of_fp32():
    assert pointwise.takes(LARGE, torch.ones(3))
    assert not pointwise.takes(torch.ones(5))
    assert not pointwise.takes(LARGE, torch.ones(3, dtype=torch.bfloat16))
    assert not pointwise.takes(LARGE.double())
    assert not pointwise.takes(LARGE.to("meta"))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_unless_the_environment_says_otherwise(backend, monkeypatch):
    monkeypatch.setenv("TRELLIS_BACKEND", backend)
    assert not pointwise.takes(LARGE)
    monkeypatch.setenv("TRELLIS_BACKEND", "native")
    assert pointwise.takes(LARGE)


def test_a_wrong_choice_is_refused_at_any_size(monkeypatch):
    monkeypatch.setenv("TRELLIS_BACKEND", "gpu")
    for x in (LARGE, torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"TRELLIS_BACKEND must be one of .*; got 'gpu'"):
            unit_length(x)


def test_not_without_a_compiler(monkeypatch, caplog):
    for cached in (pointwise.kernel, pointwise.missing_kernel):
        cached.cache_clear()
    try:
        monkeypatch.setenv("CXX", "no-such-compiler")
        with caplog.at_level(logging.WARNING, logger="trellis"):
            assert not pointwise.takes(LARGE)
            y = unit_length(LARGE)
        assert relative_rms(y, LARGE / len(LARGE) ** 0.5) < FP32
        assert len(caplog.records) == 1
        assert "no C++ compiler" in caplog.text
    finally:
        for cached in (pointwise.kernel, pointwise.missing_kernel):
            cached.cache_clear()
