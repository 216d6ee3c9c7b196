"""Cases of the common suite."""

from tests.ops.recurrences.cases import Case

from trellis.ops import LinearAttentionState, linear_attention


def plain(shape, **options):
    return build(shape, False, 1, **options)


def decayed(shape, **options):
    return build(shape, True, 1, **options)


def grouped(shape, **options):
    """Three heads share the queries and keys of a group, as in Mamba2."""
    return build(shape, True, 3, **options)


def grouped_plain(shape, **options):
    return build(shape, False, 3, **options)


def normalized(shape):
    return build(shape, False, 1, normalize=True)


def normalized_with_decay(shape):
    return build(shape, True, 2, normalize=True)


def build(shape, decay, share, **options):
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


CASES = {
    "linear attention": plain,
    "linear attention, decay": decayed,
    "linear attention, groups": grouped_plain,
    "linear attention, groups and decay": grouped,
    "linear attention, normalised": normalized,
    "linear attention, normalised with decay": normalized_with_decay,
}
