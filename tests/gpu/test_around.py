"""What others' kernels compute on a GPU: the other recurrences, attention over packs, the loss.

Nobody has run these yet: they were written without a GPU (docs/gpu.md). `make test-gpu` runs them.
"""

import pytest
import torch
from tests.ops.recurrences.cases import CASES
from tests.ops.recurrences.test_every_recurrence import results
from tests.ops.test_cross_entropy import check_gradient, targets_of
from tests.support import Case, Shape, normal, projection, relative_rms

if not torch.cuda.is_available():
    pytest.skip("no GPU was found", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("the GPU's compute capability is below 8.0", allow_module_level=True)

from trellis.mixers import build_mixer, transformer
from trellis.ops import cross_entropy, fla

TAKEN = [
    name
    for name in CASES
    if name.startswith(("linear", "delta", "gated")) and name != "gated slots of any decay"
]
SHAPES = {
    "a batch": Shape(tokens=300, heads=3, key=64, value=48, slots=32),
    "a pack": Shape(lengths=(0, 130, 1, 64, 0, 65), key=64, value=48, slots=32),
    "one token": Shape(tokens=1, key=64, value=48, slots=32),
}


@pytest.fixture
def with_fla():
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    assert not fla.missing()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TAKEN)
def test_recurrences_in_bf16(with_fla, name, shape):
    """y, final states and gradients against the definition in fp64 on the same inputs."""
    shape = SHAPES[shape]
    case = CASES[name](shape)
    rounded = {n: t.bfloat16() for n, t in case.over_tokens.items()}
    exact = Case({n: t.double() for n, t in rounded.items()}, case.states, case.call)
    expected = results(exact, shape.cu_seqlens, "reference", torch.float64)
    found = {}
    for backend in ("fla", "chunked"):
        inputs = {n: t.cuda().requires_grad_() for n, t in rounded.items()}
        states = {n: t.float().cuda().requires_grad_() for n, t in case.states.items()}
        cu = None if shape.cu_seqlens is None else shape.cu_seqlens.cuda()
        y, finals = case.call(inputs, states, cu, backend)
        assert y.dtype == torch.bfloat16
        outputs = {"y": y} | {f"final {n}": final for n, final in finals.items()}
        projection(out.cpu().double() for out in outputs.values()).backward()
        gradients = {f"gradient of {n}": t.grad for n, t in (inputs | states).items()}
        found[backend] = outputs | gradients
    for what, value in expected.items():
        error, portable = (relative_rms(found[b][what].cpu(), value) for b in ("fla", "chunked"))
        assert error < max(2e-2, 3 * portable), what


@pytest.mark.parametrize("name", ["gated_delta_net", "delta_net", "gsa", "abc", "linear_attention",
                                  "mamba2", "ttt"])  # fmt: skip
def test_mixers_choose_by_themselves(with_fla, name):
    mixer = build_mixer(name, 128, 2).cuda()
    x = torch.randn(2, 100, 128, device="cuda")
    sides = []
    for backend in ("auto", "chunked"):
        mixer.config.backend = backend
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y, _ = mixer(x)
        y.float().square().mean().backward()
        sides.append(y)
    assert relative_rms(*sides) < 3e-2


@pytest.mark.parametrize("window", [None, 50])
def test_attention_over_a_pack(window, monkeypatch):
    if transformer.varlen_attention() is None:
        pytest.skip("this version of torch has no attention for packs")
    mixer = build_mixer("transformer", 128, 2, window=window).cuda().bfloat16()
    cu = torch.tensor([0, 100, 100, 130, 400], device="cuda")
    x = torch.randn(1, 400, 128, device="cuda", dtype=torch.bfloat16)
    sides = []
    for devices in (("cuda",), ()):
        monkeypatch.setattr(transformer, "VARLEN_ON", devices)
        given = x.clone().requires_grad_()
        y, state = mixer(given, None, cu)
        y.float().square().sum().backward()
        sides.append((y, *state, given.grad))
    for one, other in zip(*sides):
        assert relative_rms(one, other) < 2e-2


def test_the_loss():
    if cross_entropy.liger() is None:
        pytest.skip("liger-kernel is not installed")
    logits = 3 * normal(300, 32000).cuda()
    assert cross_entropy._liger_takes(logits.float())
    check_gradient(logits, targets_of(300, 32000).cuda())
