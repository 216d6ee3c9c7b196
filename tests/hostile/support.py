"""What the hostile tests share: values that nobody means, and ways to spoil files.

Every test draws its cases with hypothesis, and ten times as many under `make test-slow`.
"""

import contextlib
import io
import math
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tests.support import content

#: The exceptions that commands turn into one line and exit code 1.
DOCUMENTED = (ValueError, OSError)

often = pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])


def cases(count, times):
    """Settings of hypothesis for so many cases, the same ones in every run."""
    return settings(
        max_examples=count * times, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


numbers = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**25, 10**400, -(2**70)]),
    st.floats(),
    st.sampled_from([0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf]),
)
words = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", ".", "..", "../x", "/etc/hosts", "\0", "a" * 5000, "ä\ud800", "nan"]),
)  # fmt: skip
#: Any value that JSON can hold, with a preference for those that are odd.
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def spoiled_bytes(draw, data):
    """Bytes with one piece cut out, repeated, overwritten or put in."""
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 64)))
    new = draw(st.one_of(st.just(b""), st.binary(max_size=16), st.just(data[start:stop] * 2)))
    return data[:start] + new + data[stop:]


@st.composite
def spoiled_json(draw, value):
    """A copy of a JSON value with one part, at any depth, gone or replaced."""
    if not draw(st.integers(0, 4)) or not isinstance(value, (dict, list)) or not value:
        return draw(values)
    if isinstance(value, dict):
        key = draw(st.sampled_from(sorted(value)))
        if not draw(st.integers(0, 5)):
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: draw(spoiled_json(value[key]))}
    place = draw(st.integers(0, len(value) - 1))
    return [*value[:place], draw(spoiled_json(value[place])), *value[place + 1 :]]


@contextlib.contextmanager
def unchanged(folder):
    """Nothing in a folder may have changed after the block."""
    before = content(folder)
    yield
    assert content(folder) == before


def exit_code(*arguments):
    """Runs the command `trellis` in this process; returns its exit code and what it said."""
    from trellis.cli import main

    out, said = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["trellis", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            main()
    except SystemExit as exit:
        if isinstance(exit.code, str):
            return 1, exit.code
        return exit.code or 0, said.getvalue()
    finally:
        sys.argv = argv
    return 0, said.getvalue()
