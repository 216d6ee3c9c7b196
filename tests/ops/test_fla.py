"""The backend "fla", with stand-ins for flash-linear-attention's ops; the real ones are called in
tests/triton/test_fla.py and tests/gpu."""

import logging
import math
import sys
from types import ModuleType

import pytest
import torch
from tests.ops.recurrences.cases import CASES
from tests.ops.recurrences.test_every_recurrence import results
from tests.support import Shape, relative_rms

from trellis.mixers import build_mixer
from trellis.ops import (
    delta_rule,
    fla,
    gated_slots,
    linear_attention,
    recurrence,
    trellis_memory,
)
from trellis.ops.dispatch import NoKernel

#: Problems of the common suite that flash-linear-attention can compute.
TAKEN = [name for name in CASES if name.startswith(("linear", "delta", "gated"))]
#: mixer -> the op that "auto" takes for it, without the first word
OPS = {
    "gated_delta_net": "gated_delta_rule",
    "delta_net": "delta_rule",
    "gsa": "gsa",
    "abc": "gsa",
    "linear_attention": "simple_gla",
    "mamba2": "simple_gla",
}


@pytest.fixture
def called(monkeypatch):
    """The CPU stands for a GPU. A list of the ops that were called, and the dtype of their q."""
    names = []

    def load(name):
        def op(q, k, v, *, g=None, beta=None, s=None, **options):
            names.append((name, q.dtype))
            assert q.dtype == k.dtype == v.dtype
            options["backend"] = "reference"
            start = options.pop("initial_state")
            if name.endswith("delta_rule"):
                return delta_rule(q, k, v, beta, g, initial_state=start, **options)
            if name.endswith("gsa"):
                start = (start[0].mT, start[1])
                y, final = gated_slots(q, k, v, s, g, initial_state=start, **options)
                return y, (final.keys.mT, final.values)
            y, final = linear_attention(q, k, v, g, initial_state=start, **options)
            return y, final.memory

        return op

    monkeypatch.setattr(fla, "DEVICES", ("cpu",))
    monkeypatch.setattr(fla, "tf32_allowed", lambda: True)
    monkeypatch.setattr(fla, "load", load)
    monkeypatch.setattr("trellis.mixers.layers.HALF_ON", ("cpu",))
    first, *others = recurrence._BACKENDS.table
    table = (first._replace(missing=lambda: ""), *others)
    monkeypatch.setattr(recurrence._BACKENDS, "table", table)
    return names


@pytest.mark.parametrize(
    "shape", [Shape(tokens=20), Shape(lengths=(3, 0, 17)), Shape(tokens=1, key=3, value=5)]
)
@pytest.mark.parametrize("name", TAKEN)
def test_calls_are_translated(called, name, shape):
    case = CASES[name](shape)
    expected = results(case, shape.cu_seqlens, "reference", torch.float64)
    actual = results(case, shape.cu_seqlens, "fla", torch.float32)
    assert actual.keys() == expected.keys()
    for what, value in expected.items():
        assert relative_rms(actual[what], value) <= 2e-5, what
    assert len(called) == 1


