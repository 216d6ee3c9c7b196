import pytest
import torch
import torch.nn.functional as F
from tests.support import relative_rms

from trellis.mixers import build_mixer, transformer


def test_window_equals_full_attention_inside_it():
    torch.manual_seed(0)
    full, windowed = build_mixer("transformer", 16, 2), build_mixer("transformer", 16, 2, window=9)
    windowed.load_state_dict(full.state_dict())
    x = torch.randn(2, 9, 16)
    assert relative_rms(windowed(x)[0], full(x)[0]) < 1e-6
    x = torch.randn(2, 20, 16)
    assert relative_rms(windowed(x)[0][:, 9:], full(x)[0][:, 9:]) > 1e-3


def test_cache_of_a_window_is_bounded():
    mixer = build_mixer("transformer", 16, 2, window=9)
    _, state = mixer(torch.randn(1, 500, 16))
    assert state.keys.shape[2] == 8
    # The storage, too: a view would keep all 500 tokens alive.
    assert state.keys.untyped_storage().nbytes() == state.keys.numel() * 4


def test_masks_are_built_block_by_block(monkeypatch):
    mixer = build_mixer("transformer", 16, 2)
    x = torch.randn(2, 60, 16)
    whole, _ = mixer(x)
    _, state = mixer(x[:, :30])
    monkeypatch.setattr(transformer, "MASK_ENTRIES", 130)  # two rows of 60 at a time
    rest, _ = mixer(x[:, 30:], state)
    assert relative_rms(rest, whole[:, 30:]) < 1e-5


def test_theta_matters():
    torch.manual_seed(0)
    one = build_mixer("transformer", 16, 2)
    other = build_mixer("transformer", 16, 2, rope_theta=1e6)
    other.load_state_dict(one.state_dict())
    x = torch.randn(1, 30, 16)
    assert relative_rms(one(x)[0], other(x)[0]) > 1e-3


def test_odd_head_size_is_refused():
    with pytest.raises(ValueError, match="even head size; got 5"):
        build_mixer("transformer", 15, 3)


def test_positions_stay_exact_far_into_a_stream():
    mixer = build_mixer("transformer", 16, 2, window=8)
    x = torch.randn(1, 8, 16)
    near, _ = mixer(x)
    start = mixer.init_state(1)
    far, _ = mixer(x, start._replace(length=torch.tensor([10_000_000])))
    assert relative_rms(far[:, -1], near[:, -1]) < 1e-5


def by_sequence(query, key, value, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa):
    """What torch's varlen_attn computes, with its arguments: [T, H, D] each."""
    assert query.dtype == torch.bfloat16
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert max_q == max_k == int(cu_q.diff().max())
    outputs = []
    for begin, end in zip(cu_q.tolist(), cu_q.tolist()[1:]):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        row = torch.arange(end - begin)
        back = row[:, None] - row
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] == -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=enable_gqa)
        outputs.append(y.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("lengths", [[9, 0, 3, 12], [4], [0, 7]])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_packs_at_once_equal_packs_one_by_one(window, lengths, kv_heads, monkeypatch):
    """On a GPU torch has one kernel for all sequences of a pack; here a stand-in for it."""
    mixer = build_mixer("transformer", 32, 2, window=window, kv_heads=kv_heads).bfloat16()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(1, sum(lengths), 32, dtype=torch.bfloat16)
    sides = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(transformer, "VARLEN_ON", devices)
        monkeypatch.setattr(transformer, "varlen_attention", lambda: by_sequence)
        given = x.clone().requires_grad_()
        y, state = mixer(given, None, cu_seqlens)
        (y.sum() + state.keys.sum() + state.values.square().sum()).backward()
        monkeypatch.setattr(transformer, "VARLEN_ON", ())
        after, _ = mixer(x[:, :2], state, torch.tensor([0, 2] + [2] * (len(lengths) - 1)))
        sides.append((y, *state, given.grad, after))
    for one, other in zip(*sides):
        assert one.shape == other.shape
        assert relative_rms(one, other) < 1e-2


def test_torch_takes_the_arguments(monkeypatch):
    """The real function, on tensors without numbers; it runs on a GPU only."""
    function = transformer.varlen_attention()
    if function is None:
        pytest.skip("this version of torch has no attention for packs")
    q = torch.empty(9, 2, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    bounds = torch.empty(4, dtype=torch.int32, device="meta")
    y = function(q, q, q, bounds, bounds, 5, 5, window_size=(4, 0), enable_gqa=False)
    assert y.shape == q.shape
    y.sum().backward()
    assert q.grad.shape == q.shape


def test_what_the_kernel_for_packs_does_not_take(monkeypatch):
    monkeypatch.setattr(transformer, "VARLEN_ON", ("cpu",))
    q = torch.empty(1, 2, 9, 16, dtype=torch.bfloat16)
    assert transformer._varlen_takes(q) == (transformer.varlen_attention() is not None)
    assert not transformer._varlen_takes(q.float())
    assert not transformer._varlen_takes(q[..., :12])
    assert not transformer._varlen_takes(q[:, :, :0])
