"""What holds for every recurrence: chunked = definition, pieces = whole, pack = apart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.recurrences.cases import Shape, every_case
from tests.support import relative_rms

from trellis.ops import recurrence

CASES = every_case()
every_recurrence = pytest.mark.parametrize("name", CASES)

#: (dtype, largest relative RMS error)
LIMITS = [(torch.float64, 1e-10), (torch.float32, 2e-5)]

shapes = st.builds(
    lambda sizes, **rest: Shape(key=sizes[0], value=sizes[1], slots=sizes[2], **rest),
    st.lists(st.integers(3, 20), min_size=3, max_size=3, unique=True),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 150),
    heads=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)


def results(case, cu_seqlens, backend, dtype):
    """y, the final states and all gradients of a random linear function of them."""
    inputs, states = (
        {name: t.to(dtype).clone().requires_grad_() for name, t in tensors.items()}
        for tensors in (case.over_tokens, case.states)
    )
    y, finals = case.call(inputs, states, cu_seqlens, backend)
    found = {"y": y} | {f"final {name}": final for name, final in finals.items()}
    generator = torch.Generator().manual_seed(7)
    loss = sum(
        (out * torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)).sum()
        for out in found.values()
    )
    loss.backward()
    for name, tensor in (inputs | states).items():
        # Without tokens the reference does not touch its inputs.
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        found[f"gradient of {name}"] = gradient
    return found


def compare(name, shape):
    case = CASES[name](shape)
    expected = results(case, shape.cu_seqlens, "reference", torch.float64)
    for dtype, limit in LIMITS:
        actual = results(case, shape.cu_seqlens, "chunked", dtype)
        assert actual.keys() == expected.keys()
        for what, value in expected.items():
            assert actual[what].dtype == dtype
            error = relative_rms(actual[what], value)
            assert error <= limit, f"{what} in {dtype}: {error:.1e} for {shape}"


@every_recurrence
@given(shape=shapes)
def test_chunked_is_the_definition(name, shape):
    compare(name, shape)


@every_recurrence
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=5).map(tuple),
    seed=st.integers(0, 10**6),
)
def test_packed_sequences(name, lengths, seed):
    compare(name, Shape(lengths=lengths, seed=seed))


@every_recurrence
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 63, 64, 65, 300])
def test_lengths_around_chunks(name, tokens):
    compare(name, Shape(tokens=tokens, batch=1, heads=1))


@every_recurrence
@pytest.mark.parametrize("segment", [1, 200])
def test_lengths_around_segments(name, segment, monkeypatch):
    monkeypatch.setattr(recurrence, "SEGMENT_TOKENS", segment)
    monkeypatch.setattr(recurrence, "SEGMENT_LEAST", 1)
    compare(name, Shape(tokens=330, batch=2, heads=1))
    compare(name, Shape(lengths=(10, 200, 0, 129, 64)))


@every_recurrence
@given(pieces=st.lists(st.integers(0, 90), min_size=1, max_size=4), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_pieces_equal_the_whole(name, backend, pieces, seed):
    """Also in their gradients, which flow through the states between the pieces."""
    shape = Shape(tokens=sum(pieces), seed=seed)
    case = CASES[name](shape)

    def in_pieces(inputs, states, _, backend):
        outputs, begin = [], 0
        for length in pieces:
            part = {k: x[:, begin : begin + length] for k, x in inputs.items()}
            y, states = case.call(part, states, None, backend)
            outputs.append(y)
            begin += length
        return torch.cat(outputs, dim=1), states

    whole = results(case, None, backend, torch.float64)
    apart = results(
        type(case)(case.over_tokens, case.states, in_pieces), None, backend, torch.float64
    )
    for what, value in whole.items():
        assert relative_rms(apart[what], value) < 1e-9, what


@every_recurrence
@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_inputs_in_half_precision(name, backend):
    """y comes in the type of the inputs, states in fp32."""
    case = CASES[name](Shape(tokens=70))
    inputs = {name: t.bfloat16() for name, t in case.over_tokens.items()}
    states = {name: t.float() for name, t in case.states.items()}
    y, finals = case.call(inputs, states, None, backend)
    assert y.dtype == torch.bfloat16
    assert {final.dtype for final in finals.values()} <= {torch.float32}
    wide, _ = case.call({name: t.float() for name, t in inputs.items()}, states, None, backend)
    assert relative_rms(y, wide) < 1e-2


@every_recurrence
def test_a_second_derivative_is_refused(name):
    case = CASES[name](Shape(tokens=70))
    inputs = {name: t.clone().requires_grad_() for name, t in case.over_tokens.items()}
    y, _ = case.call(inputs, case.states, None, "chunked")
    (gradient,) = torch.autograd.grad(
        y.square().sum(), [next(iter(inputs.values()))], create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@every_recurrence
def test_torch_func(name):
    """torch.func.grad cannot see into our backward; it gets the definition."""
    case = CASES[name](Shape(tokens=9, batch=1))
    first = next(iter(case.over_tokens))

    def loss(x):
        return case.call(case.over_tokens | {first: x}, case.states, None, "auto")[0].sum()

    x = case.over_tokens[first].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), [x])
    assert relative_rms(torch.func.grad(loss)(x.detach()), expected) < 1e-10
