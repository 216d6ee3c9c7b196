"""Reading a corpus, and what is said of one that is broken."""

import json
import multiprocessing
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import write_folder

from trellis.data import open_corpus, prepare_corpus

TEXTS = {f"{i:02d}.txt": f"text number {i}. " * (i + 1) for i in range(30)}


@pytest.fixture
def folder(tmp_path):
    source = write_folder(tmp_path / "in", TEXTS)
    prepare_corpus([source], tmp_path / "out", validation=0.2, shard_tokens=500)
    return tmp_path / "out"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    write_folder(folder / "in", TEXTS)
    return prepare_corpus([folder / "in"], folder / "out", validation=0.2, shard_tokens=500)


def all_tokens(corpus, split):
    shards = corpus.manifest["splits"][split]["shards"]
    return np.concatenate([np.fromfile(corpus.path / s["file"], "<u2") for s in shards])


@given(st.data())
def test_reads_cross_shards(shared, data):
    stream = shared.train
    assert len(stream._shards) > 5
    start = data.draw(st.integers(0, stream.tokens))
    stop = data.draw(st.integers(start, stream.tokens))
    found = stream.read(start, stop)
    assert found.dtype == np.int64
    assert np.array_equal(found, all_tokens(shared, "train")[start:stop])


def test_reads_out_of_bounds_are_refused(shared):
    tokens = shared.train.tokens
    for start, stop in [(-1, 5), (5, 4), (0, tokens + 1)]:
        with pytest.raises(IndexError, match=rf"train tokens {start}:{stop} were asked for"):
            shared.train.read(start, stop)


def test_documents_are_whole_and_end_with_their_token(shared):
    assert shared.train.documents + shared.validation.documents == 30
    assert shared.vocab_size == 257
    tokenizer = shared.tokenizer()
    texts = set()
    for stream in (shared.train, shared.validation):
        start = 0
        for end in stream.ends.tolist():
            ids = stream.read(start, end)
            assert ids[-1] == tokenizer.end_of_document
            texts.add(tokenizer.decode(ids[:-1]))
            start = end
    assert texts == set(TEXTS.values())


def test_it_is_pickled_by_name_and_read_in_another_process(shared):
    shared.train.read(0, 10), shared.train.ends
    blob = pickle.dumps(shared)
    assert len(blob) < 20_000
    again = pickle.loads(blob)
    assert np.array_equal(again.train.read(400, 1600), shared.train.read(400, 1600))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert (
            pool.apply(again.train.read, (400, 410)).tolist() == again.train.read(400, 410).tolist()
        )


def test_the_fingerprint_is_of_the_content(shared, folder):
    again = open_corpus(shared.path)
    assert again.fingerprint == shared.fingerprint
    assert open_corpus(folder).fingerprint != shared.fingerprint  # of another source


def test_verify_reads_everything(folder):
    seen = []
    corpus = open_corpus(folder)
    corpus.verify(lambda *call: seen.append(call))
    total = sum(size for _, size, _ in corpus.files())
    assert seen[-1][1:] == (total, total)
    path = folder / "train-00001.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    corpus = open_corpus(folder)  # the size is right
    with pytest.raises(ValueError, match=r"train-00001\.bin: sha256 \w+, expected \w+"):
        corpus.verify()


def test_a_truncated_shard_is_named_with_its_sizes(folder):
    path = folder / "train-00002.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(
        ValueError, match=r"train-00002\.bin has 996 bytes, expected 1,000: prepare"
    ):
        open_corpus(folder)


