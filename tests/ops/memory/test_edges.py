"""Inputs at the edge of what the memory takes, each against the reference."""

import math

import pytest
import torch
from tests.support import problem, relative_rms, unit

from trellis.ops import trellis_memory

MODES = ["exact", "stale"]
every_order = pytest.mark.parametrize("error_at", ["before", "after"])
every_backend = pytest.mark.parametrize("backend", ["chunked", "native"])
NAMES = ("q", "k", "v", "alpha", "log_beta", "gamma")


def same_as_reference(case, limit=2e-5):
    expected = case.run("reference", torch.float64)
    for backend in ("chunked", "native"):
        actual = case.run(backend, torch.float32)
        for name, value in expected.items():
            assert torch.isfinite(actual[name]).all(), f"{backend}: {name}"
            assert relative_rms(actual[name], value) <= limit, f"{backend}: {name}"


@every_order
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("log_beta", [0.0, -1e4, -math.inf])
def test_constant_decay(mode, log_beta, error_at):
    case = problem(tokens=40, mode=mode, error_at=error_at)
    case.tensors["log_beta"].fill_(log_beta)
    case.tensors["log_beta2"].fill_(log_beta)
    same_as_reference(case)


@every_order
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("log_beta", [-1e4, -math.inf])
def test_decay_that_forgets_now_and_then(mode, log_beta, error_at):
    case = problem(tokens=40, mode=mode, error_at=error_at)
    case.tensors["log_beta"][:, ::7] = log_beta
    case.tensors["log_beta2"][:, 3::5] = log_beta
    same_as_reference(case)


@pytest.mark.parametrize("backend", ["reference", "chunked", "native"])
def test_with_the_error_after_the_decay_forgetting_everything_is_a_fresh_start(backend):
    """With the error before it, the first write still depends on what is forgotten."""
    case = problem(tokens=40)
    case.tensors["log_beta"][:, 21] = -math.inf
    tensors = [case.tensors[name].float() for name in NAMES]
    rest = [tensor[:, 21:] for tensor in tensors]
    for error_at, is_fresh in (("after", True), ("before", False)):
        options = case.options | {"backend": backend, "error_at": error_at}
        whole, _ = trellis_memory(*tensors, **options)
        fresh, _ = trellis_memory(*rest, **options)
        assert (relative_rms(whole[:, 21:], fresh) < 1e-5) == is_fresh


@pytest.mark.parametrize("mode", MODES)
def test_no_step_writes_nothing(mode):
    case = problem(tokens=40, mode=mode)
    case.tensors["gamma"].zero_()
    case.tensors["gamma2"].zero_()
    same_as_reference(case)
    tensors = [case.tensors[name].float() for name in NAMES]
    for backend in ("chunked", "native"):
        y, state = trellis_memory(*tensors, mode=mode, output_final_state=True, backend=backend)
        assert not y.any()
        assert not state.keys.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["q", "k", "v", "alpha"])
def test_zero_vectors(mode, name):
    case = problem(tokens=40, mode=mode, f="silu")
    case.tensors[name][:, ::3] = 0
    same_as_reference(case)


@every_backend
@pytest.mark.parametrize("phi", ["silu", "identity", "gelu", "tanh"])
@pytest.mark.parametrize("mode", MODES)
def test_inputs_of_ten_thousand(mode, phi, backend):
    """The memory diverges; up to the first non-finite row it equals the reference."""
    case = problem(tokens=40, mode=mode, phi=phi, batch=1, heads=1, f="silu")
    for name in ("q", "k", "v", "alpha"):
        case.tensors[name] *= 1e4
    tensors = [case.tensors[name].float() for name in NAMES]
    expected, _ = trellis_memory(*tensors, backend="reference", **case.options)
    actual, _ = trellis_memory(*tensors, backend=backend, **case.options)
    finite = torch.isfinite(expected).flatten(2).all(-1)[0]
    rows = 40 if bool(finite.all()) else int((~finite).nonzero()[0])
    assert rows > 0
    for t in range(rows):
        assert relative_rms(actual[:, t], expected[:, t]) < 2e-4, f"row {t} of {rows}"


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES)
def test_half_precision_inputs(mode, dtype, backend):
    """The result is that of the rounded inputs: states and sums are fp32."""
    case = problem(tokens=40, mode=mode)
    rounded = [case.tensors[name].to(dtype) for name in NAMES]
    expected, state = trellis_memory(
        *(t.double() for t in rounded), backend="reference", output_final_state=True, **case.options
    )
    leaves = [t.clone().requires_grad_() for t in rounded]
    y, final = trellis_memory(*leaves, output_final_state=True, backend=backend, **case.options)
    assert y.dtype == dtype
    assert final.keys.dtype == final.values.dtype == torch.float32
    assert relative_rms(final.keys, state.keys) < 2e-5
    assert relative_rms(y, expected) < torch.finfo(dtype).eps
    y.sum().backward()
    assert all(leaf.grad.dtype == dtype for leaf in leaves)


