import torch

from trellis import TrellisConfig, TrellisForCausalLM
from trellis.mixers import MIXERS

#: Stacks that the model tests run over.
STACKS = {name: {"mixer": name} for name in MIXERS} | {
    "trellis stale": {"mixer": "trellis", "mixer_config": {"mode": "stale", "minibatch": 8}},
    "all mixers": {"mixer": list(MIXERS), "num_hidden_layers": len(MIXERS)},
    "hybrid": {
        "mixer": ["trellis", "trellis", "transformer"],
        "mixer_config": {"transformer": {"window": 7}},
    },
}


def small_config(stack="trellis", **fields):
    defaults = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "initializer_range": 0.02,
    }
    return TrellisConfig(**{**defaults, **STACKS[stack], **fields})


def small_model(stack="trellis", **fields):
    torch.manual_seed(0)
    return TrellisForCausalLM(small_config(stack, **fields)).eval()


def tokens(*shape, seed=0):
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))
