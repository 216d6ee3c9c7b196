"""The adapters to flash-linear-attention: its definitions ("naive") and its kernels through them.

`make test-triton` runs this. The kernels run in Triton's interpreter, on a CPU; two things that it
cannot do are made up for below.
"""

import builtins
import importlib
import math
import os
import sys

import pytest
import torch
from tests.ops.recurrences.cases import CASES
from tests.ops.recurrences.test_every_recurrence import results
from tests.support import Shape, relative_rms

pytest.importorskip("fla", reason="flash-linear-attention is absent; see `make test-triton`")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; see `make test-triton`", allow_module_level=True)

from triton.runtime.autotuner import Autotuner

from trellis.mixers import build_mixer
from trellis.ops import fla

LIMIT = 1e-5
#: Problems of the common suite that fla can compute.
TAKEN = [
    name
    for name in CASES
    if name.startswith(("linear", "delta", "gated")) and name != "gated slots of any decay"
]
SHAPES = {
    "a batch": Shape(tokens=70, heads=2, batch=1),
    "a pack": Shape(lengths=(3, 0, 66), heads=1),
    "one token": Shape(tokens=1, batch=2),
}


class Index(int):
    """The counter of a loop in a kernel: it can be cast, as in a compiled kernel."""

    def to(self, dtype):
        return self


def indices(*bounds):
    given = (int(b.handle.data[0]) if hasattr(b, "handle") else b for b in bounds)
    return map(Index, builtins.range(*given))


@pytest.fixture
def kernels(monkeypatch):
    """fla's kernels on a CPU. Configurations are measured on a GPU: here the first is taken."""
    pruned = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, "prune_configs", lambda *given: pruned(*given)[:1])
    importlib.import_module("fla.ops.ttt")
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops") and module is not None:
            monkeypatch.setattr(module, "range", indices, raising=False)


def naive(name):
    """The definition that belongs to an op of fla, with the op's arguments."""

    def op(*tensors, initial_state, cu_seqlens=None, **rest):
        if cu_seqlens is None:
            return define(*tensors, initial_state=initial_state, **rest)
        single = torch.is_tensor(initial_state)
        states = (initial_state,) if single else initial_state
        outputs, finals = [], []
        bounds = cu_seqlens.tolist()
        for n, (begin, end) in enumerate(zip(bounds, bounds[1:])):
            final = [state[n : n + 1] for state in states]
            if begin < end:
                part = [x[:, begin:end] for x in tensors]
                named = {k: x[:, begin:end] if torch.is_tensor(x) else x for k, x in rest.items()}
                y, final = define(*part, initial_state=final[0] if single else final, **named)
                outputs.append(y)
                final = [final] if single else final
            finals.append(final)
        joined = [torch.cat(parts) for parts in zip(*finals)]
        return torch.cat(outputs, dim=1), joined[0] if single else joined

    def define(q, k, v, **given):
        kind = name.removeprefix("chunk_").removeprefix("fused_recurrent_")
        module = importlib.import_module(f"fla.ops.{kind}.naive")
        if kind in ("gated_delta_rule", "simple_gla") and given["g"] is None:
            given["g"] = torch.zeros_like(v[..., 0])
        if kind == "delta_rule":  # heads first, and a scale of its own
            q = q * given.pop("scale") * q.shape[-1] ** 0.5
            beta = given.pop("beta").transpose(1, 2)
            first = (x.transpose(1, 2) for x in (q, k, v))
            y, final = module.delta_rule_recurrence(*first, beta, **given)
            return y.transpose(1, 2), final
        return getattr(module, f"naive_recurrent_{kind}")(q, k, v, **given)

    return op


@pytest.fixture(params=["naive", "kernels"])
def on_the_cpu(request, monkeypatch):
    monkeypatch.setattr(fla, "DEVICES", ("cpu",))
    monkeypatch.setattr(fla, "tf32_allowed", lambda: True)
    if request.param == "naive":
        monkeypatch.setattr(fla, "load", naive)
    else:
        request.getfixturevalue("kernels")
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TAKEN)
def test_the_definition(on_the_cpu, name, shape):
    """y, the final states and all gradients."""
    shape = SHAPES[shape]
    case = CASES[name](shape)
    expected = results(case, shape.cu_seqlens, "reference", torch.float64)
    actual = results(case, shape.cu_seqlens, "fla", torch.float32)
    assert actual.keys() == expected.keys()
    for what, value in expected.items():
        error = relative_rms(actual[what], value)
        assert error <= LIMIT, f"{what}: {error:.1e}"


@pytest.mark.parametrize("name", ["gated delta rule", "linear attention, decay", "gated slots"])
def test_decays_to_nothing(on_the_cpu, name):
    """-inf becomes e^-30; the sums then have fewer digits left for weak decays."""
    case = CASES[name](Shape(tokens=20, batch=1, heads=1))
    case.over_tokens["log_decay"][:, 7] = -math.inf
    expected = results(case, None, "reference", torch.float64)
    for what, value in results(case, None, "fla", torch.float32).items():
        assert relative_rms(value, expected[what]) <= LIMIT, what


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated_delta_net", "delta_net", "gsa", "abc", "linear_attention",
                                  "mamba2"])  # fmt: skip
def test_decoding(on_the_cpu, name):
    """Mixers token by token, by the kernels for it."""
    sides = []
    x = torch.randn(2, 3, 32)
    mixer = build_mixer(name, 32, 2)
    for backend in ("fla", "reference"):
        mixer.config.backend = backend
        state, outputs = None, []
        for token in x.split(1, dim=1):
            y, state = mixer(token, state)
            outputs.append(y)
        sides.append(torch.cat(outputs, dim=1))
    assert relative_rms(*sides) <= LIMIT


@pytest.mark.parametrize("name", ["Gated DeltaNet (fla)", "GSA (fla)", "TTT-Linear (fla)"])
def test_the_peers_of_the_benchmark_run(kernels, name):
    """`trellis bench gpu` calls fla's ops itself; here with their kernels, at toy size."""
    from trellis.bench import gpu

    made = gpu.PEERS[name](gpu.Inputs(1, 20, 1, 16, torch.device("cpu")))
    gpu.both_ways(made)
    assert all(leaf.grad is not None for leaf in made[1])
