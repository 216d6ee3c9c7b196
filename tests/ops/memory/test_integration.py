"""The op inside PyTorch's machinery: compile, autocast, checkpoint, functional_call."""

import pytest
import torch
from tests.support import problem, relative_rms
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from trellis.mixers import build_mixer
from trellis.ops import trellis_memory, trellis_memory_step
from trellis.ops.memory import custom_op

NAMES = ("q", "k", "v", "alpha", "log_beta", "gamma")


def leaves(case, dtype=torch.float32):
    return [case.tensors[name].to(dtype).clone().requires_grad_() for name in NAMES]


def gradients(function, case):
    tensors = leaves(case)
    y = function(*tensors)
    y.square().sum().backward()
    return [y, *(t.grad for t in tensors)]


every_backend = pytest.mark.parametrize("backend", ["chunked", "native", "auto"])
#: The portable path is one break of the graph; the kernel is one op in it.
every_compiled = pytest.mark.parametrize(
    ("backend", "whole"), [("chunked", False), ("native", True), ("auto", True)]
)


@every_compiled
@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_compile_sees_one_op(mode, backend, whole):
    case = problem(mode=mode)

    def run(*tensors):
        return trellis_memory(*tensors, backend=backend, **case.options)[0]

    compiled = torch.compile(run, fullgraph=whole, backend="aot_eager")
    for one, other in zip(gradients(compiled, case), gradients(run, case)):
        assert relative_rms(one, other) < 1e-6


@every_compiled
def test_compile_of_packed_sequences_with_states(backend, whole):
    case = problem(lengths=[4, 9], mode="stale")

    def run(*tensors):
        y, state = trellis_memory(
            *tensors, cu_seqlens=case.cu_seqlens, output_final_state=True, backend=backend,
            **case.options,
        )  # fmt: skip
        return y.sum() + state.keys.sum()

    compiled = torch.compile(run, fullgraph=whole, backend="aot_eager")
    for one, other in zip(gradients(compiled, case), gradients(run, case)):
        assert relative_rms(one, other) < 1e-6


@pytest.mark.parametrize("backend", ["chunked", "native", "reference"])
@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_compile_of_a_decoding_step(mode, backend):
    """One graph on every backend: of one token the definition is plain PyTorch."""
    case = problem(tokens=1, mode=mode)
    tensors = [case.tensors[name].float()[:, 0] for name in NAMES]

    def run(*tensors):
        y, state = trellis_memory_step(*tensors, backend=backend, **case.options)
        return y, state.keys

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for one, other in zip(compiled(*tensors), run(*tensors)):
            assert relative_rms(one, other) < 1e-6


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("mode", "error_at"), [("exact", "before"), ("stale", "after")])
def test_the_registered_operator_keeps_torchs_rules(mode, error_at, shared):
    """In layouts that are not contiguous."""
    case = problem(tokens=5, mode=mode)

    def flipped(name):
        tensor = case.tensors[name].float().transpose(1, 2).contiguous().transpose(1, 2)
        return tensor.requires_grad_()

    def state(name):
        return case.tensors[name].float().mT.contiguous().mT.requires_grad_()

    given = {"q": "q", "x1": "k", "target1": "alpha", "x2": "v", "log_decay1": "log_beta"}
    given |= {"step_size1": "gamma"}
    given |= (
        {} if shared else {"target2": "alpha", "log_decay2": "log_beta2", "step_size2": "gamma2"}
    )
    tensors = {name: flipped(there) for name, there in given.items()}
    tensors |= {"memory1": state("keys"), "memory2": state("values")}
    if mode == "stale":
        tensors |= {"anchor1": state("key_anchor"), "anchor2": state("value_anchor")}
        tensors |= {"offset": case.offset}
    count = 4 if mode == "stale" else 1
    options = "phi1=silu phi2=silu f=ln_silu psi=identity transposed=1 "
    options += f"minibatch={count} error_at={error_at}"
    torch.library.opcheck(
        custom_op.memory, (list(tensors.values()), " ".join(tensors), options, True)
    )


def test_an_option_that_the_kernel_does_not_know():
    case = problem(tokens=5)
    given = {"q": "q", "x1": "k", "target1": "alpha", "x2": "v", "log_decay1": "log_beta"}
    given |= {"step_size1": "gamma", "memory1": "keys", "memory2": "values"}
    tensors = [case.tensors[name].float() for name in given.values()]
    for options in (
        "phi1=relu phi2=silu f=silu psi=identity transposed=1 minibatch=1 error_at=before",
        "phi1=silu phi2=silu f=silu transposed=1 minibatch=1 error_at=before",
        "phi1=silu phi2=silu f=silu psi=identity transposed=1 minibatch=1 error_at=during",
    ):
        with pytest.raises(ValueError, match="does not know all of the options 'phi1="):
            custom_op.memory(tensors, " ".join(given), options, False)


def test_forward_mode_gets_the_definition():
    """In fp32, where the kernel would run: to forward-mode differentiation it is a constant."""
    case = problem(tokens=9)
    tensors = [case.tensors[name].float() for name in NAMES]
    direction = torch.randn_like(tensors[1])
    with forward_ad.dual_level():
        tensors[1] = forward_ad.make_dual(tensors[1], direction)
        tangent = forward_ad.unpack_dual(trellis_memory(*tensors, **case.options)[0]).tangent
        step = [t[:, 0] for t in tensors]
        assert forward_ad.unpack_dual(trellis_memory_step(*step)[0]).tangent is not None
        with pytest.raises(RuntimeError, match=r"'native' cannot run inside .* forward-mode"):
            trellis_memory(*tensors, backend="native", **case.options)

    def moved(size):
        wide = [case.tensors[name].clone() for name in NAMES]
        wide[1] += size * direction
        return trellis_memory(*wide, **case.options)[0]

    assert relative_rms(tangent, (moved(1e-6) - moved(-1e-6)) / 2e-6) < 1e-4


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
