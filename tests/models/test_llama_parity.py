"""The transformer stack against transformers' Llama, an independent implementation."""

import pytest
import torch
from tests.support import relative_rms, small_model, tokens
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.parametrize(("theta", "tied"), [(10000.0, True), (500000.0, False)])
@torch.no_grad()
def test_logits_and_greedy_tokens(theta, tied):
    ours = small_model("transformer", mixer_config={"rope_theta": theta}, tie_word_embeddings=tied)
    config = ours.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            tie_word_embeddings=tied,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    names = {
        "mixer_norm.": "input_layernorm.",
        "mlp_norm.": "post_attention_layernorm.",
        "mixer.": "self_attn.",
    }
    weights = {}
    for name, weight in ours.state_dict().items():
        for here, there in names.items():
            name = name.replace(here, there)
        weights[name] = weight
    missing, unexpected = llama.load_state_dict(weights, strict=False)
    assert not missing
    assert not unexpected

    ids = tokens(2, 200)
    assert relative_rms(ours(ids).logits, llama(ids).logits) < 1e-5
    options = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(ours.generate(ids, **options), llama.generate(ids, **options))
