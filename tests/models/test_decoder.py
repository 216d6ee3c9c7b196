"""The native decoder beside PyTorch, which is its definition."""

import copy
import logging
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import relative_rms, small_model, tokens

from trellis.mixers.base import named_tensors
from trellis.mixers.layers import RMSNorm
from trellis.models import decoder
from trellis.models.backbone import Block
from trellis.models.decoder import BlockSteps, Decoder
from trellis.ops.native import build

PAPER = {"form": "paper", "psi": "identity"}
DECODE = {"phi": "identity", "half_life": (8, 2048)}
#: Models that the decoder takes.
TAKEN = {
    "default": {"mixer": "trellis"},
    "paper": {"mixer": "trellis", "mixer_config": PAPER},
    "decode": {"mixer": "trellis", "mixer_config": DECODE},
    "stale": {
        "mixer": "trellis",
        "mixer_config": {**PAPER, "mode": "stale", "minibatch": 5, "stale_step": "position"},
    },
    "gated_delta_net": {"mixer": "gated_delta_net"},
    "delta_net": {
        "mixer": "delta_net",
        "mixer_config": {"allow_neg_eigval": True, "conv_on": ("k",)},
    },
    "transformer": {"mixer": "transformer"},
    "grouped queries": {
        "mixer": "transformer",
        "mixer_config": {"heads": 6, "kv_heads": 2, "head_dim": 12, "window": 90},
    },
    "hybrid": {
        "mixer": ["trellis", "transformer", "gated_delta_net"],
        "mixer_config": {"transformer": {"window": 7}},
    },
    "untied": {"mixer": "trellis", "tie_word_embeddings": False, "vocab_size": 101},
}
every_model = pytest.mark.parametrize("name", TAKEN)


def compiler():
    """Whether there is one. A kernel that it cannot compile fails the tests."""
    try:
        return build.find_compiler()
    except build.NoKernel:
        return None


pytestmark = pytest.mark.skipif(not compiler(), reason="no C++ compiler")


@pytest.fixture
def torch_decodes(monkeypatch):
    """Switches the native decoder off and on."""

    def switch(off):
        monkeypatch.setenv(decoder.VARIABLE, "torch" if off else "auto")

    return switch


def taken(model):
    """Whether the decoder reads a token of this model."""
    with torch.no_grad():
        cache = model.read(tokens(1, 3))
        model(tokens(1, 1), past_key_values=cache)
    return cache.session is not None


def steps(model, cache, ids):
    """The logits [B, T, V] of tokens that are read one by one."""
    with torch.no_grad():
        return torch.cat(
            [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(ids.shape[1])], 1
        )