@pytest.mark.parametrize("name", ["train-00000.bin", "validation-documents.bin", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        open_corpus(folder)


def test_ends_that_do_not_fit_the_tokens(folder):
    path = folder / "train-documents.bin"
    ends = np.fromfile(path, "<u8")
    ends[-1] += 1
    ends.tofile(path)
    with pytest.raises(ValueError, match=r"train-documents\.bin ends at token"):
        open_corpus(folder)


def test_another_tokenizer_is_refused(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][0]["content"] = "<eos>"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is not the tokenizer that the tokens were made with"):
        open_corpus(folder)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: .* put it back, or prepare"):
        open_corpus(folder)


def test_the_layout_of_the_tokenizer_file_does_not_matter(folder):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4, sort_keys=True))
    assert open_corpus(folder).tokenizer().end_of_document == 256


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["tokenizer", "vocab_size"], 300, "has vocab_size 300 and dtype '<u2', expected 257"),
        (["tokenizer", "vocab_size"], "257", "'vocab_size' must be a count; got '257'"),
        (["dtype"], "<i2", "dtype '<i2', expected 257 and '<u2'"),
        (["dtype"], "nonsense", "is damaged: data type 'nonsense'"),
        (["splits", "train", "tokens"], -1, "'tokens' must be a count; got -1"),
        (["splits", "train", "shards"], [{}], "an item of 'shards' has no 'file'"),
        (["splits", "validation"], [], "'validation' must be an object"),
        (["skipped"], None, "'skipped' must be an object; got None"),
        (["held_out"], {}, "'held_out' has no 'why'"),
        (["splits", "train", "shards", 0, "file"], "../a.bin", "'file' must be the name of a file"),
        (
            ["splits", "train", "shards", 0, "file"],
            "/etc/hosts",
            "without a path; got '/etc/hosts'",
        ),
        (["splits", "train", "shards", 0, "file"], "..", "without a path; got '..'"),
        (["skipped", "file"], "sub/skipped.jsonl", "without a path; got 'sub/skipped.jsonl'"),
    ],
)
def test_damaged_manifests(folder, place, value, message):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    *outer, last = place
    inner = content
    for key in outer:
        inner = inner[key]
    inner[last] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        open_corpus(folder)
    assert str(path) in str(error.value)


def test_only_listed_shards_are_read(folder):
    before = open_corpus(folder)
    (folder / "train-99999.bin").write_bytes(b"\1\0" * 100)
    corpus = open_corpus(folder)
    corpus.verify()
    assert corpus.train.tokens == before.train.tokens
    assert not [path for path, _, _ in corpus.files() if "99999" in path.name]


def test_corpora_whose_held_out_tail_has_its_own_shards_still_open(folder):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["held_out"] = {"tokens": content["splits"]["validation"]["tokens"], "why": "a tail"}
    path.write_text(json.dumps(content))
    assert open_corpus(folder).validation.tokens == content["held_out"]["tokens"] > 0


@pytest.mark.parametrize(
    ("start", "tokens", "message"),
    [
        (0, 30, "'held_out' must be a range that ends with the 30 training tokens"),
        (20, 9, "it begins at 20 and has 9"),
        (5, 25, "'held_out' must begin inside the last training document"),
        (-1, 31, "'start' must be a count; got -1"),
    ],
)
def test_damaged_ranges(tmp_path, start, tokens, message):
    write_folder(tmp_path / "in", {"a.txt": "x" * 9, "b.txt": "y" * 19})
    corpus = prepare_corpus([tmp_path / "in"], tmp_path / "out", validation=1e-9)
    assert (corpus.train.ends.tolist(), corpus.validation.tokens) == ([10, 29], 1)
    path = corpus.path / "manifest.json"
    content = json.loads(path.read_text())
    content["held_out"].update(start=start, tokens=tokens)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        open_corpus(corpus.path)
    assert str(path) in str(error.value)


def test_manifests_that_are_not_ours(folder, tmp_path):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format_version": 99}))
    with pytest.raises(
        ValueError, match="version 99; this library reads 'trellis-corpus', version 1"
    ):
        open_corpus(folder)
    path.write_text(json.dumps({k: v for k, v in content.items() if k != "splits"}))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: the file has no 'splits'"):
        open_corpus(folder)
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a manifest of a corpus"):
            open_corpus(folder)
    content["splits"]["train"]["tokens"] += 5
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="ends at token"):
        open_corpus(folder)
    with pytest.raises(FileNotFoundError, match="is not a corpus: there is no manifest"):
        open_corpus(tmp_path / "nothing")


def test_no_corpus_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"\. is not a corpus: there is no manifest"):
        open_corpus(".")
    (tmp_path / "c.partial").mkdir()
    with pytest.raises(FileNotFoundError, match="make a corpus"):  # the folder is not ours
        open_corpus("c")
    (tmp_path / "c.partial" / "progress.json").write_text("{}")
    for name in ("c", "c.partial"):
        with pytest.raises(FileNotFoundError, match=r"c\.partial is unfinished"):
            open_corpus(name)
