"""Small models to measure."""

import json

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from trellis import TrellisConfig, TrellisForCausalLM
from trellis.data.tokenizer import load_tokenizer
from trellis.evaluation.subject import Subject

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def ours(mixer="trellis", name=None, **fields):
    """A model of ours with random weights, wide enough that a wrong state shows."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    config = TrellisConfig(
        vocab_size=tokenizer.vocab_size, mixer=mixer, initializer_range=0.2, **SIZES, **fields
    )
    return Subject(name or f"small {mixer}", TrellisForCausalLM(config), tokenizer, {})


def save_gpt2(folder, positions=256):
    """A model of transformers with random weights and the tokenizer of bytes, as a folder."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    config = GPT2Config(
        vocab_size=tokenizer.vocab_size, n_positions=positions, n_embd=32, n_layer=2, n_head=2,
        initializer_range=0.2,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    source = json.dumps(tokenizer.json)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.inner).from_str(source),
        eos_token=tokenizer.inner.id_to_token(tokenizer.end_of_document),
    )
    fast.save_pretrained(folder)
    return folder
