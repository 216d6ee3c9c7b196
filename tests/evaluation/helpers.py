"""Small models to measure."""

import json
from types import SimpleNamespace

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
        vocab_size=tokenizer.vocab_size, mixer=mixer, initializer_range=0.04, **SIZES, **fields
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


class RuleModel(torch.nn.Module):
    """A constructed model: `rule` gives the next token from the list of all tokens so far.

    It is asked as a model of transformers is, without a cache. It puts `odds` nats between the
    token of the rule and every other.
    """

    def __init__(self, rule, vocab_size, odds=50.0):
        super().__init__()
        self.rule, self.vocab_size, self.odds = rule, vocab_size, odds
        self.config, self.device = SimpleNamespace(), torch.device("cpu")

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, **_):
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        for row, ids in enumerate(input_ids.tolist()):
            length = len(ids) if attention_mask is None else int(attention_mask[row].sum())
            for place in range(length - logits_to_keep if logits_to_keep else 0, length):
                logits[row, place, self.rule(ids[: place + 1])] = self.odds
        return SimpleNamespace(logits=logits)


def ruled(rule, name="ruled"):
    """A subject that follows `rule(ids) -> id`, with the tokenizer of bytes."""
    tokenizer = load_tokenizer("bytes")
    return Subject(name, RuleModel(rule, tokenizer.vocab_size), tokenizer, {})