def trained(name):
    """A model after a few steps on a text with a pattern, so that its choices are clear."""
    model = small_model(**TAKEN[name]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = (torch.arange(200)[None] * torch.arange(1, 5)[:, None] // 3 + 1) % 23
    for _ in range(30):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@every_model
def test_equal_to_torch_over_a_thousand_tokens(name, torch_decodes):
    count = 1000 if name in ("paper", "decode", "gated_delta_net", "transformer") else 150
    model = small_model(**TAKEN[name])
    prompt, ids = tokens(2, 9), tokens(2, count, seed=1)
    torch_decodes(True)
    cache = model.read(prompt)
    expected = steps(model, cache, ids)
    assert cache.session is None
    torch_decodes(False)
    other = model.read(prompt)
    actual = steps(model, other, ids)
    assert other.session is not None
    for part in (slice(0, 1), slice(1, 100), slice(100, None), slice(count - 10, None)):
        assert relative_rms(actual[:, part], expected[:, part]) < 1e-5
    assert other.seen == cache.seen == [9 + count] * 2
    assert other.nbytes == cache.nbytes
    for (key, value), (_, reference) in zip(other._tensors(), cache._tensors()):
        assert value.shape == reference.shape, key
        assert relative_rms(value, reference) < 2e-5, key


@pytest.mark.parametrize("name", ["paper", "decode", "gated_delta_net", "transformer"])
def test_a_trained_model_chooses_the_same_tokens(name, torch_decodes):
    model = trained(name)
    prompt = tokens(3, 20) % 23
    texts = []
    for off in (True, False):
        torch_decodes(off)
        texts.append(model.generate(prompt, max_new_tokens=100, do_sample=False))
    assert torch.equal(*texts)
    assert len(texts[0][0].unique()) > 5


@every_model
def test_states_are_interchangeable(name, torch_decodes):
    """Parts of a sequence are read token by token in turn by the decoder and by PyTorch, and as
    whole prompts between them."""
    model = small_model(**TAKEN[name])
    ids = tokens(2, 60)
    torch_decodes(True)
    with torch.no_grad():
        expected = model(ids).logits
    cache, found = model.init_cache(2), []
    for i, part in enumerate(ids.split(6, dim=1)):
        torch_decodes(i % 2 == 0)
        if i % 3 == 0:
            with torch.no_grad():
                found.append(model(part, past_key_values=cache).logits)
        else:
            found.append(steps(model, cache, part))
    assert relative_rms(torch.cat(found, 1), expected) < 2e-5


def drawn_trellis():
    pairs = st.sampled_from([1.0, (1.0, 0.5)])
    return st.fixed_dictionaries(
        {
            "shape": st.sampled_from(["wide", "model"]),
            "heads": st.integers(1, 3),
            "head_dim": st.integers(1, 40),
            "expand_v": st.sampled_from([None, 1, 2]),
            "slots": st.one_of(st.none(), st.integers(1, 40)),
            "phi": st.sampled_from(["identity", "silu", "gelu", "tanh", "ln_silu", "l2norm"]),
            "f": st.sampled_from(["ln_silu", "l2_silu", "softmax", "silu", "identity"]),
            "psi": st.sampled_from(["identity", "silu", "layernorm"]),
            "value_pass": st.sampled_from(["encode", "decode"]),
            "mode": st.sampled_from(["exact", "stale"]),
            "minibatch": st.integers(1, 5),
            "stale_step": st.sampled_from(["minibatch", "position", "none"]),
            "error_at": st.sampled_from(["before", "after"]),
            "conv_width": st.integers(0, 5),
            "conv_on": st.sampled_from([("q",), ("q", "k"), ("q", "k", "v", "alpha")]),
            "conv_bias": st.booleans(),
            "skip": st.sampled_from([False, 0.7]),
            "normalize": st.sampled_from([None, ("q", "k", "v"), ("q", "k")]),
            "lms_step": st.booleans(),
            "step": st.sampled_from(["sigmoid", "softplus", "constant"]),
            "step_max": pairs,
            "forget_gate": st.booleans(),
            "decay": st.sampled_from(["softplus", "sigmoid"]),
            "half_life": st.just(False),
            "separate_gates": st.booleans(),
            "normalize_alpha": st.booleans(),
        }
    ).map(lambda fields: {"mixer": "trellis", "mixer_config": fields})


def drawn_delta_net():
    return st.fixed_dictionaries(
        {
            "shape": st.just("model"),
            "heads": st.integers(1, 3),
            "head_dim": st.integers(1, 20),
            "expand_v": st.integers(1, 3).map(float),
            "conv_width": st.integers(0, 4),
            "use_gate": st.booleans(),
        }
    ).map(lambda fields: {"mixer": "gated_delta_net", "mixer_config": fields})


def drawn_attention():
    return st.fixed_dictionaries(
        {
            "window": st.one_of(st.none(), st.integers(1, 9)),
            "heads": st.sampled_from([4, 8]),
            "kv_heads": st.sampled_from([1, 2, 4]),
            "head_dim": st.sampled_from([2, 6, 20]),
        }
    ).map(lambda fields: {"mixer": "transformer", "mixer_config": fields})


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(drawn_trellis(), drawn_trellis(), drawn_delta_net(), drawn_attention()),
    st.integers(1, 16), st.sampled_from([(2, 1), (6, 3), (24, 2), (36, 3), (80, 2)]),
    st.integers(1, 70), st.integers(2, 100), st.integers(1, 3),
)  # fmt: skip
def test_drawn_models(fields, batch, sizes, mlp, vocabulary, threads):
    dim, heads = sizes
    model = small_model(
        hidden_size=dim, num_attention_heads=heads, intermediate_size=mlp,
        vocab_size=vocabulary, num_hidden_layers=2, **fields,
    )  # fmt: skip
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "skip", "norm.weight")):
                weight.uniform_(0.3, 1.2)
    ids = tokens(batch, 12) % vocabulary
    mask = torch.arange(5) >= torch.arange(batch)[:, None] % 4  # prompts of different lengths
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "BYTES_OF_A_THREAD", 1)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        patch.setenv(decoder.VARIABLE, "torch")
        prompt = model(ids[:, :5], attention_mask=mask, use_cache=True).past_key_values
        ours = prompt.clone()
        expected = steps(model, prompt, ids[:, 5:])
        patch.setenv(decoder.VARIABLE, "auto")
        actual = steps(model, ours, ids[:, 5:])
    assert ours.session is not None
    # Activations that divide by a deviation near zero amplify roundings.
    assert relative_rms(actual, expected) < (1e-4 if "ln" in str(fields) else 2e-5)


