"""The memory's Triton kernels in Triton's interpreter, on a CPU, against the definition.

`make test-triton` runs all of it; `make test` runs what is marked `small` (tests/ops/memory/
test_triton.py). Fresh memory is filled with NaN, so a place that no kernel writes shows.
"""

import json
import math
import os
import random

import pytest
import torch
from tests.support import problem, projection, relative_rms

pytest.importorskip("triton", reason="Triton is not installed here; see `make test-triton`")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; see `make test-triton`", allow_module_level=True)

from trellis.ops import MemoryState, compress, trellis_memory, trellis_memory_step
from trellis.ops.memory.activations import F_NAMES, PSI_NAMES

LIMIT = 2e-5
NAMES = ("q", "k", "v", "alpha", "log_beta", "gamma")
small = pytest.mark.small
modes = pytest.mark.parametrize("mode", ["exact", "stale"])


@pytest.fixture(autouse=True)
def filled_with_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def compare(case):
    """Within LIMIT of the definition in fp64. A gradient may be the small difference of large
    numbers: where fp32 itself is not as exact, within three times the chunked backend's error."""
    expected = case.run("reference", torch.float64)
    actual = case.run("triton", torch.float32)
    assert actual.keys() == expected.keys()
    errors = {name: relative_rms(actual[name], value) for name, value in expected.items()}
    if all(error <= LIMIT for error in errors.values()):
        return
    for name, chunked in case.run("chunked", torch.float32).items():
        limit = max(LIMIT, 3 * relative_rms(chunked, expected[name]))
        assert errors[name] <= limit, f"{name}: {errors[name]:.1e} > {limit:.1e}, {case.options}"


