"""The fused kernel on every instruction set, and what it does with unusual tensors."""

import pytest
import torch
from tests.support import problem, relative_rms

from trellis.mixers import build_mixer
from trellis.ops import compress, trellis_memory
from trellis.ops.memory import custom_op
from trellis.ops.native import build

NAMES = ("q", "k", "v", "alpha", "log_beta", "gamma")


@pytest.fixture(params=["native", "avx2", "portable"])
def target(request, monkeypatch):
    loaded = custom_op.declared(build.open_library(build.library(custom_op.SOURCE, request.param)))
    monkeypatch.setattr(custom_op, "kernel", lambda: loaded)
    return request.param, loaded.trellis_vector_length()


def test_vector_lengths_differ(target):
    name, lanes = target
    if name == "portable":
        assert lanes == 4
    elif name == "avx2":
        assert lanes == 8


@pytest.mark.parametrize("error_at", ["before", "after"])
@pytest.mark.parametrize("value_pass", ["encode", "decode"])
@pytest.mark.parametrize("mode", ["exact", "stale"])
@pytest.mark.parametrize("phi", ["identity", "silu", "gelu", "tanh", "layernorm", "ln_silu"])
def test_every_instruction_set_equals_the_reference(target, phi, mode, value_pass, error_at):
    options = {"phi": phi, "mode": mode, "value_pass": value_pass, "error_at": error_at}
    case = problem(tokens=37, minibatch=7, batch=1, **options)
    expected = case.run("reference", torch.float64)
    actual = case.run("native", torch.float32)
    for name, value in expected.items():
        assert relative_rms(actual[name], value) < 2e-5, name


def test_wide_and_narrow_sizes_on_every_instruction_set(target):
    for sizes in ((64, 64, 64), (3, 5, 7), (100, 33, 130)):
        case = problem(key=sizes[0], value=sizes[1], slots=sizes[2], tokens=20, batch=1, phi="tanh")
        expected = case.run("reference", torch.float64)
        actual = case.run("native", torch.float32)
        for name, value in expected.items():
            assert relative_rms(actual[name], value) < 2e-5, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_conversions_are_torchs(dtype):
    """A write of gamma = 0 reads the initial memory with q alone: y is exactly convertible."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-14, 15, (1, 64, 1, 16), generator=generator).float()
    q = (torch.randn(1, 64, 1, 16, generator=generator) * 2**exponents).to(dtype)
    q[0, 0, 0, :4] = torch.tensor([0.0, -0.0, 6e-8, -6e-5]).to(dtype)
    zeros = torch.zeros(1, 64, 1, 16, dtype=dtype)
    gate = torch.zeros(1, 64, 1)
    eye = torch.eye(16)[None, None]
    y, _ = trellis_memory(
        q, zeros, zeros, zeros, gate, gate, f="identity", initial_state=(eye, eye),
        backend="native",
    )  # fmt: skip
    assert torch.equal(y, q)


def test_strided_inputs():
    case = problem(tokens=20)
    tensors = [case.tensors[name].float() for name in NAMES]
    plain, _ = trellis_memory(*tensors, backend="native")
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    assert torch.equal(trellis_memory(*heads_first, backend="native")[0], plain)
    spread = [torch.stack([t, t], dim=-1)[..., 0] for t in tensors]
    assert not spread[0].is_contiguous()
    assert torch.equal(trellis_memory(*spread, backend="native")[0], plain)


def test_results_do_not_depend_on_the_run_or_the_threads():
    case = problem(tokens=50, batch=3, heads=3)
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            runs.append(case.run("native", torch.float32))
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(other[name], value), name


def test_what_the_kernel_cannot_take_is_an_error():
    case = problem(tokens=4)
    wide = {name: case.tensors[name] for name in NAMES}
    with pytest.raises(ValueError, match=r"backend='native' cannot run here: .* torch.float64"):
        trellis_memory(**wide, backend="native")
    given = {name: tensor.float() for name, tensor in wide.items()}
    with pytest.raises(ValueError, match="compress has 'triton', 'chunked' and 'reference'"):
        compress(
            given["q"], given["k"], given["alpha"], given["log_beta"], given["gamma"],
            backend="native",
        )  # fmt: skip
    large = problem(tokens=4, key=257)
    given = {name: large.tensors[name].float() for name in NAMES}
    with pytest.raises(ValueError, match="sizes of keys, values and codes must be 1 to 256"):
        trellis_memory(**given, backend="native")
    assert trellis_memory(**given)[0].shape == large.tensors["v"].shape  # auto: chunked


def test_the_environment_chooses_for_auto(monkeypatch):
    case = problem(tokens=4)
    given = {name: case.tensors[name].float() for name in NAMES}
    monkeypatch.setenv("TRELLIS_BACKEND", "reference")
    assert torch.equal(trellis_memory(**given)[0], trellis_memory(**given, backend="reference")[0])
    monkeypatch.setenv("TRELLIS_BACKEND", "gpu")
    with pytest.raises(ValueError, match=r"TRELLIS_BACKEND must be one of .*; got 'gpu'"):
        trellis_memory(**given)
    monkeypatch.setenv("TRELLIS_BACKEND", "native")
    mixer = build_mixer("trellis", 16, 2)
    assert mixer(torch.randn(1, 5, 16))[0].shape == (1, 5, 16)
