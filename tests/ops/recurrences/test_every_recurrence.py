"""What holds for every recurrence: chunked = definition, pieces = whole, pack = apart."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.recurrences import cases
from tests.ops.recurrences.cases import CASES
from tests.support import Shape, projection, relative_rms
from torch.autograd import forward_ad

from trellis.ops.memory.chunked import Compression
from trellis.ops.recurrence import Recurrence

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
    projection(found.values()).backward()
    for name, tensor in (inputs | states).items():
        # Without tokens the reference does not touch its inputs.
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        found[f"gradient of {name}"] = gradient
    return found


def assert_within_limits(case, cu_seqlens=None):
    """Chunked is the reference in fp64: y, final states and all gradients, all finite."""
    expected = results(case, cu_seqlens, "reference", torch.float64)
    for dtype, limit in LIMITS:
        actual = results(case, cu_seqlens, "chunked", dtype)
        assert actual.keys() == expected.keys()
        for what, value in expected.items():
            assert torch.isfinite(value).all(), what
            assert actual[what].dtype == dtype
            error = relative_rms(actual[what], value)
            assert error <= limit, f"{what} in {dtype}: {error:.1e}"


def compare(name, shape):
    assert_within_limits(CASES[name](shape), shape.cu_seqlens)


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
@pytest.mark.parametrize(("segment", "least"), [(1, 1), (200, 1), (1, 64)])
def test_lengths_around_segments(name, segment, least, monkeypatch):
    for kind in (Recurrence, Compression):
        monkeypatch.setattr(kind, "segment_tokens", segment)
        monkeypatch.setattr(kind, "segment_least", least)
    compare(name, Shape(tokens=210, batch=2, heads=1))
    compare(name, Shape(lengths=(10, 130, 0, 64)))


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
            y, finals = case.call(part, states, None, backend)
            states = states | finals
            outputs.append(y)
            begin += length
        return torch.cat(outputs, dim=1), finals

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
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()


@every_recurrence
def test_torch_func(name):
    """torch.func.grad cannot see into our backward; it gets the definition."""
    case = CASES[name](Shape(tokens=9, batch=1))
    first = next(iter(case.over_tokens))

    def loss(x, backend="auto"):
        return case.call(case.over_tokens | {first: x}, case.states, None, backend)[0].sum()

    x = case.over_tokens[first].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), [x])
    assert relative_rms(torch.func.grad(loss)(x.detach()), expected) < 1e-10
    with pytest.raises(RuntimeError, match=r"backend='chunked' cannot run inside torch\.func"):
        torch.func.grad(lambda x: loss(x, "chunked"))(x.detach())


@every_recurrence
def test_forward_mode(name):
    """To forward-mode differentiation our backward is no help either; it gets the definition."""
    case = CASES[name](Shape(tokens=9, batch=1))
    first, x = next(iter(case.over_tokens.items()))
    direction = torch.randn_like(x)

    def outputs(x, backend="auto"):
        return case.call(case.over_tokens | {first: x}, case.states, None, backend)[0]

    graded = x.clone().requires_grad_()
    y = outputs(graded, "chunked")
    weight = torch.randn_like(y)
    (gradient,) = torch.autograd.grad((y * weight).sum(), [graded])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, direction)
        tangent = forward_ad.unpack_dual(outputs(dual)).tangent
        with pytest.raises(RuntimeError, match=r"'chunked' cannot run inside .* forward-mode"):
            outputs(dual, "chunked")
    assert float((tangent * weight).sum()) == pytest.approx(float((gradient * direction).sum()))


def gradients(case, wanted, dtype=torch.float32, convert=lambda t: t):
    """The gradients of the tensors that `wanted` names, with all else left out of the graph."""
    tensors = {n: convert(t.to(dtype)) for n, t in case.over_tokens.items()}
    states = {n: t.float() for n, t in case.states.items()}
    for name in wanted:
        for group in (tensors, states):
            if name in group:
                group[name].requires_grad_()
    y, _ = case.call(tensors, states, None, "chunked")
    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    (y.float() * weight).sum().backward()
    return {n: g.grad for n, g in (tensors | states).items() if n in wanted}


def assert_same(actual, expected, limit=1e-6):
    assert actual.keys() == expected.keys()
    for what, value in expected.items():
        assert (actual[what] is None) == (value is None), what
        if value is not None:
            assert relative_rms(actual[what], value) <= limit, what


@every_recurrence
@pytest.mark.parametrize("tokens", [1, 70])
def test_backward_inside_autocast(name, tokens):
    case = CASES[name](Shape(tokens=tokens))
    expected = gradients(case, case.over_tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gradients(case, case.over_tokens)
    assert_same(actual, expected)


@every_recurrence
def test_gradients_of_inputs_alone_and_of_states_alone(name):
    case = CASES[name](Shape(tokens=70))
    names = [*case.over_tokens, *case.states]
    expected = gradients(case, names)
    for part in (case.over_tokens, case.states, names[:1]):
        alone = gradients(case, part)
        for what, value in alone.items():
            if value is not None or expected[what] is not None:
                assert relative_rms(value, expected[what]) <= 1e-6, what


@every_recurrence
def test_inputs_that_are_not_contiguous(name):
    case = CASES[name](Shape(tokens=70))
    expected = gradients(case, case.over_tokens)
    apart = gradients(
        case,
        case.over_tokens,
        convert=lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    )
    assert_same(apart, expected)


@every_recurrence
def test_bounds_in_int32(name):
    shape = Shape(lengths=(10, 0, 40))
    case = CASES[name](shape)
    for backend in ("reference", "chunked"):
        found = [
            {"y": y} | finals
            for y, finals in (
                case.call(case.over_tokens, case.states, bounds, backend)
                for bounds in (shape.cu_seqlens.int(), shape.cu_seqlens)
            )
        ]
        assert_same(*found)


@every_recurrence
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_pack_of_nothing(name, backend):
    case = CASES[name](Shape(lengths=()))
    y, finals = case.call(case.over_tokens, case.states, torch.tensor([0]), backend)
    assert y.shape[:2] == (1, 0)
    assert {len(final) for final in finals.values()} == {0}
    case = CASES[name](Shape(lengths=(7,)))
    states = {n: t[:0] if n in finals else t for n, t in case.states.items()}
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of tokens, 7"):
        case.call(case.over_tokens, states, torch.tensor([0]), backend)


@every_recurrence
@pytest.mark.parametrize("graded", [True, False])
def test_what_is_kept_for_the_backward(name, graded):
    """The inputs, and states that take less; nothing where no gradients are wanted."""
    case = CASES[name](Shape(batch=64, tokens=128, heads=1, key=64, value=64, slots=64))
    inputs = {n: t.float().requires_grad_() for n, t in case.over_tokens.items()}
    states = {n: t.float() for n, t in case.states.items()}
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.set_grad_enabled(graded):
        y, _ = case.call(inputs, states, None, "chunked")
    if not graded:
        assert not kept
    else:  # a normaliser's division also keeps y
        assert sum(kept.values()) < 2 * sum(x.nbytes for x in inputs.values()) + y.nbytes


@every_recurrence
def test_on_meta(name):
    """Shapes without numbers, as for `torch.device("meta")` models."""
    case = CASES[name](Shape(tokens=70))
    inputs, states = (
        {n: t.to("meta").requires_grad_() for n, t in group.items()}
        for group in (case.over_tokens, case.states)
    )
    y, _ = case.call(inputs, states, None, "auto")
    assert y.device.type == "meta"
    expected, _ = case.call(case.over_tokens, case.states, None, "auto")
    assert y.shape == expected.shape
    y.sum().backward()
    assert all(t.grad.shape == t.shape for t in inputs.values())


@every_recurrence
def test_a_pack_on_meta_is_refused(name):
    """Its bounds would have to be read, and a tensor on meta has no numbers."""
    shape = Shape(lengths=(10, 40))
    case = CASES[name](shape)
    inputs, states = (
        {n: t.to("meta") for n, t in group.items()} for group in (case.over_tokens, case.states)
    )
    for backend in ("reference", "chunked", "auto"):
        with pytest.raises(ValueError, match="cu_seqlens must hold numbers; got a tensor on meta"):
            case.call(inputs, states, shape.cu_seqlens.to("meta"), backend)


@every_recurrence
def test_backends_of_the_environment(name, monkeypatch):
    case = CASES[name](Shape(tokens=1))

    def ran(backend):
        monkeypatch.setenv("TRELLIS_BACKEND", backend)
        inputs = {n: t.clone().requires_grad_() for n, t in case.over_tokens.items()}
        graph = case.call(inputs, case.states, None, "auto")[1]
        nodes, seen = [next(iter(graph.values())).grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [before for before, _ in node.next_functions]
        return "chunked" if any("_Chunked" in node.name() for node in seen) else "reference"

    assert ran("auto") == ran("reference") == "reference"
    assert ran("chunked") == "chunked"
    if name.startswith("memory"):
        with pytest.raises(
            ValueError, match="TRELLIS_BACKEND='triton' cannot run here: it runs on a"
        ):
            ran("triton")
    else:  # these have neither, and choose by themselves
        assert ran("native") == ran("triton") == "reference"


@every_recurrence
def test_gradients_of_half_precision(name):
    case = CASES[name](Shape(tokens=70))
    rounded = type(case)(
        {n: t.bfloat16().double() for n, t in case.over_tokens.items()}, case.states, case.call
    )
    expected = gradients(rounded, case.over_tokens)
    actual = gradients(rounded, case.over_tokens, torch.bfloat16)
    assert {g.dtype for g in actual.values()} == {torch.bfloat16}
    assert_same(actual, expected, 1e-2)


#: Recurrences that decay by one factor per token and head.
DECAYING = [cases.delta_decaying, cases.linear_decaying, cases.linear_groups_decaying]
every_decay = pytest.mark.parametrize("build", DECAYING)


@every_decay
@pytest.mark.parametrize("extreme", [-math.inf, -1e4, -3.0, 0.0])
@pytest.mark.parametrize("every", [1, 7])
def test_extreme_decay(build, extreme, every):
    case = build(Shape(tokens=150))
    case.over_tokens["log_decay"][:, ::every] = extreme
    assert_within_limits(case)


@every_decay
def test_after_forgetting_nothing_of_before_is_left(build):
    case = build(Shape(tokens=100))
    case.over_tokens["log_decay"][:, 70] = -math.inf
    whole, _ = case.call(case.over_tokens, case.states, None, "chunked")
    rest = {name: t[:, 70:] for name, t in case.over_tokens.items()}
    blank = {"memory": torch.zeros_like(case.states["memory"])}
    assert relative_rms(whole[:, 70:], case.call(rest, blank, None, "chunked")[0]) < 1e-12


@every_decay
def test_no_decay_is_a_decay_of_one(build):
    case = build(Shape(tokens=100))
    case.over_tokens["log_decay"].zero_()
    one = results(case, None, "chunked", torch.float64)
    del case.over_tokens["log_decay"]
    other = results(case, None, "chunked", torch.float64)
    for what, value in other.items():
        assert relative_rms(one[what], value) < 1e-12, what
