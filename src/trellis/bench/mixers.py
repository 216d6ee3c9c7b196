"""Every mixer as a whole layer, forward and backward, beside the same layers of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..mixers import MIXERS, DeltaNetMixer, build_mixer
from . import measure

WIDTH, HEADS, BATCH = 768, 12, 2

#: With more tokens than this only the bounded mixers are timed: attention takes too long.
LONGEST = 16384
BOUNDED = [name for name in MIXERS if name != "transformer"]

#: What is timed: a function of the input [B, T, WIDTH], and the module that has the weights.
Layer = tuple[Callable[[Tensor], Tensor], nn.Module]


def ours(name: str) -> Layer:
    mixer = build_mixer(name, WIDTH, HEADS)
    return lambda x: mixer(x)[0], mixer


def llama_attention() -> Layer:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        max_position_embeddings=2**20,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    layer, rotary = LlamaAttention(config, layer_idx=0), LlamaRotaryEmbedding(config)

    def call(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        return layer(x, position_embeddings=rotary(x, places))[0]

    return call, layer


def mamba2_layer() -> Layer:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=WIDTH, expand=2, head_dim=64, num_heads=2 * WIDTH // 64, state_size=128,
        n_groups=1, num_hidden_layers=1,
    )  # fmt: skip
    layer = Mamba2Mixer(config, layer_idx=0)
    return layer, layer


def gated_delta_net_layer() -> Layer:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    with torch.device("meta"):
        same = build_mixer("gated_delta_net", WIDTH, HEADS)
    assert isinstance(same, DeltaNetMixer)
    config = Qwen3NextConfig(
        hidden_size=WIDTH, linear_num_key_heads=same.heads, linear_num_value_heads=same.heads,
        linear_key_head_dim=same.key_dim, linear_value_head_dim=same.value_dim,
        num_hidden_layers=1,
    )  # fmt: skip
    layer = Qwen3NextGatedDeltaNet(config, layer_idx=0)
    return layer, layer


#: For a mixer, the layer of transformers that computes the same.
PEERS: dict[str, Callable[[], Layer]] = {
    "transformer": llama_attention,
    "mamba2": mamba2_layer,
    "gated_delta_net": gated_delta_net_layer,
}


def run(lengths: list[int], rounds: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Times every mixer, and the layer of transformers that computes the same if there is one."""
    report(f"\nWhole mixers, width {WIDTH}, B={BATCH}, forward+backward\n")
    layers = {name: ours(name) for name in MIXERS}
    if importlib.util.find_spec("fla"):
        report("with flash-linear-attention installed, transformers takes its GPU kernels\n")
    else:
        layers |= {_peer(name): make() for name, make in PEERS.items()}
    report("| T | mixer | median (range) | the same in transformers | this / transformers |")
    report("|---|---|---|---|---|")
    rows = []
    for tokens in lengths:
        x = torch.randn(BATCH, tokens, WIDTH)
        calls = {
            name: partial(measure.both_ways, (partial(function, x), list(module.parameters())))
            for name, (function, module) in layers.items()
            if tokens <= LONGEST or name in BOUNDED
        }
        timings = measure.alternate(calls, rounds)
        for name in (n for n in MIXERS if n in timings):
            peer = timings.get(_peer(name))
            ratio = f"{timings[name].median / peer.median:.2f}" if peer else ""
            report(f"| {tokens} | {name} | {timings[name]} | {peer or ''} | {ratio} |")
        rows += [{"T": tokens, "mixer": n, "seconds": t.times} for n, t in timings.items()]
    return rows


def _peer(name: str) -> str:
    return f"{name} (transformers)"