def test_several_tokens_at_once(torch_decodes):
    model = small_model()
    ids = tokens(2, 14)
    with torch.no_grad():
        torch_decodes(True)
        cache = model.read(ids[:, :8])
        expected = model(ids[:, 8:], past_key_values=cache.clone()).logits
        torch_decodes(False)
        whole = model(ids[:, 8:], past_key_values=cache.clone())
        last = model(ids[:, 8:], past_key_values=cache.clone(), logits_to_keep=2).logits
        more = model(ids[:, 8:], past_key_values=cache.clone(), logits_to_keep=99).logits
    assert whole.past_key_values.session is not None
    assert relative_rms(whole.logits, expected) < 1e-5
    assert torch.equal(last, whole.logits[:, -2:])
    assert torch.equal(more, whole.logits)


def test_a_long_prompt_is_read_by_the_chunked_kernels(monkeypatch):
    monkeypatch.setattr(decoder, "BYTES_OF_A_LAYER", 0)
    model = small_model()
    cache = model.init_cache(1)
    with torch.no_grad():
        model(tokens(1, 2), past_key_values=cache)
        assert cache.session is None
        model(tokens(1, 1), past_key_values=cache)
        assert cache.session is not None


@pytest.mark.parametrize("name", ["stale", "transformer"])
def test_states_that_were_taken_out_do_not_change(name):
    """Clones, copies and the states themselves stay what they are while decoding goes on."""
    model = small_model(**TAKEN[name])
    cache = model.read(tokens(2, 9))
    more = tokens(2, 5)
    steps(model, cache, more)
    others = [
        cache.clone(), cache.detach(), copy.copy(cache), copy.deepcopy(cache),
        cache.select([0, 1]), model.init_cache(2),
    ]  # fmt: skip
    others[-1].states = cache.states
    before = [[t.clone() for _, t in other._tensors()] for other in others]
    expected = steps(model, cache, more)
    for other, tensors in zip(others, before):
        for (key, tensor), kept in zip(other._tensors(), tensors):
            assert torch.equal(tensor, kept), key
        assert torch.equal(steps(model, other, more), expected)
    assert cache.session is not None


def test_a_cache_is_saved_reordered_and_reset_between_tokens(tmp_path):
    model = small_model()
    cache = model.read(tokens(2, 9))
    steps(model, cache, tokens(2, 3))
    cache.save(tmp_path / "state")
    loaded = type(cache).load(tmp_path / "state", model)
    swapped = cache.reorder(torch.tensor([1, 0]))
    ids = tokens(2, 4, seed=2)
    expected = steps(model, cache, ids)
    assert torch.equal(steps(model, loaded, ids), expected)
    assert relative_rms(steps(model, swapped, ids.flip(0)), expected.flip(0)) < 1e-6
    cache.reset()
    assert relative_rms(steps(model, cache, ids), steps(model, model.init_cache(2), ids)) < 1e-6


def change_in_place(model):
    model.model.layers[1].mlp.up_proj.weight.mul_(1.5)


def load(model):
    state = {name: weight + 0.01 for name, weight in model.state_dict().items()}
    model.load_state_dict(state)


def take_a_step(model):
    with torch.enable_grad():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        model(tokens(1, 8), labels=tokens(1, 8)).loss.backward()
        optimizer.step()


def exchange(model):
    old = model.model.layers[0].mlp
    model.model.layers[0].mlp = copy.deepcopy(old)
    model.model.layers[0].mlp.down_proj.weight.neg_()


def assign(model):
    weight = torch.nn.Parameter(-model.model.norm.weight.detach())
    model.model.norm.weight = weight


@pytest.mark.parametrize("change", [change_in_place, load, take_a_step, exchange, assign])
@torch.no_grad()
def test_changed_weights_are_packed_again(change, torch_decodes):
    model = small_model()
    cache = model.read(tokens(1, 5))
    ids = tokens(1, 1)
    before = model(ids, past_key_values=cache.clone()).logits
    change(model)
    actual = model(ids, past_key_values=cache.clone()).logits
    torch_decodes(True)
    expected = model(ids, past_key_values=cache.clone()).logits
    assert relative_rms(actual, expected) < 1e-5
    assert relative_rms(before, expected) > 1e-3


