import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment():
    out = subprocess.run(["make", "wheel"], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    assert "work without transformers" in out.stdout
    assert "loads and generates" in out.stdout
