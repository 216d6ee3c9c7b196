"""Every fast backend against the definition: outputs, final states and every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import problem, relative_rms

from trellis.ops import trellis_memory
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


@pytest.mark.parametrize("value_pass", ["encode", "decode"])
@pytest.mark.parametrize("mode", ["exact", "stale"])
@pytest.mark.parametrize("f", F_NAMES)
@pytest.mark.parametrize("phi", PHI_NAMES)
@settings(max_examples=2)
@given(data=st.data())
def test_every_combination(phi, f, mode, value_pass, data):
    # A normalising phi over a few slots amplifies rounding, in the reference as well.
    shape = data.draw(shapes(12 if phi in NORMALISING_PHI else 4))
    compare(problem(phi=phi, f=f, mode=mode, value_pass=value_pass, **shape))


@pytest.mark.parametrize("psi", PHI_NAMES)
def test_every_psi(psi):
    compare(problem(psi=psi, tokens=11))


@pytest.mark.parametrize("mode", ["exact", "stale"])
@given(
    lengths=st.lists(st.integers(0, 37), min_size=1, max_size=5),
    minibatch=st.integers(2, 9),
    seed=st.integers(0, 10**6),
)
def test_packed_sequences(mode, lengths, minibatch, seed):
    compare(problem(mode=mode, lengths=lengths, minibatch=minibatch, seed=seed))


@pytest.mark.parametrize("mode", ["exact", "stale"])
@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 300])
def test_lengths_around_chunks_and_segments(mode, tokens):
    compare(problem(mode=mode, tokens=tokens, batch=1, heads=1, minibatch=16, slots=13))


def test_small_dimensions_with_elementwise_phi():
    compare(problem(key=1, value=2, slots=3, tokens=9, phi="tanh"))


@pytest.mark.parametrize("mode", ["exact", "stale"])
@pytest.mark.parametrize("value_pass", ["encode", "decode"])
@pytest.mark.parametrize(
    ("key", "value", "slots"), [(20, 33, 70), (64, 64, 64), (57, 64, 49), (256, 15, 130)]
)
def test_sizes_that_the_kernel_pads_in_different_ways(key, value, slots, value_pass, mode):
    shape = {"tokens": 40, "batch": 1, "heads": 1, "minibatch": 7}
    compare(problem(key=key, value=value, slots=slots, value_pass=value_pass, mode=mode, **shape))


@pytest.mark.parametrize("minibatch", [3, 16, 20, 64, 200])
def test_minibatches_shorter_and_longer_than_a_chunk(minibatch):
    compare(problem(mode="stale", tokens=230, batch=1, heads=1, minibatch=minibatch))


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
