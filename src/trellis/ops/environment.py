"""What the environment says of the backend."""

from __future__ import annotations

import os
from collections.abc import Callable

VARIABLE = "TRELLIS_BACKEND"


def constant_when_compiled(function: Callable[[], str]) -> Callable[[], str]:
    """What torch.compiler.assume_constant_result does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def asked_backend() -> str:
    return os.environ.get(VARIABLE, "auto")
