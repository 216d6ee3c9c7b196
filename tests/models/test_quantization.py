"""An exported model with weights of 8 bits, as torch and torchao make them."""

import pytest
import torch
from tests.support import relative_rms, small_model, tokens
from transformers import AutoModelForCausalLM

from trellis import TrellisCache


def dynamic(model):
    """torch's own: products of int8, with inputs rounded as they come."""
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def weight_only(model):
    """torchao's: weights of int8, products of floats."""
    torchao = pytest.importorskip(
        "torchao.quantization", reason="torchao is not installed (pip install torchao)"
    )
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("quantize", [dynamic, weight_only])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_int8_works_for_every_mixer(tmp_path, quantize):
    small_model("all mixers").save_pretrained(tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = tokens(2, 40)
    expected = whole(ids).logits
    model = quantize(AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval())
    # Nine layers with random weights, each of which rounds: not more than a few per cent each.
    assert 0 < relative_rms(model(ids).logits, expected) < 0.25
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (2, 44)
    # A state belongs to these rounded weights, and to no others.
    model.read(ids).save(tmp_path / "state")
    assert TrellisCache.load(tmp_path / "state", model).seen == [40, 40]
    with pytest.raises(ValueError, match="another configuration or other weights"):
        TrellisCache.load(tmp_path / "state", whole)
