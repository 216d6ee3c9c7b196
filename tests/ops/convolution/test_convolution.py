import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support import relative_rms

from trellis.ops import causal_convolution
from trellis.ops.convolution.reference import causal_convolution_reference


def run(function, x, weight, tail):
    leaves = [t.clone().requires_grad_() for t in (x, weight, tail)]
    y, after = function(*leaves)
    (y.square().sum() + after.square().sum()).backward()
    return [
        y,
        after,
        *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves),
    ]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    width=st.integers(1, 5),
    channels=st.integers(1, 4),
)
def test_packed_and_plain_equal_the_reference(lengths, width, channels):
    x = torch.randn(1, sum(lengths), channels, dtype=torch.float64)
    weight = torch.randn(channels, width, dtype=torch.float64)
    tail = torch.randn(len(lengths), width - 1, channels, dtype=torch.float64)
    bounds = torch.tensor([0, *lengths]).cumsum(0)

    def packed(x, weight, tail):
        return causal_convolution(x, weight, tail=tail, cu_seqlens=bounds)

    def apart(x, weight, tail):
        runs = [
            causal_convolution_reference(x[:, begin:end], weight, tail[n : n + 1])
            for n, (begin, end) in enumerate(zip(bounds, bounds[1:]))
        ]
        return torch.cat([y for y, _ in runs], dim=1), torch.cat([t for _, t in runs])

    for one, other in zip(run(packed, x, weight, tail), run(apart, x, weight, tail)):
        assert relative_rms(one, other) < 1e-13
    plain = run(lambda x, w, t: causal_convolution(x, w, tail=t), x, weight, tail[:1])
    for one, other in zip(plain, run(causal_convolution_reference, x, weight, tail[:1])):
        assert relative_rms(one, other) < 1e-13


def test_equals_conv1d():
    x, weight = torch.randn(2, 9, 3), torch.randn(3, 4)
    y, _ = causal_convolution(x, weight)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], groups=3).mT
    assert relative_rms(y, expected) < 1e-6