def drawn(seed):
    """A problem whose sizes, lengths and options are drawn."""
    draw = random.Random(seed)
    key, value, slots = draw.sample(range(1, 40), 3)
    options = {
        "phi": draw.choice(["identity", "silu", "gelu", "tanh"]), "f": draw.choice(F_NAMES),
        "psi": draw.choice(["identity", "identity", *PSI_NAMES]),
        "mode": ["exact", "stale"][seed % 2], "value_pass": ["encode", "decode"][seed // 2 % 2],
        "error_at": ["before", "after"][seed // 4 % 2], "minibatch": draw.randint(2, 40),
    }  # fmt: skip
    shape = {"batch": draw.randint(1, 2), "tokens": draw.randint(1, 70)}
    if draw.random() < 0.4:
        shape = {"lengths": draw.choices([0, 1, 9, 16, 33, 66], k=draw.randint(1, 3))}
    return problem(key=key, value=value, slots=slots, heads=1, seed=seed, **shape, **options)


@pytest.mark.parametrize("seed", range(28))
def test_drawn_problems(seed):
    compare(drawn(seed))


@small
@pytest.mark.parametrize("error_at", ["before", "after"])
@modes
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_lengths(mode, tokens, error_at):
    compare(problem(tokens=tokens, batch=1, heads=1, mode=mode, error_at=error_at))


@modes
@pytest.mark.parametrize("size", [64, 100, 128])
def test_large_sizes(mode, size):
    sizes = {"key": size, "value": size - 3, "slots": size - 7}
    compare(problem(tokens=18, batch=1, heads=1, mode=mode, minibatch=16, **sizes))


def test_small_sizes():
    compare(problem(key=1, value=2, slots=3, tokens=9, phi="tanh"))


@modes
def test_packs_with_empty_sequences(mode):
    compare(problem(lengths=[0, 5, 0, 66, 17, 0], heads=1, mode=mode, minibatch=10))


def test_a_pack_of_no_sequences():
    compare(problem(lengths=[], heads=1))


@pytest.mark.parametrize("error_at", ["before", "after"])
@modes
@pytest.mark.parametrize("log_beta", [0.0, -1e4, -2e4, -math.inf])
def test_decay_at_its_ends(mode, log_beta, error_at):
    case = problem(tokens=20, batch=1, heads=1, mode=mode, error_at=error_at)
    case.tensors["log_beta"].fill_(log_beta)
    case.tensors["log_beta2"][:, 3::5] = log_beta
    compare(case)


def inputs(case, dtype=torch.float32):
    return [case.tensors[name].to(dtype) for name in NAMES]


@modes
def test_pieces_equal_the_whole(mode):
    case = problem(tokens=50, batch=1, heads=1, mode=mode, minibatch=12)
    tensors, state, outputs, begin = inputs(case), None, [], 0
    options = case.options | {"output_final_state": True, "backend": "triton"}
    whole, final = trellis_memory(*tensors, **options)
    for length in (7, 0, 13, 30):
        part = [t[:, begin : begin + length] for t in tensors]
        y, state = trellis_memory(*part, initial_state=state, **options)
        outputs.append(y)
        begin += length
    assert relative_rms(torch.cat(outputs, dim=1), whole) < 1e-5
    for one, other in zip(state, final):
        assert (one is None and other is None) or relative_rms(one, other) < 1e-5


@small
@pytest.mark.parametrize("value_pass", ["encode", "decode"])
@modes
def test_token_by_token_is_the_definition(mode, value_pass):
    case = problem(tokens=7, minibatch=3, mode=mode, value_pass=value_pass)
    tensors = inputs(case)
    expected, final = trellis_memory(
        *tensors, output_final_state=True, backend="reference", **case.options
    )
    state, outputs = None, []
    for t in range(7):
        token = [tensor[:, t] for tensor in tensors]
        y, state = trellis_memory_step(
            *token, initial_state=state, backend="triton", **case.options
        )
        outputs.append(y)
    assert relative_rms(torch.stack(outputs, dim=1), expected) < LIMIT
    for one, other in zip(state, final):
        assert (one is None and other is None) or relative_rms(one, other) < LIMIT


@pytest.mark.parametrize("error_at", ["before", "after"])
@pytest.mark.parametrize(("f", "psi"), [*((f, "identity") for f in F_NAMES),
                                        *(("silu", psi) for psi in PSI_NAMES)])  # fmt: skip
def test_steps_with_every_f_and_psi(f, psi, error_at):
    case = problem(tokens=1, f=f, psi=psi, error_at=error_at, phi="gelu")
    state = (case.tensors["keys"].float(), case.tensors["values"].float())
    token = [tensor[:, 0] for tensor in inputs(case)]
    results = [
        trellis_memory_step(*token, initial_state=state, backend=backend, **case.options)
        for backend in ("reference", "triton")
    ]
    for one, other in ((results[1][0], results[0][0]), *zip(results[1][1][:2], results[0][1][:2])):
        assert relative_rms(one, other) < LIMIT


@pytest.mark.parametrize("transposed", [False, True])
@modes
def test_one_pass(mode, transposed):
    case = problem(tokens=20, batch=1, heads=1)
    given = [case.tensors[name] for name in ("q", "k", "alpha", "log_beta", "gamma", "keys")]
    if transposed:
        given[0] = given[2] * 0.5
    results = []
    for backend, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in given]
        y, state = compress(
            *leaves[:5], initial_state=leaves[5], output_final_state=True, mode=mode,
            transposed=transposed, backend=backend,
        )  # fmt: skip
        projection((y, state.memory)).backward()
        results.append([y, state.memory, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results):
        assert relative_rms(other, one) <= LIMIT


@modes
def test_computing_again_and_running_twice_give_the_same_bits(mode):
    once = problem(tokens=20, batch=1, heads=1, mode=mode).run("triton", torch.float32)
    for options in ({}, {"recompute": True}):
        again = problem(tokens=20, batch=1, heads=1, mode=mode, **options)
        for name, value in again.run("triton", torch.float32).items():
            assert torch.equal(value, once[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value_pass", ["encode", "decode"])
def test_half_precision(dtype, value_pass):
    """Products round as on a GPU. The states see two halves of what they are multiplied with."""
    case = problem(tokens=40, batch=1, heads=1, value_pass=value_pass, key=16, value=18, slots=20)
    rounded = [case.tensors[name].to(dtype) for name in NAMES]
    leaves = [[t.to(kind).clone().requires_grad_() for t in rounded] for kind in (
        torch.float64, dtype)]  # fmt: skip
    results = []
    for backend, given in zip(("reference", "triton"), leaves):
        y, state = trellis_memory(*given, output_final_state=True, backend=backend, **case.options)
        projection((y,)).backward()
        results.append((y, state, [t.grad for t in given]))
    (y, state, gradients), (y2, state2, gradients2) = results
    assert y2.dtype == dtype
    assert state2.keys.dtype == torch.float32
    assert relative_rms(y2, y) < 5e-3
    # decode rounds the unit codes, which the definition computes in fp64
    assert relative_rms(state2.keys, state.keys) < 2e-5
    assert relative_rms(state2.values, state.values) < (2e-5 if value_pass == "encode" else 5e-3)
    for one, other in zip(gradients2, gradients):
        assert one.dtype == dtype
        assert relative_rms(one, other) < 1e-2


@pytest.mark.parametrize("name", NAMES)
@modes
def test_nothing_is_read_from_the_future(mode, name):
    case = problem(batch=2, tokens=20, heads=1, mode=mode, f="silu")
    tensors = dict(zip(NAMES, inputs(case)))
    clean, _ = trellis_memory(*tensors.values(), backend="triton", **case.options)
    tensors[name] = tensors[name].clone()
    tensors[name][1, 12] = math.nan
    y, _ = trellis_memory(*tensors.values(), backend="triton", **case.options)
    assert y[1, 12:].isnan().any()
    assert torch.equal(y[1, :12], clean[1, :12])
    assert torch.equal(y[0], clean[0])


def test_compiled():
    case = problem(tokens=17, batch=1, heads=1)

    def loss(*tensors):
        y, _ = trellis_memory(*tensors, backend="triton", **case.options)
        return y.square().sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs(case)]
        function(*leaves).backward()
        results.append([leaf.grad for leaf in leaves])
    for one, other in zip(*results):
        assert relative_rms(one, other) < 1e-6


def test_no_second_derivative():
    case = problem(tokens=3, batch=1, heads=1)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs(case)]
    y, _ = trellis_memory(*leaves, backend="triton", **case.options)
    (first,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        first.sum().backward()


@small
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"phi": "ln_silu"}, r"phi must act on each slot alone .* got 'ln_silu'"),
        ({"mode": "stale", "minibatch": 65}, "mini-batches must have at most 64 tokens; got 65"),
        ({"slots": 129}, "must be 1 to 128; got 129"),
    ],
)
def test_what_is_refused(options, why):
    case = problem(tokens=2, **options)
    with pytest.raises(ValueError, match="backend='triton' cannot run here: .*" + why):
        case.run("triton", torch.float32)


