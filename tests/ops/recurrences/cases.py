"""The problems that the common suite of recurrences runs on: functions of a Shape, by name."""

import math

from tests.support import Case, Shape

from trellis.ops import (
    LinearAttentionState,
    MemoryState,
    TTTState,
    delta_rule,
    gated_slots,
    linear_attention,
    trellis_memory,
    ttt_linear,
)

# Linear attention.


def linear(shape, **options):
    return _linear(shape, False, 1, **options)


def linear_decaying(shape, **options):
    return _linear(shape, True, 1, **options)


def linear_groups_decaying(shape, **options):
    """Three heads share the queries and keys of a group, as in Mamba2."""
    return _linear(shape, True, 3, **options)


def linear_groups(shape, **options):
    return _linear(shape, False, 3, **options)


def linear_normalized(shape):
    return _linear(shape, False, 1, normalize=True)


def linear_normalized_decaying(shape):
    return _linear(shape, True, 2, normalize=True)


def _linear(shape, decay, share, **options):
    draw = shape.draw()
    batch, tokens, groups = shape.lead
    heads = groups * share
    normalize = options.get("normalize", False)

    def keys(*lead):
        # A normaliser divides by sums of their products, which are to stay away from zero.
        return draw.uniform(*lead, shape.key) if normalize else draw.normal(*lead, shape.key)

    over_tokens = {
        "q": keys(batch, tokens, groups),
        "k": keys(batch, tokens, groups),
        "v": draw.normal(batch, tokens, heads, shape.value),
    }
    if decay:
        over_tokens["log_decay"] = -0.3 * draw.uniform(batch, tokens, heads)
    states = {"memory": draw.normal(shape.sequences, heads, shape.key, shape.value)}
    if normalize:
        states["normalizer"] = draw.uniform(shape.sequences, heads, shape.key)

    def call(inputs, states, cu_seqlens, backend):
        y, final = linear_attention(
            **inputs,
            scale=0.7,
            initial_state=LinearAttentionState(**states),
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=backend,
            **options,
        )
        return y, {name: part for name, part in final._asdict().items() if part is not None}

    return Case(over_tokens, states, call)


# The delta rule.


def delta(shape: Shape) -> Case:
    """Without decay."""
    draw = shape.draw()
    over_tokens = {
        "q": draw.unit(*shape.lead, shape.key),
        "k": draw.unit(*shape.lead, shape.key),
        "v": draw.normal(*shape.lead, shape.value),
        "beta": draw.uniform(*shape.lead),
    }
    states = {"memory": draw.normal(shape.sequences, shape.heads, shape.key, shape.value)}
    return Case(over_tokens, states, _call_delta)


def delta_decaying(shape: Shape) -> Case:
    case = delta(shape)
    case.over_tokens["log_decay"] = -0.3 * shape.draw().uniform(*shape.lead)
    return case


def delta_overshooting(shape: Shape) -> Case:
    """beta up to 2, and another scale."""
    case = delta_decaying(shape)
    case.over_tokens["beta"] = 2 * case.over_tokens["beta"]

    def scaled(inputs, states, cu_seqlens, backend):
        return _call_delta(inputs, states, cu_seqlens, backend, scale=0.3)

    return Case(case.over_tokens, case.states, scaled)


def _call_delta(inputs, states, cu_seqlens, backend, **options):
    y, final = delta_rule(
        **inputs, initial_state=states["memory"], output_final_state=True,
        cu_seqlens=cu_seqlens, backend=backend, **options,
    )  # fmt: skip
    return y, {"memory": final}


# Gated slots: gates as GSA's, no decay, and decays of every strength.


def _slots(shape, log_decay):
    """log_decay: a function of a Draw and a size, or None."""
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


def _weak(draw, *size):
    return draw.uniform(*size).log() / 8


def _any_strength(draw, *size):
    """From none to 1e4, and a tenth of -inf."""
    strength = 10 ** (8 * draw.uniform(*size) - 4)
    return -strength.masked_fill(draw.uniform(*size) < 0.1, math.inf)


# TTT.

TTT_MODEL = ("weight", "bias", "weight_steps", "bias_steps")
#: The suite takes them for initial states, so that their gradients are compared too.
TTT_CONSTANTS = ("theta", "norm_weight", "norm_bias")