@every_backend
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_in_its_sequence_of_a_batch(mode, name, backend):
    case = problem(batch=3, tokens=20, mode=mode)
    tensors = {n: case.tensors[n].float() for n in NAMES}
    clean, _ = trellis_memory(*tensors.values(), backend=backend, **case.options)
    tensors[name] = tensors[name].clone()
    tensors[name][1, 5] = math.nan
    leaves = [t.requires_grad_() for t in tensors.values()]
    y, _ = trellis_memory(*leaves, backend=backend, **case.options)
    assert y[1].isnan().any()
    assert torch.equal(y[0], clean[0])
    assert torch.equal(y[2], clean[2])
    y[[0, 2]].sum().backward()
    for leaf in leaves:
        assert torch.isfinite(leaf.grad[[0, 2]]).all()


@every_backend
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_in_its_sequence_of_a_pack(mode, name, backend):
    case = problem(lengths=[9, 0, 14, 5], mode=mode)
    tensors = {n: case.tensors[n].float() for n in NAMES}
    options = {"cu_seqlens": case.cu_seqlens, "output_final_state": True, "backend": backend}
    options |= case.options
    clean, _ = trellis_memory(*tensors.values(), **options)
    tensors[name] = tensors[name].clone()
    tensors[name][0, 12] = math.nan
    y, state = trellis_memory(*tensors.values(), **options)
    others = torch.ones(28, dtype=torch.bool)
    others[9:23] = False
    assert y[:, ~others].isnan().any()
    assert relative_rms(y[:, others], clean[:, others]) < 1e-6
    assert torch.isfinite(state.keys[[0, 1, 3]]).all()


@every_order
@every_backend
def test_nothing_is_read_from_the_future(backend, error_at):
    """A broken token leaves the tokens before it as they were."""
    case = problem(batch=1, tokens=40, error_at=error_at)
    tensors = [case.tensors[name].float() for name in NAMES]
    clean, _ = trellis_memory(*tensors, backend=backend, **case.options)
    tensors[1] = tensors[1].clone()
    tensors[1][:, 25] = math.nan
    y, _ = trellis_memory(*tensors, backend=backend, **case.options)
    assert torch.equal(y[:, :25], clean[:, :25])


#: |y| for |k| = |v| = |q| = 1, alpha of order 1 and gamma < 1, however long the input.
BOUND = 50.0


@every_backend
@pytest.mark.parametrize("mode", MODES)
def test_all_equal_tokens(mode, backend):
    """Repeated text must not blow up: stale mode takes the 1/b that the mixer gives it."""
    tokens, graded = 100_000, 100_000 if backend == "native" else 8_000
    generator = torch.Generator().manual_seed(0)
    size, minibatch = 8, 16

    def row(*shape):
        return torch.randn(1, 1, 1, *shape, generator=generator).expand(1, tokens, 1, *shape)

    step = 0.9 / (minibatch if mode == "stale" else 1)
    tensors = [unit(row(size)), unit(row(size)), unit(row(size)), row(size)]
    tensors += [torch.full((1, tokens, 1), -1e-3), torch.full((1, tokens, 1), step)]
    y, state = trellis_memory(*tensors, mode=mode, output_final_state=True, backend=backend)
    assert float(y.abs().max()) < BOUND
    assert torch.isfinite(state.keys).all()

    short = [t[:, :200] for t in tensors]
    expected, _ = trellis_memory(*short, mode=mode, backend="reference")
    assert relative_rms(y[:, :200], expected) < 2e-5

    leaves = [t[:, :graded].clone().requires_grad_() for t in tensors]
    y, _ = trellis_memory(*leaves, mode=mode, backend=backend)
    y[:, -1].square().sum().backward()
    norms = {name: float(leaf.grad.norm()) for name, leaf in zip(NAMES, leaves)}
    print(f"{backend}, {mode}, {graded} equal tokens, gradient norms: {norms}")
    assert all(math.isfinite(norm) and norm < 1e5 for norm in norms.values())
