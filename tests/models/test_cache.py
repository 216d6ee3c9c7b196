import pytest
import torch
from safetensors.torch import save_file
from tests.support import STACKS, relative_rms, small_model, tokens

from trellis import TrellisCache

every_stack = pytest.mark.parametrize("stack", STACKS)


@pytest.mark.parametrize("stack", ["trellis", "trellis stale", "hybrid"])
def test_size_does_not_grow(stack):
    model = small_model(stack)
    sizes = {model.read(tokens(2, n)).nbytes for n in (20, 50, 300)}
    assert len(sizes) == 1


def test_size_is_what_the_mixers_say():
    model = small_model()
    numbers = sum(block.mixer.state_size() for block in model.model.layers)
    assert model.read(tokens(5, 9)).nbytes == 5 * 4 * numbers


@every_stack
@torch.no_grad()
def test_saved_and_loaded(stack, tmp_path):
    model = small_model(stack)
    cache = model.read(tokens(2, 21))
    cache.save(tmp_path / "state.safetensors")
    loaded = TrellisCache.load(tmp_path / "state.safetensors", model)
    more = tokens(2, 5, seed=1)
    expected = model(more, past_key_values=cache).logits
    assert torch.equal(model(more, past_key_values=loaded).logits, expected)
    assert loaded.get_seq_length() == 26
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]


@torch.no_grad()
def test_a_model_loaded_from_disk_takes_the_cache(tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path / "model")
    model.read(tokens(1, 9)).save(tmp_path / "state")
    again = type(model).from_pretrained(tmp_path / "model")
    loaded = TrellisCache.load(tmp_path / "state", again)
    assert loaded.get_seq_length() == 9


def test_another_model_is_refused(tmp_path):
    model = small_model()
    model.read(tokens(1, 9)).save(tmp_path / "state")
    other = small_model()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match="another configuration or other weights"):
        TrellisCache.load(tmp_path / "state", other)
    other = small_model(mixer_config={"f": "ln_silu"})
    with pytest.raises(ValueError, match="another configuration or other weights"):
        TrellisCache.load(tmp_path / "state", other)


def test_broken_files_are_refused(tmp_path):
    model = small_model()
    path = tmp_path / "state"
    model.read(tokens(1, 9)).save(path)
    data = path.read_bytes()
    with pytest.raises(FileNotFoundError, match="no cache file"):
        TrellisCache.load(tmp_path / "nothing", model)
    path.write_bytes(data[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        TrellisCache.load(path, model)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="do not match its checksum"):
        TrellisCache.load(path, model)
    fingerprint = model.fingerprint().encode()
    for field, other in ((b'"seen":"9"', b'"seen":"8"'), (fingerprint, fingerprint[::-1])):
        assert field in data
        path.write_bytes(data.replace(field, other))
        with pytest.raises(ValueError, match="do not match its checksum"):
            TrellisCache.load(path, model)
    path.write_bytes(data.replace(b'"version":"2"', b'"version":"9"'))
    with pytest.raises(ValueError, match="format version 9"):
        TrellisCache.load(path, model)
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="not one of a trellis-cache"):
        TrellisCache.load(path, model)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        TrellisCache.load(path, model)


@pytest.mark.parametrize("change", ["one less", "one more", "another dtype", "a missing axis"])
def test_states_that_the_model_does_not_have_are_refused(tmp_path, change, monkeypatch):
    """A file with a true checksum, as a program that knows the format could write it."""
    model = small_model()
    cache = model.read(tokens(1, 9))
    found = dict(cache._tensors())
    first = next(iter(found))
    if change == "one less":
        del found[first]
    elif change == "one more":
        found["layers.9.memory.keys"] = torch.zeros(3)
    elif change == "another dtype":
        found[first] = found[first].double()
    else:
        found[first] = found[first][0]
    monkeypatch.setattr(cache, "_tensors", lambda: list(found.items()))
    cache.save(tmp_path / "state")
    with pytest.raises(ValueError, match="does not hold the states of this model's layers"):
        TrellisCache.load(tmp_path / "state", model)


@every_stack
@torch.no_grad()
def test_what_the_next_token_is_predicted_from(stack, tmp_path):
    model = small_model(stack)
    ids = tokens(3, 11)
    expected = model(ids).logits[:, -1]
    cache = model.read(ids)
    cache.save(tmp_path / "state")
    loaded = TrellisCache.load(tmp_path / "state", model)
    for one in (cache, cache.clone(), loaded):
        assert relative_rms(model.lm_head(one.last), expected) < 1e-5
    for one, order in ((cache.select([2, 0]), [2, 0]), (cache.reorder(torch.tensor([1])), [1])):
        assert relative_rms(model.lm_head(one.last), expected[order]) < 1e-5
    cache.batch_repeat_interleave(2)
    assert relative_rms(model.lm_head(cache.last)[::2], expected) < 1e-5
    model(tokens(3, 1), past_key_values=loaded)  # whose last token `read` has not seen
    assert loaded.last is None
    cache.reset()
    assert cache.last is None


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    model = small_model()
    path = tmp_path / "state"
    model.read(tokens(1, 9)).save(path)
    before = path.read_bytes()

    def full_disk(_):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        model.read(tokens(1, 8)).save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        model.read(tokens(1, 8)).save(tmp_path / "missing" / "state")