def test_hooks_switch_it_off_and_are_called(caplog, monkeypatch):
    monkeypatch.setattr(Decoder, "_told", set())
    model = small_model()
    assert taken(model)
    calls = []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *a: calls.append(a))
    with caplog.at_level(logging.WARNING, logger="trellis"):
        assert not taken(model)
        assert not taken(model)
    assert len(calls) == 4
    assert caplog.text.count("decoding runs in PyTorch: SwiGLU has a hook") == 1
    hook.remove()
    assert taken(model)
    calls = []
    model.register_forward_hook(lambda *a: calls.append(a))  # of the model itself: called anyway
    assert taken(model)
    assert calls


def test_what_it_does_not_take(monkeypatch, caplog):
    monkeypatch.setattr(Decoder, "_told", set())
    with caplog.at_level(logging.WARNING, logger="trellis"):
        assert not taken(small_model("mamba2"))
        assert not taken(small_model(mixer_config={"backend": "chunked"}))
        assert not taken(small_model().double())
        for field in ("qkv_bias", "out_bias", "qk_norm"):
            assert not taken(small_model("transformer", mixer_config={field: True}))
        half = small_model()
        half.lm_head = torch.nn.Linear(64, 97, bias=False).bfloat16()
        half.model.norm.bfloat16()
        quantised = small_model()
        quantised.model.layers[0].mlp.up_proj = type("Int8", (torch.nn.Linear,), {})(64, 192, False)
        assert not taken(quantised)
        compiled = small_model()
        compiled.model.layers[0].mlp.compile(backend="eager")
        assert not taken(compiled)
    for reason in ("it does not know Mamba2Mixer", "attention with qkv_bias", "with qk_norm",
                   "backend='chunked'", "not a plain fp32 tensor",
                   "it does not know Int8", "has a hook or a forward"):  # fmt: skip
        assert reason in caplog.text


def test_adapters_switch_it_off():
    peft = pytest.importorskip("peft")
    model = small_model()
    assert taken(model)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    assert not taken(adapted.base_model.model)


def test_gradients_autocast_and_the_environment_switch_it_off(monkeypatch):
    model = small_model()
    cache = model.read(tokens(1, 3))
    model(tokens(1, 1), past_key_values=cache)
    assert cache.session is None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens(1, 1), past_key_values=cache)
    assert cache.session is None
    monkeypatch.setenv("TRELLIS_BACKEND", "reference")
    assert not taken(model)
    monkeypatch.delenv("TRELLIS_BACKEND")
    assert taken(model)
    monkeypatch.setenv(decoder.VARIABLE, "cuda")
    with pytest.raises(ValueError, match=r"TRELLIS_DECODER must be one of .*; got 'cuda'"):
        taken(model)


@torch.no_grad()
def test_bad_input_is_refused_as_ever():
    model = small_model()
    cache = model.read(tokens(2, 3))
    with pytest.raises(ValueError, match="ids of tokens from 0 to 96; got ids from 97 to 97"):
        model(torch.full((2, 1), 97), past_key_values=cache)
    with pytest.raises(ValueError, match="must hold 3 sequences"):
        model(tokens(3, 1), past_key_values=cache)
    other = small_model(hidden_size=32)
    with pytest.raises(ValueError, match="shape"):
        other(tokens(2, 1), past_key_values=cache)
    assert cache.seen == [3, 3]


@torch.no_grad()
def test_weights_in_bf16(monkeypatch):
    """As exact as PyTorch with weights of linear maps that are rounded to bf16."""
    model = small_model()
    cache = model.read(tokens(2, 5))
    ids = tokens(2, 6)
    whole = steps(model, cache.clone(), ids)
    monkeypatch.setenv(decoder.VARIABLE, "bf16")
    actual = steps(model, cache.clone(), ids)
    monkeypatch.setenv(decoder.VARIABLE, "torch")
    embedding = model.get_input_embeddings().weight.clone()
    model.lm_head.weight = torch.nn.Parameter(embedding.clone())
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(module.weight.bfloat16())
    expected = steps(model, cache.clone(), ids)
    assert relative_rms(actual, expected) < 1e-5
    assert 1e-4 < relative_rms(actual, whole) < 2e-2


