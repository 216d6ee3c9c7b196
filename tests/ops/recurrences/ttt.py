"""Cases of the common suite."""

from tests.ops.recurrences.cases import Case

from trellis.ops.ttt import TTTState, ttt_linear

MODEL = ("weight", "bias", "weight_steps", "bias_steps")
#: The suite takes them for initial states, so that their gradients are compared too.
CONSTANTS = ("theta", "norm_weight", "norm_bias")


def _case(shape, minibatch, offset):
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
        state = TTTState(*(states[name] for name in MODEL), states["offset"].long())
        y, final = ttt_linear(
            **inputs, **{name: states[name] for name in CONSTANTS},
            initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, backend=backend,
        )  # fmt: skip
        finals = {name: getattr(final, name) for name in MODEL}
        return y, finals | {"offset": final.offset.to(final.weight.dtype)}

    return Case(over_tokens, states, call)


CASES = {
    "ttt": lambda shape: _case(shape, 16, 0),
    "ttt, starting inside mini-batches": lambda shape: _case(shape, 5, 5),
}