def _ttt(shape, minibatch, offset):
    draw, n, heads, size = shape.draw(), shape.sequences, shape.heads, shape.key
    lead = shape.lead
    states = {
        "weight": 0.3 * draw.normal(n, heads, size, size),
        "bias": 0.3 * draw.normal(n, heads, size),
        "weight_steps": 0.1 * draw.normal(n, heads, size, size),
        "bias_steps": 0.1 * draw.normal(n, heads, size),
        "theta": draw.uniform(heads, minibatch),
        "norm_weight": 1 + 0.3 * draw.normal(heads, size),
        "norm_bias": 0.3 * draw.normal(heads, size),
        "offset": (offset * draw.uniform(n)).floor(),
    }
    over_tokens = {
        "q": draw.normal(*lead, size),
        "k": draw.normal(*lead, size),
        "v": draw.normal(*lead, size),
        "eta": draw.uniform(*lead) / size / minibatch,
    }

    def call(inputs, states, cu_seqlens, backend):
        state = TTTState(*(states[name] for name in TTT_MODEL), states["offset"].long())
        y, final = ttt_linear(
            **inputs, **{name: states[name] for name in TTT_CONSTANTS},
            initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, backend=backend,
        )  # fmt: skip
        finals = {name: getattr(final, name) for name in TTT_MODEL}
        return y, finals | {"offset": final.offset.to(final.weight.dtype)}

    return Case(over_tokens, states, call)


# The compression memory.


def _memory(shape, mode, value_pass, phi, minibatch=1, offset=0, error_at="before"):
    """offset: the largest number of tokens by which a sequence is ahead in its mini-batch."""
    draw, n = shape.draw(), shape.sequences
    lead, slots = shape.lead, shape.slots
    values = (slots, shape.value) if value_pass == "encode" else (shape.value, slots)
    states = {
        "keys": draw.normal(n, shape.heads, slots, shape.key),
        "values": draw.normal(n, shape.heads, *values),
    }
    if mode == "stale":
        states |= {
            "key_anchor": draw.normal(*states["keys"].shape),
            "value_anchor": draw.normal(*states["values"].shape),
            "offset": ((offset + 1) * draw.uniform(n)).floor(),
        }
    over_tokens = {
        "q": draw.unit(*lead, shape.key),
        "k": draw.unit(*lead, shape.key),
        "v": draw.unit(*lead, shape.value),
        "alpha": draw.normal(*lead, slots),
        "log_beta": -0.3 * draw.uniform(*lead),
        "gamma": draw.uniform(*lead) / minibatch,
    }

    def call(inputs, states, cu_seqlens, backend):
        start = MemoryState(**states)
        if start.offset is not None:
            start = start._replace(offset=start.offset.long())
        y, final = trellis_memory(
            **inputs, mode=mode, value_pass=value_pass, phi=phi, f="silu", minibatch=minibatch,
            error_at=error_at, initial_state=start, output_final_state=True,
            cu_seqlens=cu_seqlens, backend=backend,
        )  # fmt: skip
        finals = {name: part for name, part in final._asdict().items() if part is not None}
        if "offset" in finals:
            finals["offset"] = finals["offset"].to(final.keys.dtype)
        return y, finals

    return Case(over_tokens, states, call)


#: A new recurrence adds its problems here.
CASES = {
    "linear attention": linear,
    "linear attention, decay": linear_decaying,
    "linear attention, groups": linear_groups,
    "linear attention, groups and decay": linear_groups_decaying,
    "linear attention, normalised": linear_normalized,
    "linear attention, normalised with decay": linear_normalized_decaying,
    "delta rule": delta,
    "gated delta rule": delta_decaying,
    "delta rule, overshooting": delta_overshooting,
    "gated slots": lambda shape: _slots(shape, _weak),
    "gated slots without decay": lambda shape: _slots(shape, None),
    "gated slots of any decay": lambda shape: _slots(shape, _any_strength),
    "ttt": lambda shape: _ttt(shape, 16, 0),
    "ttt, starting inside mini-batches": lambda shape: _ttt(shape, 5, 5),
    "memory": lambda shape: _memory(shape, "exact", "encode", "silu"),
    "memory, decode": lambda shape: _memory(shape, "exact", "decode", "tanh"),
    "memory, linear": lambda shape: _memory(shape, "exact", "encode", "identity"),
    "memory, stale": lambda shape: _memory(shape, "stale", "encode", "silu", 16),
    "memory, starting inside mini-batches": lambda shape: _memory(
        shape, "stale", "decode", "gelu", 5, 4
    ),
    "memory, error after the decay": lambda shape: _memory(
        shape, "exact", "encode", "tanh", error_at="after"
    ),
    "memory, linear, error after the decay": lambda shape: _memory(
        shape, "exact", "decode", "identity", error_at="after"
    ),
    "memory, stale, error after the decay": lambda shape: _memory(
        shape, "stale", "encode", "silu", 5, 4, error_at="after"
    ),
}
