"""The mixers that the common suite runs over: every name of the registry, and their variants."""

from trellis.mixers import MIXERS

#: name of the case -> (mixer, fields)
CASES = {name: (name, {}) for name in MIXERS} | {
    "trellis paper": ("trellis", {"form": "paper"}),
    "trellis paper stale": ("trellis", {"form": "paper", "mode": "stale", "minibatch": 8}),
    "trellis decode": (
        "trellis",
        {
            "value_pass": "decode",
            "separate_gates": True,
            "conv_on": ["q", "k", "v"],
            "f": "silu",
            "normalize_alpha": True,
        },
    ),
    "trellis stale decode": (
        "trellis",
        {"mode": "stale", "minibatch": 5, "value_pass": "decode", "decay": "sigmoid"},
    ),
    "trellis error after the decay": (
        "trellis",
        {"form": "paper", "error_at": "after", "half_life": [2, 64], "f": "soft_ln_silu"},
    ),
    "trellis learned start": ("trellis", {"form": "paper", "phi": "ln_silu", "slots": 24}),
    "trellis lms": (
        "trellis",
        {"form": "paper", "lms_step": True, "step": "softplus", "conv_width": 0},
    ),
    "trellis with a skip": (
        "trellis",
        {
            "value_pass": "decode",
            "phi": "identity",
            "f": "silu",
            "skip": 1.0,
            "conv_bias": True,
            "conv_on": ["q", "k", "alpha"],
            "half_life": [8, 2048],
            "separate_gates": True,
            "tie_queries": True,
            "step_max": [1.0, 0.5],
            "slots": 24,
        },
    ),
    "trellis stale by position": (
        "trellis",
        {"mode": "stale", "minibatch": 7, "stale_step": "position", "skip": 0.5},
    ),
    "trellis heads of its own": ("trellis", {"heads": 3, "head_dim": 10}),
    "trellis without gate": ("trellis", {"forget_gate": False, "step": "constant", "heads": 4}),
    "linear attention without normaliser": (
        "linear_attention",
        {"feature_map": "identity", "output_norm": True, "heads": 4},
    ),
    "linear attention relu": (
        "linear_attention",
        {"feature_map": "relu", "conv_on": ["k"], "output_gate": False},
    ),
    "linear attention as in its paper": (
        "linear_attention",
        {"conv_width": 0, "output_norm": False, "output_gate": False},
    ),
    "mamba2 groups": (
        "mamba2",
        {"heads": 4, "groups": 2, "state_dim": 24, "conv_bias": False, "step_limit": [0.01, 0.1]},
    ),
    "delta net with gate": (
        "delta_net",
        {"use_gate": True, "conv_on": ["k"], "allow_neg_eigval": True},
    ),
    "delta net as in its paper": ("delta_net", {"shape": "square", "use_gate": False}),
    "delta net of the model's heads": ("delta_net", {"shape": "model"}),
    "gated delta net of the model's heads": ("gated_delta_net", {"shape": "model"}),
    "gated delta net wide": ("gated_delta_net", {"heads": 4, "expand_v": 1.5, "use_gate": False}),
    "gated delta net without convolution": ("gated_delta_net", {"conv_width": 0}),
    "abc over slots": ("abc", {"write": "slots", "slots": 24}),
    "abc without positions": ("abc", {"rope_theta": None, "heads": 4}),
    "abc of two heads": ("abc", {"heads": 2, "expand_k": 1.0}),
    "gsa of two heads": ("gsa", {"heads": 2, "slots": 24, "decay_temperature": 1.0}),
    "gsa without gate": ("gsa", {"output_gate": False}),
    "gated delta net, heads of its own": (
        "gated_delta_net",
        {"heads": 3, "head_dim": 8, "expand_v": 2.0, "allow_neg_eigval": True},
    ),
    "transformer window": ("transformer", {"window": 5}),
    "transformer window of one": ("transformer", {"window": 1}),
    "transformer of grouped queries": (
        "transformer",
        {"heads": 4, "kv_heads": 2, "head_dim": 6, "window": 5, "qk_norm": True},
    ),
    "transformer with biases": (
        "transformer",
        {"kv_heads": 1, "qkv_bias": True, "out_bias": True, "window": 4},
    ),
    "ttt transformer backbone": (
        "ttt",
        {"share_qk": False, "conv_width": 0, "output_gate": False, "minibatch": 5},
    ),
    "ttt without a convolution in front": ("ttt", {"pre_conv": False}),
    "ttt without rotary places": ("ttt", {"share_qk": False, "rope_theta": None, "heads": 4}),
}