@every_stack
@torch.no_grad()
def test_clone_reorder_and_select(stack):
    model = small_model(stack)
    ids, more = tokens(3, 11), tokens(3, 4, seed=1)
    cache = model.read(ids)
    copy = cache.clone()
    model.read(more, cache)  # the original reads on
    assert copy.get_seq_length() == 11
    expected = model(torch.cat([ids, more], dim=1)).logits[:, 11:]
    assert relative_rms(model(more, past_key_values=copy.clone()).logits, expected) < 1e-5
    swapped = copy.reorder(torch.tensor([2, 0, 0]))
    expected = model(torch.cat([ids[[2, 0, 0]], more], dim=1)).logits[:, 11:]
    assert relative_rms(model(more, past_key_values=swapped).logits, expected) < 1e-5
    for batch in ([1], 1, slice(1, 2), torch.tensor([1]), torch.tensor([False, True, False])):
        one = copy.select(batch)
        assert one.batch_size == 1
        logits = model(more[1:2], past_key_values=one).logits
        expected = model(torch.cat([ids, more], dim=1)[1:2]).logits[:, 11:]
        assert relative_rms(logits, expected) < 1e-5


def test_reset_and_detach():
    model = small_model()
    ids = tokens(2, 7)
    cache = model(ids, use_cache=True).past_key_values
    assert cache.states[0].memory.keys.requires_grad
    assert not cache.detach().states[0].memory.keys.requires_grad
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)


@every_stack
def test_a_fresh_cache_can_be_saved(stack, tmp_path):
    model = small_model(stack)
    model.init_cache(2).save(tmp_path / "state")
    assert TrellisCache.load(tmp_path / "state", model).batch_size == 2


def test_a_cache_outlives_its_model():
    copy = small_model().read(tokens(2, 5)).clone().select(0)
    assert copy.batch_size == 1
    with pytest.raises(RuntimeError, match="the model of this cache is gone"):
        copy.reset()


def test_what_was_read_cannot_be_taken_back():
    with pytest.raises(NotImplementedError, match="clone"):
        small_model().read(tokens(1, 4)).crop(2)


@every_stack
@torch.no_grad()
def test_sequences_of_any_lengths_join_and_part(stack):
    """Three sequences that read alone go on together, and each goes on alone again."""
    model = small_model(stack)
    lengths = (5, 21, 9)
    alone = [model.read(tokens(1, n, seed=n)) for n in lengths]
    more, last = tokens(3, 6, seed=1), tokens(3, 4, seed=2)
    joined = TrellisCache.join(alone)
    assert (joined.seen, joined.batch_size) == ([5, 21, 9], 3)
    assert joined.get_seq_length() == 21
    for row, cache in enumerate(alone):
        assert torch.equal(joined.last[row], cache.last[0])
    together = [model(more[:, t : t + 1], past_key_values=joined).logits for t in range(6)]
    for row, (cache, n) in enumerate(zip(alone, lengths)):
        ids = more[row : row + 1]
        own = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(6)]
        assert relative_rms(torch.cat(together, 1)[row], torch.cat(own, 1)[0]) < 1e-5
        parted = TrellisCache.join([joined.select(row)])
        assert (parted.seen, parted.nbytes) == ([n + 6], cache.nbytes)
        ids = last[row : row + 1]
        expected = model(ids, past_key_values=cache).logits
        assert relative_rms(model(ids, past_key_values=parted).logits, expected) < 1e-5


def test_only_caches_of_one_model_join():
    model, other = small_model(), small_model()
    with pytest.raises(ValueError, match="of one model"):
        TrellisCache.join([model.init_cache(1), other.init_cache(1)])
    with pytest.raises(ValueError, match="got none"):
        TrellisCache.join([])


@torch.no_grad()
def test_a_file_of_sequences_of_different_lengths(tmp_path):
    model = small_model()
    cache = TrellisCache.join([model.read(tokens(1, 5)), model.read(tokens(1, 9))])
    cache.save(tmp_path / "state")
    loaded = TrellisCache.load(tmp_path / "state", model)
    assert loaded.seen == [5, 9]
    assert torch.equal(loaded.last, cache.last)
