"""The delta rule: cases of the common suite."""

from tests.ops.recurrences.cases import Case, Shape

from trellis.ops import delta_rule


def plain(shape: Shape) -> Case:
    """Without decay."""
    draw = shape.draw()
    over_tokens = {
        "q": draw.unit(*shape.lead, shape.key),
        "k": draw.unit(*shape.lead, shape.key),
        "v": draw.normal(*shape.lead, shape.value),
        "beta": draw.uniform(*shape.lead),
    }
    states = {"memory": draw.normal(shape.sequences, shape.heads, shape.key, shape.value)}
    return Case(over_tokens, states, call)


def decaying(shape: Shape) -> Case:
    case = plain(shape)
    case.over_tokens["log_decay"] = -0.3 * shape.draw().uniform(*shape.lead)
    return case


def overshooting(shape: Shape) -> Case:
    """beta up to 2, and another scale."""
    case = decaying(shape)
    case.over_tokens["beta"] = 2 * case.over_tokens["beta"]

    def scaled(inputs, states, cu_seqlens, backend):
        return call(inputs, states, cu_seqlens, backend, scale=0.3)

    return Case(case.over_tokens, case.states, scaled)


def call(inputs, states, cu_seqlens, backend, **options):
    y, final = delta_rule(
        **inputs, initial_state=states["memory"], output_final_state=True,
        cu_seqlens=cu_seqlens, backend=backend, **options,
    )  # fmt: skip
    return y, {"memory": final}


CASES = {
    "delta rule": plain,
    "gated delta rule": decaying,
    "delta rule, overshooting": overshooting,
}
