"""The language model: chaining, padding, packing, loss, configuration."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import STACKS, relative_rms, small_config, small_model, tokens

from trellis import TrellisConfig, TrellisForCausalLM, TrellisModel
from trellis.mixers import TrellisMixerConfig
from trellis.mixers.trellis import FORMS

every_stack = pytest.mark.parametrize("stack", STACKS)


@every_stack
@torch.no_grad()
@given(pieces=st.lists(st.integers(1, 15), min_size=1, max_size=5))
def test_pieces_equal_the_whole(stack, pieces):
    model = small_model(stack)
    ids = tokens(2, sum(pieces))
    whole = model(ids).logits
    cache, outputs = None, []
    for part in ids.split(pieces, dim=1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        outputs.append(output.logits)
    assert relative_rms(torch.cat(outputs, dim=1), whole) < 1e-5
    assert cache.get_seq_length() == sum(pieces)


@every_stack
@torch.no_grad()
def test_token_by_token_equals_the_whole(stack):
    model = small_model(stack)
    ids = tokens(2, 25)
    cache, outputs = model.init_cache(2), []
    for t in range(25):
        outputs.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
    assert relative_rms(torch.cat(outputs, dim=1), model(ids).logits) < 1e-5


@every_stack
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing(stack, side):
    model = small_model(stack)
    lengths = [12, 5, 0, 9]
    ids, mask = tokens(4, 12, seed=1), torch.zeros(4, 12, dtype=torch.long)
    rows = [slice(12 - n, 12) if side == "left" else slice(0, n) for n in lengths]
    for n, row in enumerate(rows):
        mask[n, row] = 1
    output = model(ids, attention_mask=mask, use_cache=True)
    more = tokens(4, 3, seed=2)
    full = torch.cat([mask, torch.ones(4, 3, dtype=torch.long)], dim=1)
    after = model(more, attention_mask=full, past_key_values=output.past_key_values)
    for n, row in enumerate(rows):
        if lengths[n] == 0:
            expected = model(more[n : n + 1]).logits
        else:
            alone = model(ids[n : n + 1, row], use_cache=True)
            assert relative_rms(output.logits[n : n + 1, row], alone.logits) < 1e-5
            expected = model(more[n : n + 1], past_key_values=alone.past_key_values).logits
        assert relative_rms(after.logits[n : n + 1], expected) < 1e-5


@every_stack
def test_padded_loss_and_gradients_equal_the_unpadded(stack):
    model = small_model(stack).train()
    ids = tokens(1, 9)

    def gradients(**inputs):
        model.zero_grad()
        model(**inputs).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients(input_ids=ids, labels=ids)
    for left in (0, 4):
        padded = torch.nn.functional.pad(ids, (left, 4 - left), value=3)
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, 4 - left))
        same = gradients(input_ids=padded, attention_mask=mask, labels=padded)
        for one, other in zip(same, plain):
            assert relative_rms(one, other) < 1e-5


@every_stack
@torch.no_grad()
def test_packed_documents_equal_documents_apart(stack):
    model = small_model(stack)
    ids = tokens(1, 30)
    bounds = torch.tensor([0, 11, 11, 30])
    packed = model(ids, cu_seqlens=bounds, labels=ids)
    losses, count = 0.0, 0
    for begin, end in ((0, 11), (11, 30)):
        part = ids[:, begin:end]
        alone = model(part, labels=part)
        assert relative_rms(packed.logits[:, begin:end], alone.logits) < 1e-5
        losses += alone.loss.item() * (end - begin - 1)
        count += end - begin - 1
    # No token is predicted from the document before its own.
    assert packed.loss.item() == pytest.approx(losses / count, rel=1e-5)


@every_stack
@torch.no_grad()
def test_long_inputs_are_read_in_segments(stack):
    ids = tokens(2, 50)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    whole = small_model(stack)(ids, attention_mask=mask).logits
    model = small_model(stack, segment_size=8)
    assert relative_rms(model(ids, attention_mask=mask).logits, whole) < 1e-5
    last = model(ids, attention_mask=mask, logits_to_keep=11).logits
    assert relative_rms(last, whole[:, -11:]) < 1e-5


@torch.no_grad()
def test_a_long_prompt_takes_the_memory_of_a_segment():
    """No tensor along the way is longer than a segment."""
    model = small_model(segment_size=16)
    longest = 0

    def watch(module, args, output):
        nonlocal longest
        longest = max(longest, output.shape[1])

    for block in model.model.layers:
        block.mlp.register_forward_hook(watch)
    output = model(tokens(1, 200), logits_to_keep=1, use_cache=True)
    assert output.logits.shape == (1, 1, 97)
    assert longest == 16


def test_loss_needs_no_more_than_a_chunk_of_logits():
    widest = 0
    ids = tokens(2, 40)
    model = small_model(loss_tokens=16).train()

    def watch(module, args, output):
        nonlocal widest
        widest = max(widest, output.numel())

    expected = small_model(loss_tokens=2048).train()(ids, labels=ids).loss
    model.lm_head.register_forward_hook(watch)
    output = model(ids, labels=ids)
    output.loss.backward()
    assert output.logits is None
    assert widest == 16 * 97
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    plain = small_model().train()
    logits = plain(ids).logits
    direct = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    direct.backward()
    for one, other in zip(model.parameters(), plain.parameters()):
        assert relative_rms(one.grad, other.grad) < 1e-5


def test_logits_to_keep():
    model = small_model()
    ids = tokens(2, 10)
    logits = model(ids).logits
    assert relative_rms(model(ids, logits_to_keep=3).logits, logits[:, -3:]) < 1e-6
    index = torch.tensor([0, 4])
    assert relative_rms(model(ids, logits_to_keep=index).logits, logits[:, [0, 4]]) < 1e-6
    output = model(ids, labels=ids, logits_to_keep=1)
    assert output.logits.shape == (2, 1, 97)


def test_logits_beside_a_loss_only_where_they_fit_its_chunk():
    ids = tokens(2, 10)
    for training in (True, False):
        small = small_model(loss_tokens=20).train(training)(ids, labels=ids)
        large = small_model(loss_tokens=19).train(training)(ids, labels=ids)
        assert small.logits.shape == (2, 10, 97)
        assert large.logits is None
        assert large.loss.item() == pytest.approx(small.loss.item(), rel=1e-6)
        asked = small_model(loss_tokens=19).train(training)(ids, labels=ids, logits_to_keep=2)
        assert torch.allclose(asked.logits, small.logits[:, -2:], atol=1e-5)


def test_ignored_labels():
    model = small_model()
    ids = tokens(1, 12)
    labels = ids.clone()
    labels[:, :6] = -100
    logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[0, 5:-1], ids[0, 6:])
    assert model(ids, labels=labels).loss.item() == pytest.approx(expected.item(), rel=1e-5)


@every_stack
def test_gradient_checkpointing_changes_nothing(stack):
    ids = tokens(2, 15)
    gradients = []
    for checkpointing in (False, True):
        model = small_model(stack).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients):
        assert relative_rms(one, other) < 1e-6


def test_gradients_flow_through_a_carried_cache():
    model = small_model().train()
    ids = tokens(1, 20)

    def gradients(cuts):
        model.zero_grad()
        cache, total = None, 0
        for begin, end in zip(cuts, cuts[1:]):
            output = model(ids[:, begin:end], past_key_values=cache, use_cache=True)
            cache, total = output.past_key_values, output.logits[:, -1].square().sum()
        total.backward()
        return [p.grad.clone() for p in model.parameters()]

    for one, other in zip(gradients([0, 12, 20]), gradients([0, 20])):
        assert relative_rms(one, other) < 1e-4


def test_hidden_states():
    model = small_model()
    ids, mask = tokens(2, 9), torch.ones(2, 9)
    mask[0, :4] = 0
    output = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(output.hidden_states) == 4
    assert all(h.shape == (2, 9, 64) for h in output.hidden_states)
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    last = model(ids, attention_mask=mask, output_hidden_states=True, logits_to_keep=1)
    assert last.logits.shape == (2, 1, 97)
    assert last.hidden_states[-1].shape == (2, 9, 64)


def test_inputs_embeds():
    model = small_model()
    ids = tokens(2, 9)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(ids).logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=embedded)


def test_tied_embeddings():
    model = small_model()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    apart = small_model(tie_word_embeddings=False)
    assert apart.lm_head.weight is not apart.model.embed_tokens.weight


def test_layers_follow_the_pattern():
    config = small_config("hybrid", num_hidden_layers=5)
    names = [type(block.mixer).__name__ for block in TrellisModel(config).layers]
    kinds = ["TrellisMixer", "TrellisMixer", "TransformerMixer"]
    assert names == [*kinds, *kinds[:2]]
    assert TrellisModel(config).layers[2].mixer.config.window == 7


def test_the_small_configuration_of_the_documentation_works():
    config = TrellisConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=2
    )
    model = TrellisForCausalLM(config)
    assert config.intermediate_size == 192
    assert model(tokens(1, 5)).logits.shape == (1, 5, 97)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixer": "mamba9"}, "mixer must be one of"),
        ({"mixer": []}, "mixer must be a name or a list of at least one"),
        ({"mixer_config": {"slot": 3}}, "did you mean 'slots'"),
        ({"mixer_config": {"transformer": {"window": 3}}}, "section for 'transformer'"),
        (
            {"mixer": ["trellis", "transformer"], "mixer_config": {"slots": 3}},
            "one section for each",
        ),
        ({"mixer_config": {"phi": "relu"}}, "phi must be one of"),
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1; got 0"),
        ({"hiden_size": 64}, "no field 'hiden_size'; did you mean 'hidden_size'"),
    ],
)
def test_configuration_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        TrellisConfig(**fields)


def test_bad_inputs():
    model = small_model()
    ids = tokens(2, 9)
    with pytest.raises(ValueError, match=r"attention_mask must have shape .* got \[2, 4\]"):
        model(ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"T = 9, the number of input tokens; got \[2, 10\]"):
        model(ids, attention_mask=torch.ones(2, 10))  # there is no cache that it could cover
    cache = model.read(tokens(2, 3))
    with pytest.raises(ValueError, match=r"or up to 12, with those of the cache; got \[2, 13\]"):
        model(ids, attention_mask=torch.ones(2, 13), past_key_values=cache)
    with torch.no_grad(), pytest.raises(ValueError, match=r"or up to 4, .*; got \[2, 5\]"):
        model(ids[:, :1], attention_mask=torch.ones(2, 5), past_key_values=cache)
    with pytest.raises(ValueError, match=r"labels must have shape .*\[2, 9\]; got \[2, 8\]"):
        model(ids, labels=ids[:, :8])
    with pytest.raises(TypeError, match="past_key_values must be a TrellisCache; got tuple"):
        model(ids, past_key_values=())
    with pytest.raises(ValueError, match=r"past_key_values must hold 2 sequences.*; got 1"):
        model(ids, past_key_values=model.init_cache(1))
    with pytest.raises(ValueError, match="batch size must be 1"):
        model(ids, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to .*, 9; got \[0, 1\]"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="no argument 'atention_mask'; did you mean"):
        model(ids, atention_mask=torch.ones(2, 9))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (tokens(9), r"input_ids must have shape \[B,T\]; got \[9\]"),
        (tokens(1, 2, 9), r"input_ids must have shape \[B,T\]; got \[1, 2, 9\]"),
        (tokens(2, 9).float(), "input_ids must be whole numbers.*; got torch.float32"),
        (tokens(2, 9) > 3, "input_ids must be whole numbers.*; got torch.bool"),
        (tokens(2, 9).to(torch.uint16), "in int64 or int32, the ids of tokens; got torch.uint16"),
        (tokens(1, 9) * 0 + 97, "ids of tokens from 0 to 96; got ids from 97 to 97"),
        (torch.arange(-1, 4)[None], "ids of tokens from 0 to 96; got ids from -1 to 3"),
    ],
)
def test_token_ids_are_checked_before_anything_is_read(ids, message):
    model = small_model()
    cache = model.init_cache(1)
    before = cache.clone()
    for call in (model, partial(model, past_key_values=cache), model.model, model.read):
        with pytest.raises(ValueError, match=message):
            call(ids)
    with torch.no_grad(), pytest.raises(ValueError, match="input_ids must"):  # as in decoding
        model(ids[:1, :1] if ids.dim() > 1 else ids, past_key_values=cache)
    assert cache.seen == [0] * cache.batch_size
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(cache._tensors(), before._tensors()))
    with pytest.raises(ValueError, match=r"inputs_embeds must have shape \[B,T,dim\]; got \[9\]"):
        model(inputs_embeds=torch.randn(9))


def test_an_interrupted_call_leaves_the_cache_as_it_was():
    model = small_model()
    cache = model.read(tokens(1, 5))
    before = [state.memory.keys.clone() for state in cache.states]

    def fail(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(tokens(1, 3), past_key_values=cache)
    handle.remove()
    assert all(torch.equal(s.memory.keys, k) for s, k in zip(cache.states, before))
    assert cache.get_seq_length() == 5


def test_fields_of_others_are_kept_and_typed_sections_taken(tmp_path):
    config = small_config(mixer_config=TrellisMixerConfig(slots=8))
    config.mask_token_id = 3
    config.save_pretrained(tmp_path)
    loaded = TrellisConfig.from_pretrained(tmp_path)
    assert loaded.mask_token_id == 3
    assert TrellisModel(loaded).layers[0].mixer.slots == 8


def test_a_saved_model_outlives_a_change_of_defaults(tmp_path, monkeypatch):
    model = small_model()
    model.save_pretrained(tmp_path)
    monkeypatch.setitem(FORMS["recommended"], "conv_on", ("q", "k"))
    monkeypatch.setitem(FORMS["recommended"], "skip", False)
    assert not hasattr(TrellisModel(small_config()).layers[0].mixer.convolutions, "v")
    loaded = TrellisForCausalLM.from_pretrained(tmp_path)
    ids = tokens(1, 7)
    assert relative_rms(loaded(ids).logits, model(ids).logits) < 1e-6
