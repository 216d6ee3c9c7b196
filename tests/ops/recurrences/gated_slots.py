"""Cases of the common suite: gates as GSA's, no decay, and decays of every strength."""

import math

from tests.ops.recurrences.cases import Case

from trellis.ops import gated_slots


def build(shape, log_decay):
    """log_decay(draw, *size), or None."""
    draw = shape.draw()
    slots = (*shape.lead, shape.slots)
    over_tokens = {
        "q": draw.normal(*shape.lead, shape.key),
        "k": draw.normal(*shape.lead, shape.key),
        "v": draw.normal(*shape.lead, shape.value),
        "write": draw.uniform(*slots),
    }
    if log_decay is not None:
        over_tokens["log_decay"] = log_decay(draw, *slots)
    memories = (shape.sequences, shape.heads, shape.slots)
    states = {
        "keys": draw.normal(*memories, shape.key),
        "values": draw.normal(*memories, shape.value),
    }

    def call(inputs, states, cu_seqlens, backend):
        y, final = gated_slots(
            **inputs, initial_state=(states["keys"], states["values"]), output_final_state=True,
            cu_seqlens=cu_seqlens, backend=backend,
        )  # fmt: skip
        return y, final._asdict()

    return Case(over_tokens, states, call)


def weak(draw, *size):
    return draw.uniform(*size).log() / 8


def any_strength(draw, *size):
    """From none to 1e4, and a tenth of -inf."""
    strength = 10 ** (8 * draw.uniform(*size) - 4)
    return -strength.masked_fill(draw.uniform(*size) < 0.1, math.inf)


CASES = {
    "gated slots": lambda shape: build(shape, weak),
    "gated slots without decay": lambda shape: build(shape, None),
    "gated slots of any decay": lambda shape: build(shape, any_strength),
}
