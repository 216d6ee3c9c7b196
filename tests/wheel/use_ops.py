"""What must work after a plain install, without transformers."""

import importlib.util

import torch

import trellis
from trellis.mixers import build_mixer
from trellis.ops import trellis_memory

assert importlib.util.find_spec("transformers") is None
q, k, v, alpha = torch.randn(4, 1, 9, 2, 8)
y, _ = trellis_memory(q, k, v, alpha, torch.zeros(1, 9, 2), torch.full((1, 9, 2), 0.1))
assert y.shape == (1, 9, 2, 8)
y, _ = build_mixer("trellis", 16, 2)(torch.randn(1, 9, 16))
y.sum().backward()
print(f"trellis {trellis.__version__}: ops and mixers work without transformers")
