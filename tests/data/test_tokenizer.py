"""Text to ids and back, whole and in pieces."""

import json
import os
import pickle

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.support import TEXTS, write_folder, write_tar
from tokenizers import decoders, models, pre_tokenizers

from trellis.data import load_tokenizer, train_tokenizer
from trellis.data import tokenizer as module
from trellis.data.pieces import AFTER_NEWLINE, cut, last_cut
from trellis.data.tokenizer import TextTokenizer

WORDS = ["the", "cat", " ", "  ", "\n", "\r\n", "\n\n", "\t", "it's", "3", "1234", ".", "...",
         "Ünï", "日本", "😀", "<|endoftext|>", "_x", "\u00a0", "\u3000", "µ",
         "e\u0301"]  # fmt: skip
TEXT = st.lists(st.sampled_from(WORDS), max_size=60).map("".join)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    write_folder(folder / "text", {"a.txt": "\n".join("".join(WORDS) + w for w in WORDS) * 3})
    return train_tokenizer([folder / "text"], 400, folder / "out")


def with_prefix_space():
    inner = tokenizers.Tokenizer(models.Unigram([("▁", -1.0), *((c, -2.0) for c in "abc\n")], 0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    return TextTokenizer(inner.to_str(), "metaspace")


@given(TEXT)
def test_bytes_are_the_ids_and_the_library_agrees(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert ids.tolist() == tokenizer.inner.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_bytes_are_a_tokenizer_json_with_a_hash_that_never_changes(tmp_path):
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.sha256 == "1ade2efa11190fd5a15aacb1042ad6ed3fcf4a99b85bf1749a1fa3ff9aab8556"
    tokenizer.save(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(name)
        assert again.sha256 == tokenizer.sha256
        assert again.encode("é").tolist() == [0xC3, 0xA9]


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    tokenizer = load_tokenizer("bytes")
    path = tokenizer.save(tmp_path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        tokenizer.save(tmp_path)
    assert load_tokenizer(path).sha256 == tokenizer.sha256
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]


def test_transformers_loads_it(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the models extra is not installed")
    path = load_tokenizer("bytes").save(tmp_path)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert fast("aé")["input_ids"] == [97, 0xC3, 0xA9]
    assert len(fast) == 257


@given(TEXT, st.integers(1, 40))
def test_pieces_give_the_tokens_of_the_whole(bpe, text, size):
    assert bpe._place is not None
    whole = bpe.inner.encode(text, add_special_tokens=False).ids
    pieces = list(cut(text, bpe._place, size))
    assert "".join(pieces) == text
    assert [i for p in pieces for i in bpe.inner.encode(p, add_special_tokens=False).ids] == whole
    assert bpe.encode(text).tolist() == whole


def test_long_texts_are_encoded_in_pieces(bpe, monkeypatch):
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 50)
    monkeypatch.setattr(module, "_CALL_CHARACTERS", 200)
    texts = ["the cat\nsat on it 3 times. " * 40, "", "x", "no place to cut" * 3]
    whole = [bpe.inner.encode(t, add_special_tokens=False).ids for t in texts]
    assert [ids.tolist() for ids in bpe.encode_batch(texts)] == whole


def test_a_tokenizer_that_adds_a_space_gets_whole_texts():
    tokenizer = with_prefix_space()
    assert tokenizer._place is None
    text = "abc\nabc " * 20_000
    assert tokenizer.encode(text).tolist() == tokenizer.inner.encode(text).ids


def test_a_token_that_reaches_over_a_newline_forbids_the_cut():
    vocabulary = {c: i for i, c in enumerate([*module._byte_alphabet(), "Ċq", "xĠ"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "q")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    assert TextTokenizer(inner.to_str(), "over")._place is None
    del vocabulary["Ċq"]
    vocabulary["xĠ"] = 256
    inner.model = models.BPE(vocab=vocabulary, merges=[("x", "Ġ")])
    assert TextTokenizer(inner.to_str(), "over a space")._place is AFTER_NEWLINE


def test_the_text_of_a_special_token_is_text(bpe):
    text = "a<|endoftext|>b"
    for tokenizer in (bpe, load_tokenizer("bytes")):
        ids = tokenizer.encode(text)
        assert tokenizer.end_of_document not in ids
        assert tokenizer.decode(ids) == text


def test_truncation_and_padding_of_the_file_are_not_used(bpe):
    inner = tokenizers.Tokenizer.from_str(json.dumps(bpe.json))
    inner.enable_truncation(3)
    inner.enable_padding(length=500)
    text = TEXTS["a.txt"]
    assert TextTokenizer(inner.to_str(), "t").encode(text).tolist() == bpe.encode(text).tolist()


@given(TEXT)
def test_streamed_text_is_the_decoded_text(bpe, text):
    for tokenizer in (bpe, load_tokenizer("bytes")):
        decoder = tokenizer.stream_decoder()
        parts = [decoder.feed(int(i)) for i in tokenizer.encode(text)]
        assert "".join(parts) + decoder.finish() == text
        assert all("\ufffd" not in part for part in parts)


def test_streams_of_other_tokenizers_and_of_broken_bytes():
    decoder = with_prefix_space().stream_decoder()
    ids = with_prefix_space().encode("ab cab").tolist()
    assert "".join(decoder.feed(i) for i in ids) + decoder.finish() == "ab cab"
    decoder = load_tokenizer("bytes").stream_decoder()
    assert decoder.feed([0xE2, 0x82]) == ""
    assert decoder.feed(ord("a")) == "\ufffda"
    assert decoder.feed([256, 0xE2]) == ""
    assert decoder.finish() == "\ufffd"


def test_it_can_be_pickled(bpe):
    again = pickle.loads(pickle.dumps(bpe))
    assert (again.sha256, again.name) == (bpe.sha256, bpe.name)
    assert np.array_equal(again.encode("the cat"), bpe.encode("the cat"))


def test_training_is_deterministic_and_refuses_to_overwrite(tmp_path):
    folder = write_folder(tmp_path / "in")
    first = train_tokenizer([folder], 270, tmp_path / "one")
    second = train_tokenizer([folder], 270, tmp_path / "two.json")
    assert first.sha256 == second.sha256 == load_tokenizer(tmp_path / "two.json").sha256
    assert first.end_of_document == 0
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["tokenizer.json"]
    with pytest.raises(FileExistsError, match=r"one/tokenizer\.json exists"):
        train_tokenizer([folder], 270, tmp_path / "one")
    for size in (100, 10**12, 10**25):  # the library aborts the process at such sizes
        with pytest.raises(ValueError, match=rf"at least 257 .* at most 16777216; got {size}$"):
            train_tokenizer([folder], size, tmp_path / "three")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no document was found"):
        train_tokenizer([tmp_path / "empty"], 300, tmp_path / "four")
    assert not (tmp_path / "four").exists()


def test_an_output_that_cannot_be_written_is_found_before_reading(tmp_path):
    (tmp_path / "plain").write_text("mine")
    message = r"plain/x/tokenizer\.json cannot be written: .*plain is not a folder"
    with pytest.raises(NotADirectoryError, match=message):
        train_tokenizer([tmp_path / "nothing"], 300, tmp_path / "plain" / "x")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if not os.access(locked, os.W_OK):
        with pytest.raises(PermissionError, match="no permission to write to"):
            train_tokenizer([tmp_path / "nothing"], 300, locked)


def test_a_file_that_appeared_meanwhile_is_not_overwritten(tmp_path):
    folder, path = write_folder(tmp_path / "in"), tmp_path / "out" / "tokenizer.json"
    with pytest.raises(FileExistsError, match=r"tokenizer\.json exists"):
        train_tokenizer(
            [folder], 300, path, progress=lambda *_: write_folder(path.parent, {path.name: "mine"})
        )
    assert path.read_text() == "mine"


def test_what_training_leaves_out_is_told(tmp_path):
    folder = write_folder(tmp_path / "in", {"x.png": b"", ".h": "", "r.jsonl": b"{\n" * 9})
    tar = write_tar(tmp_path / "t.tar", folder)
    ignored, skipped = [], []
    with pytest.raises(ValueError, match=r"and 13 more\n  ignored 2 \(hidden\), 2 \.png"):
        train_tokenizer([folder, tar], 300, tmp_path / "out")
    write_folder(folder)
    train_tokenizer(
        [folder, tar], 300, tmp_path / "out", skipped=skipped.append, ignored=ignored.append
    )
    assert len(skipped) == 18
    assert ignored == [{".png": 2, "(hidden)": 2}]


def test_what_is_not_a_tokenizer_is_named(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json' is not a valid tokenizer\.json"):
        load_tokenizer(tmp_path / "broken.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.json' is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "binary.json")
    empty = tokenizers.Tokenizer(models.BPE()).to_str()
    with pytest.raises(ValueError, match="tokenizer 'empty' has an empty vocabulary"):
        TextTokenizer(empty, "empty")
    with pytest.raises(FileNotFoundError, match=r"the folder has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing.json")


def test_a_text_without_a_safe_place_is_cut_at_its_end():
    assert last_cut("x" * 100) == 100
    assert last_cut("a b\nc  \n d") == len("a b\n")
    assert last_cut("A b\r\nc d e F") == len("A b\r\nc d")


def test_parts_of_a_text_give_the_ids_of_the_whole(tmp_path, monkeypatch):
    from trellis.data import tokenizer as module

    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 16)
    text = "".join(f"line {n} of a naïve text\nand a word " for n in range(60))
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(text)
    trained = module.train_tokenizer([folder], 300, tmp_path / "tokenizer.json")
    for one in (trained, module.load_tokenizer("bytes")):
        parts = [text[n : n + 7] for n in range(0, len(text), 7)]
        pieces = list(one.encode_parts(parts))
        assert len(pieces) > 10
        assert np.array_equal(np.concatenate(pieces), one.encode(text))
