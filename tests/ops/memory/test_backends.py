"""Every fast backend against the definition: outputs, final states and every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import problem, projection, relative_rms

from trellis.ops import MemoryState, compress, delta_rule, trellis_memory
from trellis.ops.memory import ERROR_AT
from trellis.ops.memory.activations import F_NAMES, NORMALISING_PHI, PHI_NAMES

#: (backend, dtype, largest relative RMS error)
LIMITS = [
    ("chunked", torch.float64, 1e-10),
    ("chunked", torch.float32, 2e-5),
    ("native", torch.float32, 2e-5),
]


def shapes(smallest):
    """Shapes with K, V and M all different, so that a transposed product shows."""
    sizes = st.lists(st.integers(smallest, smallest + 14), min_size=3, max_size=3, unique=True)
    return st.builds(
        lambda sizes, **rest: {"key": sizes[0], "value": sizes[1], "slots": sizes[2], **rest},
        sizes,
        batch=st.integers(1, 2),
        tokens=st.integers(4, 80),
        heads=st.integers(1, 2),
        minibatch=st.integers(2, 20),
        seed=st.integers(0, 10**6),
    )


def compare(case):
    expected = case.run("reference", torch.float64)
    for backend, dtype, limit in LIMITS:
        actual = case.run(backend, dtype)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            error = relative_rms(actual[name], value)
            assert error <= limit, f"{backend} {name} in {dtype}: {error:.1e} for {case.options}"


@pytest.mark.parametrize("error_at", ERROR_AT)
@pytest.mark.parametrize("value_pass", ["encode", "decode"])
@pytest.mark.parametrize("mode", ["exact", "stale"])
@pytest.mark.parametrize("f", F_NAMES)
@pytest.mark.parametrize("phi", PHI_NAMES)
@settings(max_examples=2)
@given(data=st.data())
def test_every_combination(phi, f, mode, value_pass, error_at, data):
    # A normalising phi over a few slots amplifies rounding, in the reference as well.
    shape = data.draw(shapes(12 if phi in NORMALISING_PHI else 4))
    options = {"phi": phi, "f": f, "mode": mode, "value_pass": value_pass, "error_at": error_at}
    compare(problem(**options, **shape))


@pytest.mark.parametrize("psi", PHI_NAMES)
def test_every_psi(psi):
    compare(problem(psi=psi, tokens=11))


@pytest.mark.parametrize("error_at", ERROR_AT)
@pytest.mark.parametrize("mode", ["exact", "stale"])
@given(
    lengths=st.lists(st.integers(0, 37), min_size=1, max_size=5),
    minibatch=st.integers(2, 9),
    seed=st.integers(0, 10**6),
)
def test_packed_sequences(mode, error_at, lengths, minibatch, seed):
    options = {"mode": mode, "error_at": error_at, "minibatch": minibatch}
    compare(problem(lengths=lengths, seed=seed, **options))


@pytest.mark.parametrize("error_at", ERROR_AT)
@pytest.mark.parametrize("mode", ["exact", "stale"])
@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 300])
def test_lengths_around_chunks_and_segments(mode, error_at, tokens):
    options = {"mode": mode, "error_at": error_at, "minibatch": 16}
    compare(problem(tokens=tokens, batch=1, heads=1, slots=13, **options))


def test_small_dimensions_with_elementwise_phi():
    compare(problem(key=1, value=2, slots=3, tokens=9, phi="tanh"))


@pytest.mark.parametrize("error_at", ERROR_AT)
@pytest.mark.parametrize("mode", ["exact", "stale"])
@pytest.mark.parametrize("value_pass", ["encode", "decode"])
@pytest.mark.parametrize(
    ("key", "value", "slots"), [(20, 33, 70), (64, 64, 64), (57, 64, 49), (256, 15, 130)]
)
def test_sizes_that_the_kernel_pads_in_different_ways(
    key, value, slots, value_pass, mode, error_at
):
    shape = {"key": key, "value": value, "slots": slots, "tokens": 40, "batch": 1, "heads": 1}
    options = {"value_pass": value_pass, "mode": mode, "minibatch": 7, "error_at": error_at}
    compare(problem(**shape, **options))


@pytest.mark.parametrize("error_at", ERROR_AT)
@pytest.mark.parametrize("minibatch", [3, 16, 20, 64, 200])
def test_minibatches_shorter_and_longer_than_a_chunk(minibatch, error_at):
    options = {"mode": "stale", "minibatch": minibatch, "error_at": error_at}
    compare(problem(tokens=230, batch=1, heads=1, **options))


def test_gates_that_both_passes_share():
    case = problem(tokens=40)
    names = ("q", "k", "v", "alpha", "log_beta", "gamma")
    results = []
    for backend, dtype in (("reference", torch.float64), ("native", torch.float32)):
        tensors = [case.tensors[name].to(dtype).clone().requires_grad_() for name in names]
        y, _ = trellis_memory(*tensors, backend=backend)
        y.square().sum().backward()
        results.append([y, *(t.grad for t in tensors)])
    for one, other in zip(*results):
        assert relative_rms(other, one) < 2e-5


def key_pass(given, state, backend, dtype):
    """A linear key pass with the error after the decay: y, the final memory and all gradients.

    The native kernel computes both passes at once. Here its value memory is the identity, which
    nothing is written to, so that the output of the key pass goes through it.
    """
    tensors = [tensor.to(dtype).clone().requires_grad_() for tensor in (*given, state)]
    *inputs, memory = tensors
    options = {"phi": "identity", "error_at": "after", "backend": backend}
    if backend == "native":
        q, k, alpha, log_beta, gamma = inputs
        eye = torch.eye(alpha.shape[-1], dtype=dtype).expand(*memory.shape[:2], -1, -1)
        no_gate = torch.zeros_like(gamma)
        y, final = trellis_memory(
            q, k, torch.zeros_like(alpha), alpha, (log_beta, no_gate), (gamma, no_gate),
            f="identity", initial_state=(memory, eye), output_final_state=True, **options,
        )  # fmt: skip
        final = final.keys
    else:
        y, final = compress(*inputs, initial_state=memory, output_final_state=True, **options)
        final = final.memory
    projection((y, final)).backward()
    return [y, final, *(tensor.grad for tensor in tensors)]


@pytest.mark.parametrize(
    ("backend", "dtype", "limit"), [("reference", torch.float64, 1e-10), *LIMITS]
)
@pytest.mark.parametrize("tokens", [1, 100])
def test_a_linear_key_pass_with_the_error_after_the_decay_is_the_gated_delta_rule(
    tokens, backend, dtype, limit
):
    """Keys of the delta rule are k, its values are alpha, its state is the memory transposed."""
    case = problem(tokens=tokens)
    given = [case.tensors[name] for name in ("q", "k", "alpha", "log_beta", "gamma")]
    state = case.tensors["keys"]
    q, k, alpha, log_beta, gamma, memory = leaves = [
        tensor.clone().requires_grad_() for tensor in (*given, state)
    ]
    y, final = delta_rule(
        q, k, alpha, gamma, log_beta, scale=1.0, initial_state=memory.mT, output_final_state=True
    )
    projection((y, final.mT)).backward()
    expected = [y, final.mT, *(leaf.grad for leaf in leaves)]
    for place, (one, other) in enumerate(zip(key_pass(given, state, backend, dtype), expected)):
        assert relative_rms(one, other) < limit, place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [16, 19])
def test_every_finite_number_of_half_precision_is_read_and_rounded(dtype, size):
    """A memory that only scales: y is what torch rounds it to, for every bit pattern of q."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    q = torch.zeros(-(-len(numbers) // size) * size, dtype=dtype)
    q[: len(numbers)] = numbers
    q = q.view(1, -1, 1, size)
    zeros = torch.zeros_like(q)
    gate = torch.zeros(q.shape[:3])
    unit = torch.eye(size)[None, None]
    scale = 0.8765432
    y, _ = trellis_memory(
        q, zeros, zeros, zeros, gate, gate, phi="identity", f="identity",
        initial_state=MemoryState(unit, scale * unit), backend="native",
    )  # fmt: skip
    assert torch.equal(y, (q.float() * scale).to(dtype))
