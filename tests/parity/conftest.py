"""Comparisons with independent implementations. `make test-parity` lets none of them skip.

Where the variable TRELLIS_RECORD names a JSON file, the rows of this run are added to it.
"""

import importlib
import json
import math
import os
from pathlib import Path

import pytest
from tests.support import relative_rms

#: (what, peer, largest error) of every comparison of this run.
FOUND = []


@pytest.fixture
def agrees():
    """agrees(what, peer, {name: (ours, theirs)}): all within the limit; the largest is noted."""

    def check(what, peer, pairs, limit=2e-5):
        errors = {name: relative_rms(ours, theirs) for name, (ours, theirs) in pairs.items()}
        # NaN, which is neither above nor below anything, is the worst.
        worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
        FOUND.append((what, peer, ", ".join(errors), f"{errors[worst]:.1e}", worst))
        for name, error in errors.items():
            assert error <= limit, f"{what} against {peer}: {name} is off by {error}"

    return check


@pytest.fixture
def fla():
    """A function that imports a module of flash-linear-attention, or skips where it is absent."""

    def load(module):
        if importlib.util.find_spec("fla") is None:
            pytest.skip("flash-linear-attention is not installed here; see `make test-parity`")
        return importlib.import_module(f"fla.{module}")

    return load


@pytest.fixture
def transformers_alone():
    """transformers takes fla's GPU kernels where it finds them; its PyTorch code runs without."""
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("flash-linear-attention is installed; this runs in the main environment")


def pytest_terminal_summary(terminalreporter):
    if not FOUND:
        return
    terminalreporter.write_line("\n| what | peer | compared | largest relative RMS error | in |")
    terminalreporter.write_line("|---|---|---|---|---|")
    for row in FOUND:
        terminalreporter.write_line("| " + " | ".join(row) + " |")
    record = os.environ.get("TRELLIS_RECORD")
    if record:
        path = Path(record)
        before = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*before, *(list(row) for row in FOUND)], indent=1) + "\n")
