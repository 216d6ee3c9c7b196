"""Empty and odd shapes through every kernel, forward and backward.

`make test-sanitize` runs these with the compiler's sanitizers, which find what reads or writes
beside a tensor even where the result is right.
"""

import re
from pathlib import Path

import pytest
import torch
from tests.support import FP32, normal, problem, relative_rms, run

from trellis.ops import (
    causal_convolution,
    cross_entropy_,
    gated_norm,
    rms_norm,
    silu_product,
    trellis_memory,
    trellis_memory_step,
    unit_length,
)
from trellis.ops.cross_entropy import cross_entropy_reference
from trellis.ops.memory import custom_op
from trellis.ops.native import pointwise

pytestmark = pytest.mark.usefixtures("fused_at_every_size")
#: Sizes on both sides of the vectors of every instruction set: 4, 8 and 16 numbers.
ODD = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 65]
EMPTY = [(0, 5), (3, 0, 7), (0,)]


def same(function, *leaves):
    """fp32, which the kernels compute, beside fp64, which plain PyTorch does."""
    for one, other in zip(run(function, leaves, torch.float32), run(function, leaves)):
        assert one.shape == other.shape
        # A row of one number has a gradient that is all rounding: it is compared with 1.
        assert relative_rms(one, other) < FP32 or torch.allclose(one.double(), other, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, size) for size in ODD] + EMPTY, ids=str)
def test_norms_and_gates(shape):
    x, gate, weight = normal(*shape), normal(*shape, seed=1), normal(shape[-1], seed=2)
    if shape[-1]:
        same(unit_length, x)
        same(lambda x, w: rms_norm(x, w, 1e-6), x, weight)
        same(lambda x, g, w: gated_norm(x, g, w, 1e-6), x, gate, weight)
    same(silu_product, x, gate)


@pytest.mark.parametrize("channels", [1, 3, 8, 9, 17, 33])
@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7])
def test_convolution(channels, taps, tokens):
    def both(x, weight, tail, bias):
        return causal_convolution(x, weight, bias=bias, tail=tail, activation="silu")

    weight, bias = normal(channels, taps, seed=1), normal(channels, seed=3)
    for batch in (0, 1, 2):
        tail = normal(batch, taps - 1, channels, seed=2)
        same(both, normal(batch, tokens, channels), weight, tail, bias)
    bounds = torch.tensor([0, 0, tokens // 2, tokens, tokens])  # some sequences are empty

    def packed(x, weight, tail):
        return causal_convolution(x, weight, tail=tail, cu_seqlens=bounds)

    same(packed, normal(1, tokens, channels), weight, normal(4, taps - 1, channels, seed=2))


@pytest.mark.parametrize("rows", [0, 1, 3, 17])
@pytest.mark.parametrize("classes", ODD)
def test_cross_entropy(rows, classes):
    logits = normal(rows, classes)
    targets = torch.arange(rows) % classes
    targets[1::3] = -100
    losses, gradient = cross_entropy_reference(logits, targets, -100)
    found = logits.float()
    assert relative_rms(cross_entropy_(found, targets, gradient=True), losses.sum()) < FP32
    assert relative_rms(found, gradient) < FP32 or torch.allclose(
        found.double(), gradient, atol=1e-6
    )


#: Key, value and slot sizes, each different.
SIZES = [(1, 2, 3), (3, 1, 2), (5, 7, 9), (8, 16, 4), (9, 15, 17), (17, 33, 31), (33, 5, 65)]


@pytest.mark.parametrize("mode", ["exact", "stale"])
@pytest.mark.parametrize("value_pass", ["encode", "decode"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_memory(mode, value_pass, sizes):
    key, value, slots = sizes
    options = {"mode": mode, "value_pass": value_pass, "phi": "identity", "f": "silu"}
    shapes = [
        {"batch": 0, "tokens": 3}, {"batch": 2, "tokens": 0}, {"batch": 1, "tokens": 1},
        {"batch": 3, "tokens": 13, "heads": 3}, {"lengths": [0, 5, 0, 1, 9, 0]}, {"lengths": [0]},
    ]  # fmt: skip
    for shape in shapes:
        case = problem(key=key, value=value, slots=slots, **options, **shape)
        expected = case.run("reference", torch.float64)
        for name, found in case.run("native", torch.float32).items():
            assert relative_rms(found, expected[name]) < 1e-4, f"{name} of {shape}"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_memory_step(sizes):
    names = ("q", "k", "v", "alpha", "log_beta", "gamma")
    for batch in (0, 1, 3):
        case = problem(key=sizes[0], value=sizes[1], slots=sizes[2], batch=batch, tokens=1, heads=3)
        token = [case.tensors[name][:, 0] for name in names]
        with torch.no_grad():
            y, _ = trellis_memory_step(*(x.float() for x in token), f="silu", backend="native")
            expected, _ = trellis_memory_step(*token, f="silu", backend="reference")
        assert relative_rms(y, expected) < 1e-4


def test_no_kernel_is_left_out(monkeypatch):
    """The functions of the C++ sources that compute are those that the tests above call."""
    called = set()
    call = pointwise.run
    monkeypatch.setattr(pointwise, "run", lambda name, *rest: (called.add(name), call(name, *rest)))
    test_norms_and_gates((2, 3))
    test_convolution(3, 2, 3)
    test_cross_entropy(2, 3)
    call_memory = custom_op._call
    monkeypatch.setattr(
        custom_op, "_call", lambda name, *rest: (called.add(name), call_memory(name, *rest))
    )
    test_memory("exact", "encode", (5, 7, 9))
    folder = Path(pointwise.__file__).parent.parent
    sources = [folder / "native" / "pointwise.cpp", folder / "memory" / "native" / "memory.cpp"]
    text = "".join(source.read_text() for source in sources)
    exported = re.findall(r"int trellis_(\w+)\(\s*const", text)
    assert {"norm", "forward", "backward", "cross_entropy"} <= set(exported)
    assert called == set(exported)


def test_an_empty_batch_has_gradients():
    names = ("q", "k", "v", "alpha", "log_beta", "gamma")
    given = {n: problem(batch=0).tensors[n].float().requires_grad_() for n in names}
    y, _ = trellis_memory(**given, backend="native")
    y.sum().backward()
    assert all(tensor.grad.shape == tensor.shape for tensor in given.values())
