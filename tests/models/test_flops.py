"""The formulas of operations, beside what torch.utils.flop_counter counts; see docs/flops.md.

The formulas count the recurrence as it is defined, whichever algorithm computes it. So the counter
watches the definition: the backend "reference", fed one token at a time. It sees matrix products
and, by rules added here, products and sums of whole memories, one operation per entry of each.
Models are on the meta device: nothing is computed.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.mixers.cases import CASES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trellis import TrellisConfig, TrellisForCausalLM
from trellis.mixers import MIXERS, build_mixer
from trellis.mixers.abc import ABCMixer
from trellis.mixers.base import named_tensors
from trellis.mixers.layers import ShortConvolution
from trellis.mixers.mamba2 import Mamba2Mixer
from trellis.models.presets import forward_flops, linear_entries, training_flops

TABLE = Path(__file__).parents[2] / "docs" / "flops.md"
DIM, HEADS, TOKENS = 64, 2, 7


class Counted(NamedTuple):
    """Operations per token: of matrix products (without linear maps), and on whole memories."""

    products: float
    pointwise: float


def definition(name, dim, heads, tokens, /, **fields):
    """A mixer, and what its definition computes per token, on average over `tokens`."""
    fields = fields if name == "transformer" else {**fields, "backend": "reference"}
    with torch.device("meta"), torch.no_grad():
        mixer = build_mixer(name, dim, heads, **fields).requires_grad_(False)
        state = mixer.init_state(1)
        token = torch.zeros(1, 1, dim)
        with FlopCounterMode(display=False, custom_mapping=on_memories(state)) as counter:
            for _ in range(tokens):
                _, state = mixer(token, state)
    found = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    pointwise = sum(found.pop(str(op), 0) for op in POINTWISE)
    return mixer, Counted(
        sum(found.values()) / tokens - 2 * linear_entries(mixer), pointwise / tokens
    )


#: Operations per entry of the result.
POINTWISE = {
    torch.ops.aten.mul: 1,
    torch.ops.aten.add: 1,
    torch.ops.aten.sub: 1,
    torch.ops.aten.addcmul: 2,
}


def on_memories(state):
    """Rules for the counter: pointwise operations whose result is as large as a memory."""
    sizes = [tensor.numel() for _, tensor in named_tensors(state) if tensor.dim() > 3]
    least = min(sizes, default=0) or torch.inf  # attention's cache is empty, and grows

    def rule(each):
        def count(*_, out_shape=None, **__):
            size = torch.Size(out_shape).numel()
            return each * size if size >= least else 0

        return count

    return {op: rule(each) for op, each in POINTWISE.items()}


def elsewhere(mixer):
    """What the formula and the counted definition do not share, per token: formula minus counter.

    Convolutions are counted as conv1d; the definition makes them of shifted products.
    """
    found = {}
    convolutions = [m for m in mixer.modules() if isinstance(m, ShortConvolution)]
    if convolutions:
        found["convolutions"] = sum(map(convolution, convolutions))
    if isinstance(mixer, Mamba2Mixer):  # a product and a sum per channel, not per memory
        found["D x"] = 2 * mixer.inner_dim
    if isinstance(mixer, ABCMixer) and mixer.config.write == "time":
        # The sums of exponentials, one per slot, are products with a triangle of ones.
        found["running sums"] = -2 * mixer.heads * mixer.config.slots
    return found


def convolution(layer):
    channels, width = layer.weight.shape
    x = torch.zeros(1, channels, width, device="meta")  # one token and all that it sees
    weight = torch.zeros(channels, 1, width, device="meta")
    return products(lambda: F.conv1d(x, weight, groups=channels))


def products(call):
    """Operations of all matrix products during a call, those of attention among them."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", CASES)
def test_the_formula_is_the_definition(case):
    """Exactly: every product and sum over a memory, and nothing else."""
    name, fields = CASES[case]
    mixer, counted = definition(name, DIM, HEADS, TOKENS, **fields)
    apart = sum(elsewhere(mixer).values())
    assert sum(counted) + apart == pytest.approx(mixer.flops(TOKENS), rel=1e-12)


@pytest.mark.parametrize("name", MIXERS)
def test_the_table_in_the_document_is_what_is_counted(name):
    mixer, counted = definition(name, 768, 12, 64)
    apart = elsewhere(mixer)
    formula = mixer.flops(64)
    said = ", ".join(f"{what} {count:+,.0f}" for what, count in apart.items())
    ratio = formula / (sum(counted) + sum(apart.values()))
    row = (
        f"| {name} | {formula:,.0f} | {counted.products:,.0f} | {counted.pointwise:,.0f} | "
        f"{said} | {ratio:.4f} |"
    )
    print(row)
    assert row in TABLE.read_text().splitlines()


def test_matrix_products_are_most_of_a_memory():
    """What the counter sees without added rules: two products of two operations per entry."""
    mixer, counted = definition("trellis", DIM, HEADS, TOKENS)
    memories = mixer.heads * mixer.slots * (mixer.key_dim + mixer.value_dim)
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
