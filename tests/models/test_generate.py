"""generate() and the Auto classes."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import STACKS, small_model, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from trellis import TrellisConfig, TrellisForCausalLM, TrellisModel
from trellis.mixers import computed_fields

every_stack = pytest.mark.parametrize("stack", STACKS)


def greedy_without_cache(model, ids, count):
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids


@every_stack
def test_greedy(stack):
    model = small_model(stack)
    ids = tokens(2, 12)
    expected = greedy_without_cache(model, ids, 15)
    assert torch.equal(model.generate(ids, max_new_tokens=15, do_sample=False), expected)
    plain = model.generate(ids, max_new_tokens=15, do_sample=False, use_cache=False)
    assert torch.equal(plain, expected)


@every_stack
def test_left_padded_prompts(stack):
    model = small_model(stack)
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0
    )
    assert torch.equal(out[0, 7:], greedy_without_cache(model, ids[:1, 7:], 9)[0])
    assert torch.equal(out[1], greedy_without_cache(model, ids[1:], 9)[0])


@every_stack
def test_beam_search_reorders_the_state(stack):
    model = small_model(stack)
    ids = tokens(2, 6)
    options = {"max_new_tokens": 8, "num_beams": 4, "do_sample": False}
    cached = model.generate(ids, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))


def test_sampling_is_seeded_and_the_same_without_cache():
    model = small_model()
    ids = tokens(1, 6)
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 20, "num_return_sequences": 3}
    runs = []
    for use_cache in (True, True, False):
        torch.manual_seed(5)
        runs.append(model.generate(ids, use_cache=use_cache, **options))
    assert runs[0].shape == (3, 18)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@every_stack
def test_generation_goes_on_from_a_cache(stack):
    model = small_model(stack)
    ids = tokens(1, 20)
    expected = greedy_without_cache(model, ids, 6)[:, 20:]
    cache = model.read(ids[:, :15])
    whole = model.generate(ids, past_key_values=cache.clone(), max_new_tokens=6, do_sample=False)
    assert torch.equal(whole[:, 20:], expected)
    new = ids[:, 15:]
    out = model.generate(
        new, past_key_values=cache, attention_mask=torch.ones_like(ids),
        max_new_tokens=6, do_sample=False,
    )  # fmt: skip
    assert torch.equal(out[:, 5:], expected)


def test_too_few_tokens_for_a_cache_are_refused():
    model = small_model()
    cache = model.read(tokens(1, 20))
    with pytest.raises(ValueError, match=r"has 5 tokens, but the cache .* has read 20"):
        model.generate(tokens(1, 5), past_key_values=cache, max_new_tokens=3)


def test_a_prompt_of_embeddings():
    model = small_model()
    ids = tokens(1, 7)
    embedded = model.get_input_embeddings()(ids)
    out = model.generate(inputs_embeds=embedded, max_new_tokens=5, do_sample=False)
    assert torch.equal(out, greedy_without_cache(model, ids, 5)[:, 7:])


def test_generated_cache_is_returned_and_bounded():
    model = small_model()
    short = model.generate(tokens(1, 5), max_new_tokens=3, return_dict_in_generate=True)
    long = model.generate(tokens(1, 90), max_new_tokens=30, return_dict_in_generate=True)
    assert short.past_key_values.nbytes == long.past_key_values.nbytes


@every_stack
def test_save_and_load_are_exact(stack, tmp_path):
    model = small_model(stack)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is TrellisForCausalLM
    state = loaded.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(state[name], weight), name
    for parameter in loaded.parameters():
        # The file's bytes are mapped where they are; matrix products of unaligned memory may round
        # otherwise.
        parameter.data = parameter.data.clone()
    ids = tokens(2, 9)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is TrellisModel
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, TrellisConfig)
    saved, ours = (
        [(name, computed_fields(name, fields)) for name, fields in one.layer_mixers()]
        for one in (config, model.config)
    )
    assert saved == ours


def test_weights_that_are_missing_are_initialised_as_in_a_new_model(tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.0.mixer.decay.A_log"
    del weights[gone]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    rate = loaded.model.layers[0].mixer.decay.A_log.exp()
    assert 1 <= rate.min() <= rate.max() <= 16
    kept = "model.layers.1.mixer.decay.A_log"
    assert torch.equal(loaded.state_dict()[kept], model.state_dict()[kept])


def test_bf16_weights(tmp_path):
    model = small_model().bfloat16()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cache = loaded.read(tokens(1, 9))
    assert cache.states[0].memory.keys.dtype == torch.float32
    assert loaded.generate(tokens(1, 9), max_new_tokens=3, do_sample=False).shape == (1, 12)


FRESH = """
import json, sys
import torch
import trellis.models
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor(json.loads(sys.argv[2]))
print(json.dumps(model.generate(ids, max_new_tokens=10, do_sample=False).tolist()))
"""


def test_a_fresh_process_generates_the_same(tmp_path):
    model = small_model("hybrid")
    model.save_pretrained(tmp_path)
    ids = tokens(1, 8)
    command = [sys.executable, "-c", FRESH, str(tmp_path), json.dumps(ids.tolist())]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(out.splitlines()[-1]) == greedy_without_cache(model, ids, 10).tolist()


def test_auto_classes_build_from_a_configuration():
    config = small_model().config
    assert type(AutoModelForCausalLM.from_config(config)) is TrellisForCausalLM
