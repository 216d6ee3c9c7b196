"""The op inside PyTorch's machinery: compile, autocast, checkpoint, functional_call."""

import pytest
import torch
from tests.support import problem, relative_rms
from torch.utils.checkpoint import checkpoint

from trellis.mixers import build_mixer
from trellis.ops import trellis_memory
from trellis.ops.memory.native import custom_op
from trellis.ops.memory.native import custom_op

NAMES = ("q", "k", "v", "alpha", "log_beta", "gamma")


def leaves(case, dtype=torch.float32):
    return [case.tensors[name].to(dtype).clone().requires_grad_() for name in NAMES]


def gradients(function, case):
    tensors = leaves(case)
    y = function(*tensors)
    y.square().sum().backward()
    return [y, *(t.grad for t in tensors)]


every_backend = pytest.mark.parametrize("backend", ["chunked", "native", "auto"])


@every_backend
@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_compile_sees_one_op(mode, backend):
    case = problem(mode=mode)

    def run(*tensors):
        return trellis_memory(*tensors, backend=backend, **case.options)[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for one, other in zip(gradients(compiled, case), gradients(run, case)):
        assert relative_rms(one, other) < 1e-6


@every_backend
def test_compile_of_packed_sequences_with_states(backend):
    case = problem(lengths=[4, 9], mode="stale")

    def run(*tensors):
        y, state = trellis_memory(
            *tensors, cu_seqlens=case.cu_seqlens, output_final_state=True, backend=backend,
            **case.options,
        )  # fmt: skip
        return y.sum() + state.keys.sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for one, other in zip(gradients(compiled, case), gradients(run, case)):
        assert relative_rms(one, other) < 1e-6


def op_arguments(case, mode):
    """Arguments of the registered operators, in layouts that are not contiguous."""
    stale = mode == "stale"

    def flipped(name):
        return case.tensors[name].float().transpose(1, 2).contiguous().transpose(1, 2)

    def state(name):
        tensor = case.tensors[name].float().mT.contiguous().mT
        return tensor.requires_grad_()

    q, k, v, alpha, log_beta, gamma = (flipped(name).requires_grad_() for name in NAMES)
    offset, count = (case.offset, 4) if stale else (None, 1)
    anchors = [state(n) if stale else None for n in ("key_anchor", "value_anchor")]
    one = (
        q, k, alpha, log_beta, gamma, state("keys"), anchors[0], offset, None,
        "silu", count, False, True,
    )  # fmt: skip
    two = (
        q, k, alpha, v, None, log_beta, gamma, None, None, state("keys"), state("values"),
        *anchors, offset, None, "silu", "silu", "ln_silu", "identity", True, count, True,
    )  # fmt: skip
    return one, two


@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_registered_operators_keep_torchs_rules(mode):
    one, two = op_arguments(problem(tokens=5, mode=mode), mode)
    torch.library.opcheck(library.compress, one)
    torch.library.opcheck(native.memory, two)


def test_autocast_leaves_the_memory_in_fp32():
    case = problem()
    tensors = [case.tensors[name].float() for name in NAMES]
    plain, _ = trellis_memory(*tensors, **case.options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = trellis_memory(*tensors, output_final_state=True, **case.options)
    assert state.keys.dtype == torch.float32
    assert torch.equal(y, plain)


def test_mixer_under_autocast_is_near_its_fp32_result():
    mixer = build_mixer("trellis", 32, 2)
    x = torch.randn(2, 30, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer(x)
        y.float().square().sum().backward()
    assert state.memory.keys.dtype == torch.float32
    assert relative_rms(y, mixer(x)[0]) < 0.05
    assert all(torch.isfinite(p.grad).all() for p in mixer.parameters())


def test_activation_checkpointing():
    case = problem()

    def run(*tensors):
        return trellis_memory(*tensors, **case.options)[0]

    def recomputed(*tensors):
        return checkpoint(run, *tensors, use_reentrant=False)

    for one, other in zip(gradients(recomputed, case), gradients(run, case)):
        assert torch.equal(one, other)


def test_functional_call():
    mixer = build_mixer("trellis", 16, 2)
    x = torch.randn(1, 9, 16)
    other = {name: p.detach() * 1.1 for name, p in mixer.named_parameters()}
    y, _ = torch.func.functional_call(mixer, other, (x,))
    mixer.load_state_dict(other)
    assert torch.equal(y, mixer(x)[0])


@every_backend
def test_double_backward_is_refused(backend):
    tensors = leaves(problem(tokens=4))
    y, _ = trellis_memory(*tensors, backend=backend)
    (grad,) = torch.autograd.grad(y.sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()


@pytest.mark.parametrize("backend", ["chunked", "native"])
def test_fresh_memory_is_never_read(backend, monkeypatch):
    """Buffers that are not filled yet hold NaN here: nothing of them may come out."""
    case = problem(lengths=[5, 0, 33, 40], mode="stale", minibatch=16)
    clean = case.run(backend, torch.float32)
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        filled = case.run(backend, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in clean.items():
        assert torch.equal(filled[name], value), name


def test_no_grad_saves_nothing():
    case = problem()
    tensors = [case.tensors[name].float() for name in NAMES]
    y, _ = trellis_memory(*tensors)
    assert not y.requires_grad
