"""The whole model with fused pointwise kernels, beside the same model in fp64."""

import copy
import math

import pytest
import torch
from tests.support import relative_rms, small_model, tokens

from trellis.ops.native import pointwise

every_model = pytest.mark.parametrize("name", ["trellis", "transformer", "hybrid"])


@pytest.fixture
def smallest(monkeypatch):
    """Sets from how many numbers on the kernels run: 0 always, infinity never."""
    return lambda numbers: monkeypatch.setattr(pointwise, "SMALLEST", numbers)


def training_step(model, **inputs):
    """The loss, the logits and every gradient."""
    model.zero_grad()
    ids = tokens(2, 30)
    output = model(ids, labels=ids, logits_to_keep=3, **inputs)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), **gradients}


def padded():
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :11] = 0
    return mask


@every_model
@pytest.mark.parametrize("mask", [None, padded()], ids=["plain", "padded"])
def test_a_training_step_equals_that_in_fp64(name, mask, smallest):
    """The bound is for what three layers make of fp32: gradients of the memory's gates are sums
    that cancel, and come out no better than 3e-5 without the kernels. The ops' own tests are
    stricter.
    """
    model = small_model(name, loss_tokens=16).train()
    expected = training_step(copy.deepcopy(model).double(), attention_mask=mask)
    for numbers in (0, math.inf):
        smallest(numbers)
        for key, value in training_step(model, attention_mask=mask).items():
            assert relative_rms(value, expected[key]) < 1e-4, key


@every_model
def test_training_is_the_same_from_run_to_run(name, smallest):
    smallest(0)
    model = small_model(name, loss_tokens=16).train()
    first, second = training_step(model), training_step(model)
    for key, value in first.items():
        assert torch.equal(second[key], value), key


@every_model
def test_decoding_continues_a_fused_prompt(name, smallest):
    model = small_model(name).eval()
    ids = tokens(2, 30)
    smallest(math.inf)
    with torch.no_grad():
        expected = model(ids).logits
        smallest(0)
        read = model(ids[:, :20], use_cache=True)
        smallest(math.inf)
        rest = model(ids[:, 20:], past_key_values=read.past_key_values, use_cache=True)
    assert relative_rms(torch.cat([read.logits, rest.logits], dim=1), expected) < 2e-5


def test_compiled(smallest):
    smallest(0)
    model = small_model(loss_tokens=16).train()
    expected = training_step(model)
    actual = training_step(torch.compile(model, backend="aot_eager"))
    for (key, value), other in zip(expected.items(), actual.values()):
        assert relative_rms(other, value) < 2e-5, key
