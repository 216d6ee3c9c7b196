"""The fused pointwise ops inside PyTorch's machinery, and on every instruction set."""

import pytest
import torch
from tests.support import FP32, check_against, normal, relative_rms, run
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from trellis.ops import (
    causal_convolution,
    cross_entropy_,
    gated_norm,
    rms_norm,
    silu_product,
    unit_length,
)
from trellis.ops.convolution import fused_convolution
from trellis.ops.cross_entropy import cross_entropy_reference, fused_cross_entropy_
from trellis.ops.gates import fused_silu_product
from trellis.ops.native import build, pointwise
from trellis.ops.norms import fused_norm

BOUNDS = torch.tensor([0, 70, 70, 75, 150])


def packed(x, weight, tail, bias=None):
    return causal_convolution(x, weight, bias=bias, tail=tail, cu_seqlens=BOUNDS, activation="silu")


#: name -> (function, its leaves)
OPS = {
    "convolution": (packed, (normal(1, 150, 21), normal(21, 4, seed=1), normal(4, 3, 21, seed=2))),
    "convolution with bias": (
        packed,
        (normal(1, 150, 21), normal(21, 4, seed=1), normal(4, 3, 21, seed=2), normal(21, seed=3)),
    ),
    "unit_length": (unit_length, (normal(50, 3, 21),)),
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-6), (normal(50, 3, 21), normal(21))),
    "gated_norm": (
        lambda x, g, w: gated_norm(x, g, w, 1e-6),
        (normal(50, 3, 21), normal(50, 3, 21, seed=1), normal(21)),
    ),
    "silu_product": (silu_product, (normal(50, 63), normal(50, 63, seed=1))),
}
every_op = pytest.mark.parametrize("name", OPS)
pytestmark = pytest.mark.usefixtures("fused_at_every_size")


@every_op
@pytest.mark.parametrize("target", ["native", "avx2", "portable"])
def test_every_instruction_set(name, target, monkeypatch):
    loaded = build.open_library(build.library(pointwise.SOURCE, target))
    monkeypatch.setattr(pointwise, "kernel", lambda: loaded)
    function, leaves = OPS[name]
    check_against(function, function, leaves)  # fp64 is plain PyTorch
    logits, targets = normal(5, 70), torch.tensor([0, 69, 4, -100, 7])
    losses, gradient = cross_entropy_reference(logits, targets, -100)
    logits = logits.float()
    assert relative_rms(cross_entropy_(logits, targets, gradient=True), losses.sum()) < FP32
    assert relative_rms(logits, gradient) < FP32


@every_op
def test_results_do_not_depend_on_the_run_or_the_threads(name):
    function, leaves = OPS[name]
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2, 2, 3):
            torch.set_num_threads(count)
            runs.append(run(function, leaves, torch.float32))
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        for one, two in zip(runs[0], other):
            assert torch.equal(one, two)


@every_op
def test_fresh_memory_is_never_read(name, monkeypatch):
    """Buffers that are not filled yet hold NaN here: nothing of them may come out."""
    function, leaves = OPS[name]
    clean = run(function, leaves, torch.float32)
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        filled = run(function, leaves, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(filled, clean):
        assert torch.equal(one, other)


@every_op
def test_compile_sees_one_op(name):
    function, leaves = OPS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = run(function, leaves, torch.float32)
    for one, other in zip(run(compiled, leaves, torch.float32), expected):
        assert relative_rms(one, other) < 1e-6


@every_op
def test_activation_checkpointing(name):
    function, leaves = OPS[name]

    def recomputed(*tensors):
        return checkpoint(function, *tensors, use_reentrant=False)

    expected = run(function, leaves, torch.float32)
    for one, other in zip(run(recomputed, leaves, torch.float32), expected):
        assert torch.equal(one, other)


@every_op
def test_double_backward_is_refused(name):
    function, leaves = OPS[name]
    leaves = [leaf.float().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    y = y[0] if isinstance(y, tuple) else y
    (gradient,) = torch.autograd.grad(y.sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"double backward.*TRELLIS_BACKEND=reference"):
        gradient.sum().backward()


@every_op
def test_autocast_leaves_fp32_as_it_is(name):
    function, leaves = OPS[name]
    expected = run(function, leaves, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(function, leaves, torch.float32)
    for one, other in zip(actual, expected):
        assert torch.equal(one, other)


@every_op
def test_torch_func(name):
    function, leaves = OPS[name]

    def scalar(*tensors):
        y = function(*tensors)
        return (y[0] if isinstance(y, tuple) else y).sin().sum()

    leaves = tuple(leaf.float() for leaf in leaves)
    places = tuple(range(len(leaves)))
    wanted = [leaf.clone().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(scalar(*wanted), wanted)
    for one, other in zip(torch.func.grad(scalar, places)(*leaves), expected):
        assert relative_rms(one, other) < FP32


@every_op
def test_forward_mode(name):
    function, leaves = OPS[name]

    def tangent(dtype):
        leaf, *others = (leaf.to(dtype) for leaf in leaves)
        with forward_ad.dual_level():
            y = function(forward_ad.make_dual(leaf, leaf.cos()), *others)
            return forward_ad.unpack_dual(y[0] if isinstance(y, tuple) else y).tangent

    assert relative_rms(tangent(torch.float32), tangent(torch.float64)) < FP32


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_left_to_pytorch(name, dtype, monkeypatch):
    monkeypatch.setattr(pointwise, "kernel", _refuse)
    function, leaves = OPS[name]
    expected = run(function, leaves)
    for one, other in zip(run(function, leaves, dtype), expected):
        assert relative_rms(one, other) < 0.05


def _refuse(*_):
    raise AssertionError("the kernel was called")


def test_registered_operators_keep_torchs_rules():
    def leaf(*shape):
        return torch.randn(*shape).mT.contiguous().mT.requires_grad_()

    torch.library.opcheck(fused_norm, (leaf(3, 5, 4), torch.ones(4), leaf(3, 5, 4), 0.25, 1e-6))
    torch.library.opcheck(fused_norm, (leaf(3, 5, 4), None, None, 1.0, 1e-6))
    torch.library.opcheck(fused_silu_product, (leaf(3, 4), leaf(3, 4)))
    for bias in (None, torch.randn(5, requires_grad=True)):
        given = (leaf(1, 9, 5), leaf(5, 4), bias, leaf(2, 3, 5), torch.tensor([0, 2, 9]), True)
        torch.library.opcheck(fused_convolution, given)
    given = (torch.randn(4, 6), torch.tensor([0, 5, -100, 2]), True, -100)
    torch.library.opcheck(fused_cross_entropy_, given)
