"""Values that a mixer cannot have are named."""

import pytest

from trellis.mixers import build_mixer


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
        ("delta_net", {"expand_v": 0.3}, "expand_v must make a whole number of the key size, 16"),
        ("ttt", {"minibatch": 0}, "minibatch must be a whole number of at least 1; got 0"),
        ("ttt", {"conv_width": 0}, "conv_width must be at least 1 with share_qk"),
    ],
)
def test_a_wrong_value_is_named(mixer, fields, message):
    with pytest.raises(ValueError, match=message):
        build_mixer(mixer, 32, 2, **fields)
