"""The sizes of all mixers by default; values that a mixer cannot have are named."""

import pytest
import torch

from trellis.mixers import MIXERS, build_mixer, computed_fields
from trellis.mixers.base import named_tensors

#: mixer -> (heads, size of a head's keys, of its values, numbers of the memory) at width 768 with
#: 12 heads.
SIZES = {
    "trellis": (12, 64, 128, 12 * 64 * (64 + 128)),
    "transformer": (12, 64, 64, 0),
    "delta_net": (4, 144, 288, 4 * 144 * 288),
    "gated_delta_net": (4, 144, 288, 4 * 144 * 288),
    "linear_attention": (12, 64, 64, 12 * 64 * 65),
    "abc": (4, 96, 192, 4 * 64 * (96 + 192 + 1) + 1),
    "gsa": (4, 192, 192, 4 * 64 * 2 * 192),
    "mamba2": (24, 128, 64, 24 * 128 * 64),
    "ttt": (12, 64, 64, 2 * 12 * 65 * 64 + 1),
}


@pytest.mark.parametrize("name", MIXERS)
def test_the_sizes_of_comparisons(name):
    """By default, a mixer has the sizes that its authors give it."""
    with torch.device("meta"):
        mixer = build_mixer(name, 768, 12)
    heads, keys, values, memory = SIZES[name]
    size = getattr(mixer, "head_dim", None)
    own = (
        mixer.heads,
        mixer.config.state_dim if name == "mamba2" else getattr(mixer, "key_dim", size),
        getattr(mixer, "value_dim", size),
    )
    assert own == (heads, keys, values)
    tails = sum(
        tensor.numel() for path, tensor in named_tensors(mixer.init_state(1)) if "tail" in path
    )
    if name != "transformer":
        assert mixer.state_size() - tails == memory


@pytest.mark.parametrize(
    ("mixer", "fields", "message"),
    [
        ("mamba2", {"decay_rate": 1.0}, "decay_rate must be a range 0 < low <= high; got 1.0"),
        ("mamba2", {"decay_step": [1, 2, 3]}, "decay_step must be a range"),
        ("mamba2", {"decay_rate": (1, float("inf"))}, "decay_rate must be a range"),
        ("mamba2", {"step_limit": [0.1]}, "step_limit must be a range 0 <= low <= high"),
        (
            "mamba2",
            {"head_dim": 24},
            "head_dim must divide the inner width, expand . width = 64; got 24",
        ),
        ("trellis", {"decay_rate": (2.0, 1.0)}, "decay_rate must be a range"),
        ("trellis", {"decay_temperature": "8"}, "decay_temperature must be a number above 0"),
        ("gsa", {"decay_temperature": float("inf")}, "decay_temperature must be a number above 0"),
        ("gsa", {"slots": 0}, "slots must be a whole number of at least 1; got 0"),
        ("abc", {"write": "space"}, "write must be one of"),
        ("linear_attention", {"normalize": "yes"}, "normalize must be true or false; got 'yes'"),
        ("linear_attention", {"feature_map": "exp"}, "feature_map must be one of"),
        ("delta_net", {"use_gate": "no"}, "use_gate must be true or false; got 'no'"),
        (
            "gated_delta_net",
            {"head_dim": 0},
            "head_dim must be a whole number of at least 1; got 0",
        ),
        ("delta_net", {"expand_v": 0.3}, "expand_v must make a whole number of the key size, 24"),
        ("delta_net", {"shape": "wide"}, "shape must be one of authors, square, model; got 'wide'"),
        ("delta_net", {"heads": 5}, "heads must divide the width of all keys, 24; got 5"),
        ("delta_net", {"head_dim": 5}, "head_dim must divide the width of all keys, 24; got 5"),
        ("linear_attention", {"output_gate": 1}, "output_gate must be true or false; got 1"),
        ("linear_attention", {"conv_on": ["x"]}, "conv_on must be a list of some of"),
        ("gsa", {"output_gate": "yes"}, "output_gate must be true or false; got 'yes'"),
        ("abc", {"expand_k": 0.3}, "expand_k must make a whole number of the head size, 8; got"),
        ("ttt", {"pre_conv": "yes"}, "pre_conv must be true or false; got 'yes'"),
        ("ttt", {"minibatch": 0}, "minibatch must be a whole number of at least 1; got 0"),
        ("ttt", {"conv_width": 0}, "conv_width must be at least 1 with share_qk"),
    ],
)
def test_a_wrong_value_is_named(mixer, fields, message):
    with pytest.raises(ValueError, match=message):
        build_mixer(mixer, 32, 2, **fields)


def test_computed_fields_name_defaults_too():
    """So that a record tells the present default from another one."""
    plain = computed_fields("trellis", {})
    assert plain == computed_fields("trellis", {"backend": "reference"})
    assert plain == computed_fields("trellis", {"conv_on": ["q", "k", "v", "alpha"]})
    assert plain != computed_fields("trellis", {"conv_on": ["q", "k"]})
    assert "backend" not in plain