@torch.no_grad()
def test_other_targets_than_this_machine(monkeypatch):
    """The kernel as it is compiled for older processors."""
    model = small_model(**TAKEN["hybrid"])
    cache, ids = model.read(tokens(5, 4)), tokens(5, 9)
    expected = steps(model, cache.clone(), ids)
    native = decoder.kernel
    for target in ("avx2", "portable"):
        loaded = decoder.declared(build.open_library(build.library(decoder.SOURCE, target)))
        monkeypatch.setattr(decoder, "kernel", lambda loaded=loaded: loaded)
        Decoder._of_models.pop(model)
        assert relative_rms(steps(model, cache.clone(), ids), expected) < 1e-5
    monkeypatch.setattr(decoder, "kernel", native)


def test_a_model_with_a_decoder_is_copied_and_pickled():
    model = small_model()
    assert taken(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert taken(other)


def test_the_default_dtype_of_torch_changes_nothing():
    model, ids = small_model("trellis"), tokens(1, 8)
    first, second = (steps(model, model.init_cache(1), ids) for _ in range(2))
    assert torch.equal(first, second)
    torch.set_default_dtype(torch.float64)
    try:
        other = copy.deepcopy(model)  # packed anew
        assert torch.equal(steps(model, model.init_cache(1), ids), first)
        assert torch.equal(steps(other, other.init_cache(1), ids), first)
    finally:
        torch.set_default_dtype(torch.float32)


def block_steps(mixer, dim=32):
    """A `BlockSteps` of two blocks with weights that are not what they start as."""
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(Block(dim, 2, 48, 1e-6, mixer, {}) for _ in range(2))
    norm = RMSNorm(dim, 1e-6)
    with torch.no_grad():
        for parameter in (*blocks.parameters(), *norm.parameters()):
            parameter.add_(0.1 * torch.randn_like(parameter))
    return BlockSteps(blocks, norm)


def in_torch(found, x, states):
    """What `BlockSteps.read` returns, from its definition."""
    after = []
    x = x[:, None]
    for block, state in zip(found.model.layers, states):
        x, state = block(x, state)
        after.append(state)
    return found.model.norm(x)[:, 0], after


def tensors_of(states):
    return [t for state in states for _, t in named_tensors(state)]


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["trellis", "gated_delta_net", "delta_net"])
@pytest.mark.parametrize("sequences", [1, 16, 37])
def test_blocks_read_vectors_as_in_torch(mixer, sequences):
    """Vector after vector; more sequences than a step takes are read in portions."""
    made = block_steps(mixer)
    theirs = [block.mixer.init_state(sequences) for block in made.model.layers]
    ours = theirs
    for seed in range(5):
        x = torch.randn(2 * sequences, 32, generator=torch.Generator().manual_seed(seed))[::2]
        before = [t.clone() for t in tensors_of(ours)]
        hidden, after = made.read(x, ours)
        assert all(map(torch.equal, tensors_of(ours), before))
        expected, theirs = in_torch(made, x, theirs)
        ours = after
        assert relative_rms(hidden, expected) < 1e-5
        for one, other in zip(tensors_of(ours), tensors_of(theirs)):
            assert relative_rms(one, other) < 1e-5
    made.model.layers[1].mlp.down_proj.weight.mul_(2)  # packed again
    assert relative_rms(made.read(x, ours)[0], in_torch(made, x, ours)[0]) < 1e-5


def test_vectors_that_blocks_read_in_torch(monkeypatch):
    made, x = block_steps("trellis"), torch.randn(3, 32)
    states = [block.mixer.init_state(3) for block in made.model.layers]
    assert made.read(x, states) is None  # gradients are wanted
    with torch.no_grad():
        assert made.read(x, states) is not None
        assert made.read(x.double(), states) is None
        assert made.read(x.new_zeros(0, 32), states) is None
        many = decoder.MOST_SEQUENCES + 1
        assert made.read(x.new_zeros(many, 32), states) is None
        other = block_steps("trellis", dim=64)
        assert made.read(x, [b.mixer.init_state(3) for b in other.model.layers]) is None
        for mixer in ("transformer", "gsa"):
            other = block_steps(mixer)
            here = [block.mixer.init_state(3) for block in other.model.layers]
            assert other.read(x, here) is None
        monkeypatch.setenv(decoder.VARIABLE, "torch")
        assert made.read(x, states) is None


def test_blocks_may_be_met_first_in_inference_mode():
    plain = block_steps("trellis").model
    states = [block.mixer.init_state(2) for block in plain.layers]
    with torch.inference_mode():
        assert BlockSteps(plain.layers, plain.norm).read(torch.randn(2, 32), states) is not None
