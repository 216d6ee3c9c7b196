"""Who may import whom, and what works without transformers."""

import ast
import subprocess
import sys
from pathlib import Path

import trellis

SOURCE = Path(trellis.__file__).parent
#: From the bottom up: a layer imports only layers before it.
LAYERS = [
    "ops", "mixers", "models", "data", "training", "forecasting", "evaluation", "serving", "bench",
    "cli",
]  # fmt: skip


def imported_layers(path):
    """The layers of this package that a source file imports."""
    package = path.relative_to(SOURCE.parent).with_suffix("").parts
    if path.name == "__init__.py":
        package = package[:-1]
        here = package
    else:
        here = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        for parts in names:
            if parts[0] == "trellis" and len(parts) > 1 and parts[1] in LAYERS:
                yield parts[1]


def test_imports_point_downwards_only():
    seen = set()
    for path in SOURCE.rglob("*.py"):
        layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if layer not in LAYERS:
            continue
        for other in imported_layers(path):
            seen.add((layer, other))
            assert LAYERS.index(other) <= LAYERS.index(layer), f"{path} imports {other}"
    assert {("mixers", "ops"), ("models", "mixers")} <= seen


WITHOUT = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
import torch
import trellis, trellis.ops, trellis.mixers
mixer = trellis.mixers.build_mixer("trellis", 16, 2)
y, state = mixer(torch.randn(1, 5, 16))
y.sum().backward()
try:
    trellis.TrellisConfig
except ImportError as error:
    assert "trellis-memory[models]" in str(error), error
else:
    raise AssertionError("TrellisConfig without transformers")
print("works")
"""

LAZY = """
import sys
import trellis, trellis.ops, trellis.mixers
assert "transformers" not in sys.modules
assert "torch._dynamo" not in sys.modules
from transformers import AutoConfig
trellis.TrellisConfig
assert AutoConfig.for_model("trellis").model_type == "trellis"
print("works")
"""

AFTER = """
from transformers import AutoConfig, AutoModelForCausalLM
import trellis.models
config = AutoConfig.for_model("trellis", hidden_size=32, num_hidden_layers=1, num_attention_heads=1)
assert type(AutoModelForCausalLM.from_config(config)).__name__ == "TrellisForCausalLM"
print("works")
"""


def run(code):
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "works", out.stderr


def test_ops_and_mixers_work_without_transformers():
    run(WITHOUT)


def test_importing_ops_and_mixers_does_not_import_transformers():
    run(LAZY)


def test_transformers_may_be_imported_first():
    run(AFTER)
