"""What must work after an install with the `models` extra."""

import tempfile

import torch
from transformers import AutoModelForCausalLM

import trellis
from trellis.evaluation.mqar.data import preset as mqar_preset

config = trellis.TrellisConfig(
    vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=2
)
with tempfile.TemporaryDirectory() as folder:
    trellis.TrellisForCausalLM(config).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
assert mqar_preset("small").vocab_size == 192  # a TOML file that the wheel brings
out = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False)
assert out.shape == (1, 8)
print(f"trellis {trellis.__version__}: the language model loads and generates")
