import pytest
import torch
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