@pytest.mark.parametrize("name", OPS)
def test_auto_takes_it(called, name):
    """In bf16 autocast, for a batch and for a token."""
    mixer = build_mixer(name, 32, 2)
    x = torch.randn(2, 9, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer(x)
        with torch.no_grad():
            mixer(x[:, :1], state)
    kind, half = OPS[name], torch.bfloat16
    decoding = "gated_delta_rule" if kind == "delta_rule" else kind
    assert called == [(f"chunk_{kind}", half), (f"fused_recurrent_{decoding}", half)]
    mixer.config.backend = "chunked"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_rms(y, mixer(x)[0]) < 2e-2


def test_ttt_stays_with_the_portable_code(called):
    mixer = build_mixer("ttt", 32, 2)
    mixer(torch.randn(2, 20, 32))
    assert called == []
    mixer.config.backend = "fla"
    with pytest.raises(ValueError, match=r"a step size for every token that reads the model"):
        mixer(torch.randn(2, 20, 32))


def inputs(dtype=torch.bfloat16, tokens=4, key=8):
    shape = (1, tokens, 2)
    q, k, v = torch.randn(3, *shape, key, dtype=dtype).unbind()
    return q, k, v, torch.rand(shape, dtype=dtype), -torch.rand(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (inputs(torch.float64), "it computes in fp32, and a tensor is torch.float64"),
        (inputs(torch.float32), "it multiplies fp32 in TF32"),
        (inputs(tokens=0), "it needs at least one token"),
        (inputs(key=257), "keys must have a size of at most 256; got 257"),
    ],
)
def test_what_is_refused(called, monkeypatch, given, why):
    monkeypatch.setattr(fla, "tf32_allowed", lambda: False)
    with pytest.raises(ValueError, match=f"backend='fla' cannot run here: .*{why}"):
        delta_rule(*given, backend="fla")
    delta_rule(*given)
    assert called == []


def test_elsewhere_it_says_why():
    with pytest.raises(ValueError, match="it runs on a GPU, and a tensor is on cpu"):
        delta_rule(*inputs(), backend="fla")
    with pytest.raises(ValueError, match=r"backend must be one of auto, reference, .*got 'fla'"):
        trellis_memory(*inputs()[:3], inputs()[0], *inputs()[:2:-1], backend="fla")


def test_tf32_is_the_users_choice(monkeypatch):
    assert not fla.tf32_allowed()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert fla.tf32_allowed()


def test_a_package_that_is_missing_or_broken(monkeypatch):
    monkeypatch.setattr(fla, "DEVICES", ("cpu",))
    monkeypatch.setitem(sys.modules, "fla", None)
    fla.missing.cache_clear()
    with pytest.raises(NoKernel, match=r"cannot be imported .*pip install 'trellis-memory\[gpu\]'"):
        delta_rule(*inputs(), backend="fla")
    delta_rule(*inputs())
    fla.missing.cache_clear()


@pytest.mark.parametrize("version", ["3.9.0", "3.7.1+git", "4.0"])
def test_it_is_announced_once(version, monkeypatch, caplog):
    monkeypatch.setattr(fla.metadata, "version", lambda name: version)
    package = ModuleType("fla")
    package.__version__ = "9.9"
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    fla.missing.cache_clear()
    with caplog.at_level(logging.WARNING, "trellis"):
        assert [fla.missing(), fla.missing()] == ["", ""]
    assert caplog.messages == ["recurrences run by the kernels of flash-linear-attention 9.9"]
    fla.missing.cache_clear()


def test_an_old_triton(monkeypatch):
    monkeypatch.setattr(fla.metadata, "version", lambda name: "3.7.0")
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla"].__version__ = "9.9"
    fla.missing.cache_clear()
    assert "it needs Triton 3.7.1 or more" in fla.missing()
    fla.missing.cache_clear()


def test_a_second_derivative_is_refused(called):
    q, *others = inputs()
    q.requires_grad_()
    y, _ = delta_rule(q, *others)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        torch.autograd.grad(y.sum(), q, create_graph=True)


def test_a_decay_to_nothing(called):
    """-inf becomes e^-30, because fla takes differences of sums."""
    q, k, v, beta, log_decay = inputs()
    log_decay[:, 2] = -math.inf
    y, _ = delta_rule(q, k, v, beta, log_decay, backend="fla")
    expected, _ = delta_rule(q, k, v, beta, log_decay, backend="reference")
    assert relative_rms(y, expected) < 1e-2


def test_wrong_bounds_of_a_pack(called):
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to the number of tokens, 4"):
        delta_rule(*inputs(), cu_seqlens=torch.tensor([0, 9]), backend="fla")