@small
def test_fp64_is_refused():
    with pytest.raises(ValueError, match=r"it computes in fp32, and a tensor is torch.float64"):
        problem(tokens=2).run("triton", torch.float64)


@small
def test_bounds_of_a_pack():
    case = problem(lengths=[3, 2], heads=1)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to .* 5; got"):
        trellis_memory(*inputs(case), cu_seqlens=torch.tensor([0, 4]), backend="triton")


def test_the_state_of_another_minibatch():
    case = problem(tokens=2, mode="stale", minibatch=4)
    state = MemoryState(*(case.tensors[n] for n in ("keys", "values", "keys", "values")),
                        torch.tensor([9, 9]))  # fmt: skip
    with pytest.raises(ValueError, match=r"offset must lie in 0 .. minibatch - 1 = 3"):
        trellis_memory(*inputs(case), initial_state=state, backend="triton", **case.options)


def test_the_benchmark_runs(tmp_path):
    """At toy size: every table, the record and the figure."""
    pytest.importorskip("matplotlib")
    from trellis.bench import gpu

    torch.use_deterministic_algorithms(False)
    lines = []
    few = ("trellis exact", "trellis stale, b = 16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "OURS", {name: gpu.OURS[name] for name in few})
        patch.setattr(gpu, "BLOCKS", (16,))
        patch.setattr(gpu, "WARPS", (4,))
        result = gpu.run([1], [20], 1, 16, "none", 1, True, lines.append)
        gpu.draw(result, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    json.dumps(result)
    assert {row["op"] for row in result["ops"]} == {*few, "SDPA causal"}
    started = ["prepare", "prepare", "write", "read", "read"]
    assert [row["kernel"] for row in result["kernels"]][:5] == started
    assert {row["kernel"] for row in result["kernels"]} == set(gpu.KERNELS) - {"step"}
    assert {row["kernel"] for row in result["tuning"]} == {"read", "read_back", "finish_back"}
    around = {row["what"] for row in result["around"]}
    assert around == {"convolution, SiLU, unit length", "gated norm", "cross-entropy"}
    assert "| 1 | 20 | GSA (fla) | | does not run: its kernels need a GPU | |" in lines
