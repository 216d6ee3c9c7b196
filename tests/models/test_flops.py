"""The formulas beside torch.utils.flop_counter. docs/flops.md says what they count."""

import pytest
import torch
from tests.mixers.cases import CASES

from trellis import TrellisConfig, TrellisForCausalLM
from trellis.bench.flops import definition, elsewhere, products
from trellis.mixers import build_mixer
from trellis.models.flops import forward_flops, linear_entries, training_flops

DIM, HEADS, TOKENS = 64, 2, 7


@pytest.mark.parametrize("case", CASES)
def test_the_formula_is_the_definition(case):
    """Exactly: every product and sum over a memory, and nothing else."""
    name, fields = CASES[case]
    mixer, counted = definition(name, DIM, HEADS, TOKENS, **fields)
    apart = sum(elsewhere(mixer).values())
    assert counted.total + apart == pytest.approx(mixer.flops(TOKENS), rel=1e-12)


def test_matrix_products_are_most_of_a_memory():
    """What the counter sees without added rules: two products of two operations per entry."""
    mixer, counted = definition("trellis", DIM, HEADS, TOKENS)
    memories = 2 * mixer.heads * mixer.slots * mixer.head_dim
    assert counted.products == 4 * memories
    assert counted.pointwise == 3 * memories


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_attention_sees_half_of_the_square(tokens):
    """In one call the counter takes all pairs; the formula those that are seen."""
    mixer = build_mixer("transformer", DIM, HEADS)
    counted = products(lambda: mixer(torch.zeros(1, tokens, DIM))) / tokens - 2 * linear_entries(
        mixer
    )
    assert counted == 4 * DIM * tokens
    assert mixer.flops(tokens) == counted * (tokens + 1) / (2 * tokens)


def whole_model(mixer="transformer", tokens=24, batch=2, **fields):
    config = TrellisConfig(
        vocab_size=100, hidden_size=DIM, num_hidden_layers=3, num_attention_heads=HEADS,
        intermediate_size=64, mixer=mixer, mixer_config=fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = TrellisForCausalLM(config)
    ids = torch.randint(100, (batch, tokens))
    return model, ids


def test_a_training_step_is_three_forwards():
    model, ids = whole_model()
    batch, tokens = ids.shape
    with torch.no_grad():
        forward = products(lambda: model(ids, logits_to_keep=0, use_cache=False))
    training = products(
        lambda: model(ids, targets=ids, logits_to_keep=1, use_cache=False).loss.backward()
    )
    unseen = 3 * 4 * DIM * (tokens - 1) / 2  # the other half of the square, in three layers
    assert forward == pytest.approx(batch * tokens * (forward_flops(model, tokens) + unseen))
    assert training_flops(model, tokens) == 3 * forward_flops(model, tokens)
    # `logits_to_keep` made one token's logits beside those of the loss.
    shown = batch * 2 * DIM * 100
    assert training - shown == pytest.approx(3 * forward)


def test_linear_maps_are_counted_once_each():
    """The head of tied embeddings is a map too; an embedding is a look-up."""
    model, _ = whole_model("linear_attention", conv_width=0, output_gate=False)
    block = 4 * DIM * DIM + 3 * DIM * 64
    assert linear_entries(model) == 3 * block + 100 * DIM
    mixing = 3 * 4 * HEADS * 32 * 33
    assert forward_flops(model, 1000) == 2 * linear_entries(model) + mixing
