"""Preparing is atomic, resumable to the byte, and refuses what would overwrite or mix."""

import json
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import content, documents, skips, texts_of, write_folder, write_jsonl, write_tar

from trellis.data import documents as reading
from trellis.data import open_corpus, prepare, prepare_corpus, train_tokenizer
from trellis.data.prepare import in_validation, prefetched
from trellis.data.resume import ResumeState, SplitWriter
from trellis.data.shuffle import mix
from trellis.data.tokenizer import TextTokenizer, load_tokenizer


@pytest.fixture
def sources(tmp_path):
    """A folder, jsonl with bad lines and an archive: each batch ends somewhere else."""
    texts = {f"{i:02d}.txt": f"document {i}\n" * (i + 1) for i in range(20)}
    folder = write_folder(tmp_path / "in", {**texts, "bad.txt": b"\xff", "no.bin": b"x"})
    rows = [{"text": f"row {i} é"} if i % 5 else b"{" for i in range(40)]
    jsonl = write_jsonl(tmp_path / "rows.jsonl", rows)
    return [folder, jsonl, write_tar(tmp_path / "t.tar.gz", folder, "w:gz")]


OPTIONS = {"validation": 0.2, "shard_tokens": 700, "checkpoint_seconds": 0}


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_BYTES", 300)
    monkeypatch.setattr(reading, "LONG", 150)
    monkeypatch.setattr(reading, "STREAM_PIECE", 60)


class Stop(Exception):
    pass


def interrupted(sources, out, after, **options):
    """Runs until `after` batches were written; False if it came to its end."""
    seen = 0

    def progress(_):
        nonlocal seen
        seen += 1
        if seen > after:
            raise Stop

    try:
        prepare_corpus(sources, out, **{**OPTIONS, **options}, progress=progress)
    except Stop:
        return True
    return False


def test_batches_and_shards_do_not_change_the_tokens(sources, tmp_path, monkeypatch):
    whole = texts_of(sources, tmp_path / "whole")
    monkeypatch.setattr(prepare, "BATCH_BYTES", 100)
    assert texts_of(sources, tmp_path / "small", shard_tokens=100) == whole
    assert len(whole) == 20 + 32 + 20


@pytest.mark.parametrize(
    ("tokenizer", "max_documents"), [("bytes", None), ("bpe", None), ("bytes", 30), ("bytes", 31)]
)
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    sources, tmp_path, small_batches, tokenizer, max_documents
):
    if tokenizer == "bpe":
        train_tokenizer(sources, 280, tmp_path / "bpe")
        tokenizer = str(tmp_path / "bpe")
    options = {"tokenizer": tokenizer, "max_documents": max_documents}
    prepare_corpus(sources, tmp_path / "one", **OPTIONS, **options)
    times = 0
    while interrupted(sources, tmp_path / "two", times % 2, **options):
        times += 1
        assert not (tmp_path / "two").exists()
        assert (tmp_path / "two.partial").is_dir()
        with pytest.raises(FileNotFoundError, match=r"two\.partial is unfinished"):
            open_corpus(tmp_path / "two")
        # What was written after the last record is dropped.
        for path in (tmp_path / "two.partial").glob("*.bin"):
            if path.name.endswith("documents.bin") or path.stat().st_size < 700 * 2:
                with path.open("ab") as file:
                    file.write(b"written but not recorded")
    assert times > 4
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert not (tmp_path / "two.partial").exists()
    open_corpus(tmp_path / "two").verify()


KILLED = """
import os, signal, sys
from trellis.data import documents, prepare, prepare_corpus
prepare.BATCH_BYTES, documents.LONG, documents.STREAM_PIECE = 300, 150, 60
out, *sources = sys.argv[1:]
left = 5
def progress(_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
prepare_corpus(sources, out, validation=0.2, shard_tokens=700, checkpoint_seconds=0,
               progress=progress)
"""


def test_a_killed_run_goes_on_to_the_same_bytes(sources, tmp_path, small_batches):
    prepare_corpus(sources, tmp_path / "one", **OPTIONS)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "two"), *map(str, sources)]
    for _ in range(2):
        assert subprocess.run(command).returncode == -signal.SIGKILL
    assert (tmp_path / "two.partial" / "progress.json").exists()
    prepare_corpus(sources, tmp_path / "two", **OPTIONS)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_a_run_stopped_with_enough_documents_writes_none_again(tmp_path, small_batches):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"document {i}"} for i in range(20)])

    def stop(progress):
        if progress.documents >= 5:
            raise Stop

    options = {"validation": 0, "max_documents": 5, "checkpoint_seconds": 0}
    with pytest.raises(Stop):
        prepare_corpus([rows], tmp_path / "out", **options, progress=stop)
    assert texts_of([rows], tmp_path / "out", **options) == [f"document {i}" for i in range(5)]


def test_finished_units_are_not_opened_again(sources, tmp_path, small_batches, monkeypatch):
    assert interrupted(sources, tmp_path / "out", 12)
    read = []
    real = prepare.read_unit
    monkeypatch.setattr(
        prepare, "read_unit", lambda unit, *rest: read.append(unit.name) or real(unit, *rest)
    )
    prepare_corpus(sources, tmp_path / "out", **OPTIONS)
    assert str(sources[0] / "00.txt") not in read
    assert str(sources[2]) in read


@pytest.mark.parametrize(
    ("owner", "method", "due"),
    [
        (prepare, "write_manifest", 1),
        (prepare, "range_to_hold_out", 1),
        (ResumeState, "save", 3),  # the record after the last document
        (SplitWriter, "finish", 2),  # that of the validation split
    ],
)
def test_an_interruption_at_the_very_end(tmp_path, monkeypatch, owner, method, due):
    """While the end of the only document is held out for the validation split."""
    source = tmp_path / "a.txt"
    source.write_text("Only one document, é, with some words in it.\n" * 50)
    options = {"validation": 0.3, "shard_tokens": 500, "checkpoint_seconds": 0}
    prepare_corpus([source], tmp_path / "one", **options)

    real = getattr(owner, method)
    calls = 0

    def sometimes(*arguments):
        nonlocal calls
        calls += 1
        if calls == due:
            raise Stop
        return real(*arguments)

    monkeypatch.setattr(owner, method, sometimes)
    with pytest.raises(Stop):
        prepare_corpus([source], tmp_path / "two", **options)
    prepare_corpus([source], tmp_path / "two", **options)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_the_tail_of_a_single_document_is_held_out(tmp_path):
    text = "日本語 and words.\n" * 400
    (tmp_path / "a.txt").write_text(text)
    corpus = prepare_corpus(
        [tmp_path / "a.txt"], tmp_path / "out", validation=0.1, shard_tokens=999
    )
    train, validation = documents(corpus)
    assert train + validation == text
    assert "\ufffd" not in validation
    assert (corpus.train.documents, corpus.validation.documents) == (1, 1)
    assert corpus.train.bytes + corpus.validation.bytes == len(text.encode())
    assert corpus.validation.bytes == len(validation.encode())
    assert abs(corpus.validation.tokens / corpus.train.tokens - 1 / 9) < 0.01
    assert "end of the last training document" in corpus.manifest["held_out"]["why"]
    shards = sorted(corpus.path.glob("train-0*.bin"))
    whole = np.concatenate([np.fromfile(path, "<u2") for path in shards])
    assert corpus.manifest["splits"]["validation"]["shards"] == []
    start = corpus.manifest["held_out"]["start"]
    assert np.array_equal(corpus.train.read(0, start), whole[:start])
    assert np.array_equal(corpus.validation.read(0, corpus.validation.tokens), whole[start:])
    assert corpus.train.ends.tolist() == [start] == [corpus.train.tokens]
    assert corpus.validation.ends.tolist() == [len(whole) - start]
    again = pickle.loads(pickle.dumps(corpus))
    assert documents(again) == [train, validation]
    corpus.verify()


def test_without_validation_there_is_none(sources, tmp_path):
    corpus = prepare_corpus(sources, tmp_path / "out", validation=0)
    assert (corpus.validation.tokens, corpus.validation.documents) == (0, 0)
    assert corpus.validation.read(0, 0).shape == corpus.validation.ends.shape == (0,)
    assert corpus.manifest["held_out"] is None


@given(seed=st.integers(0, 2**32), share=st.floats(0, 0.5))
def test_the_split_is_by_document_and_seeded(tmp_path_factory, seed, share):
    folder = tmp_path_factory.mktemp("split")
    rows = write_jsonl(folder / "r.jsonl", [{"text": f"document {i}"} for i in range(60)])
    corpus = prepare_corpus([rows], folder / "out", validation=share, seed=seed)
    chosen = [i for i in range(60) if in_validation(seed, i, share)]
    if chosen:
        others = [i for i in range(60) if i not in chosen]
        assert documents(corpus) == [f"document {i}" for i in others + chosen]
        for stream in (corpus.train, corpus.validation):
            assert int(stream.ends[-1]) == stream.tokens
            assert stream.bytes + stream.documents == stream.tokens  # bytes and one end each
    else:
        assert (corpus.train.documents, len(documents(corpus))) == (60, 60 + (share > 0))


def test_the_split_never_changes():
    assert mix(0) == 0xE220A8397B1DCDAF  # the published sequence of seed 0
    assert [i for i in range(300) if in_validation(7, i, 0.02)] == SPLIT_OF_SEED_7
    share = np.mean([in_validation(1, i, 0.25) for i in range(20_000)])
    assert abs(share - 0.25) < 0.01


SPLIT_OF_SEED_7 = [88, 152, 188, 203, 276]


def test_an_existing_output_is_refused_before_anything_is_read(sources, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out exists and is not overwritten: give --out"):
        prepare_corpus([tmp_path / "nothing"], tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_an_output_that_cannot_be_written(sources, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written"):
        prepare_corpus(sources, tmp_path / "file" / "out")


def test_a_folder_without_permission(sources, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(PermissionError, match="cannot be written"):
        prepare_corpus(sources, folder / "out")


def test_an_unfinished_run_is_not_continued_with_other_arguments(sources, tmp_path, small_batches):
    out = tmp_path / "out"
    assert interrupted(sources, out, 3)
    before = content(tmp_path / "out.partial")
    with pytest.raises(ValueError, match=r"validation: 0\.2 then, 0\.1 now") as error:
        prepare_corpus(sources, out, **{**OPTIONS, "validation": 0.1})
    assert f"remove {out}.partial to start anew" in str(error.value)
    assert "seed" not in str(error.value)
    with pytest.raises(ValueError, match="sources: "):
        prepare_corpus(sources[:2], out, **OPTIONS)
    train_tokenizer(sources, 280, tmp_path / "bpe")
    with pytest.raises(ValueError, match=r"tokenizer: \{'name': 'bytes'"):
        prepare_corpus(sources, out, tokenizer=tmp_path / "bpe", **OPTIONS)
    (sources[0] / "00.txt").write_text("changed meanwhile")
    with pytest.raises(ValueError, match=r"units: \{'count': 23"):
        prepare_corpus(sources, out, **OPTIONS)
    assert content(tmp_path / "out.partial") == before


def test_a_damaged_unfinished_run_is_not_continued(sources, tmp_path, small_batches):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    assert interrupted(sources, out, 8)
    shards = sorted(partial.glob("train-0*.bin"))
    shards[0].write_bytes(b"")
    with pytest.raises(ValueError, match=r"train-00000\.bin was changed: remove .*out\.partial"):
        prepare_corpus(sources, out, **OPTIONS)
    (partial / "progress.json").write_text("{")
    with pytest.raises(ValueError, match=r"progress\.json is damaged"):
        prepare_corpus(sources, out, **OPTIONS)
    (partial / "progress.json").unlink()
    with pytest.raises(FileExistsError, match=r"no unfinished run \(it has no progress\.json\)"):
        prepare_corpus(sources, out, **OPTIONS)


@pytest.mark.parametrize("change", [
    {"unit": None}, {"unit": "3"}, {"arguments": 5}, {"skipped_size": -8},
    {"splits": {"train": {"tokens": 3}}}, {"splits": []}, {"skipped": 1}, {"complete": 0},
])  # fmt: skip
def test_a_damaged_record(sources, tmp_path, small_batches, change):
    out, path = tmp_path / "out", tmp_path / "out.partial" / "progress.json"
    assert interrupted(sources, out, 8)
    state = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))
    with pytest.raises(ValueError, match=r"progress\.json is damaged .* remove .*out\.partial to"):
        prepare_corpus(sources, out, **OPTIONS)


def test_a_truncated_file_of_an_unfinished_run(sources, tmp_path, small_batches):
    assert interrupted(sources, tmp_path / "out", 8)
    (tmp_path / "out.partial" / "train-documents.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has 0 bytes, expected at least .* cannot be continued"):
        prepare_corpus(sources, tmp_path / "out", **OPTIONS)


def test_two_runs_do_not_write_the_same_output(sources, tmp_path):
    pytest.importorskip("fcntl", reason="locks need a POSIX system")
    message = r"another run is writing .*out\.partial"

    def second(_):
        with pytest.raises(ValueError, match=message):
            prepare_corpus(sources, tmp_path / "out")

    prepare_corpus(sources, tmp_path / "out", progress=second)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("validation", 1.0, "validation must be at least 0 and less than 1; got 1.0"),
        ("validation", float("nan"), "validation must be"),
        ("shard_tokens", 0, "shard_tokens must be at least 1; got 0"),
        ("max_documents", 0, "max_documents must be at least 1; got 0"),
    ],
)
def test_arguments_out_of_range(sources, tmp_path, name, value, message):
    with pytest.raises(ValueError, match=message):
        prepare_corpus(sources, tmp_path / "out", **{name: value})


@pytest.mark.parametrize("files", [{"notes.txt": "mine"}, {"tokenizer.json": "mine"}])
def test_a_folder_of_the_user_is_left_alone(sources, tmp_path, files):
    write_folder(tmp_path / "out.partial", files)
    (tmp_path / "empty").mkdir()
    before = content(tmp_path / "out.partial")
    for some in (sources, [tmp_path / "empty"]):
        with pytest.raises(FileExistsError, match=r"out\.partial exists and is no unfinished run"):
            prepare_corpus(some, tmp_path / "out")
        assert content(tmp_path / "out.partial") == before


def test_a_file_where_the_output_grows(sources, tmp_path):
    (tmp_path / "out.partial").write_text("mine")
    with pytest.raises(OSError, match=r"out\.partial, where .*out grows, cannot be written: Not a"):
        prepare_corpus(sources, tmp_path / "out")
    assert (tmp_path / "out.partial").read_text() == "mine"


@pytest.mark.parametrize(
    ("owner", "method"), [(TextTokenizer, "save"), (ResumeState, "load"), (ResumeState, "save")]
)
def test_a_failure_at_the_very_beginning_leaves_nothing(
    sources, tmp_path, monkeypatch, owner, method
):
    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail)
        with pytest.raises(OSError, match="No space left"):
            prepare_corpus(sources, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    prepare_corpus(sources, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "left"), [("train-00000.bin", 1), ("skipped.jsonl", 3), ("progress.json", 3)]
)
def test_a_full_disk_is_named_with_its_file_and_the_run_goes_on(
    sources, tmp_path, small_batches, monkeypatch, name, left
):
    prepare_corpus(sources, tmp_path / "one", **OPTIONS)
    real = os.fsync

    def full(handle):
        nonlocal left
        paths = (tmp_path / "two.partial").glob(f"*{name}*")
        left -= any(os.path.samestat(os.fstat(handle), path.stat()) for path in paths)
        if left < 0:
            raise OSError(28, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        message = rf"No space left on device to write .*/two\.partial/{name}: make room, then run"
        with pytest.raises(OSError, match=message) as error:
            prepare_corpus(sources, tmp_path / "two", **OPTIONS)
    assert error.value.errno == 28
    prepare_corpus(sources, tmp_path / "two", **OPTIONS)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_a_run_killed_before_its_first_record_is_begun_again(sources, tmp_path):
    write_folder(tmp_path / "out.partial", {".progress.json.x1": "{"})
    prepare_corpus(sources, tmp_path / "out")
    prepare_corpus(sources, tmp_path / "two")
    assert content(tmp_path / "out") == content(tmp_path / "two")


def test_a_tokenizer_that_was_lost_is_written_again(sources, tmp_path, small_batches):
    assert interrupted(sources, tmp_path / "out", 8)
    (tmp_path / "out.partial" / "tokenizer.json").write_text("{")
    prepare_corpus(sources, tmp_path / "out", **OPTIONS).verify()


def test_a_broken_corpus_is_not_put_into_place(sources, tmp_path, monkeypatch):
    real = prepare._Run.finish

    def finish(self):
        real(self)
        (self.folder / "train-00000.bin").unlink()

    monkeypatch.setattr(prepare._Run, "finish", finish)
    with pytest.raises(FileNotFoundError, match=r"out\.partial/train-00000\.bin is missing"):
        prepare_corpus(sources, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX only")
def test_file_names_that_are_not_utf8(tmp_path):
    folder = os.fsencode(write_folder(tmp_path / "in", {"a.txt": "text"}))
    for name in (b"x.\xff", b"\xff.txt", b"bad\xff.txt"):
        with open(folder + b"/" + name, "wb") as file:
            file.write(b"\xff" if name.startswith(b"bad") else b"more text")
    named = os.fsdecode(folder + b"/\xff.txt")
    corpus = prepare_corpus([tmp_path / "in", named], tmp_path / "out", validation=0)
    assert documents(corpus) == ["text", "more text", "more text"]
    assert corpus.manifest["sources"][1]["source"] == named
    assert corpus.manifest["ignored"] == {".\udcff": 1}
    assert list(skips(corpus)) == [os.fsdecode(folder + b"/bad\xff.txt")]


def test_a_large_vocabulary_has_wider_ids(sources, tmp_path):
    tokenizer = load_tokenizer("bytes").json
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][0], "id": 70_000, "content": "far"}
    )
    tokenizer["model"]["vocab"].update({f"unused{i}": i for i in range(257, 70_000)})
    wide = tmp_path / "wide.json"
    wide.write_text(json.dumps(tokenizer))
    corpus = prepare_corpus(sources, tmp_path / "out", tokenizer=wide)
    assert corpus.manifest["dtype"] == "<u4"
    assert sorted(documents(corpus)) == sorted(texts_of(sources, tmp_path / "bytes"))


def test_prefetching_ends_its_thread_and_passes_errors_on():
    closed = []

    def numbers():
        try:
            yield from range(1000)
        finally:
            closed.append(True)

    ahead = prefetched(numbers(), 2)
    assert next(iter(ahead)) == 0
    ahead.close()
    assert closed == [True]

    def failing():
        yield 1
        raise Stop

    ahead = prefetched(failing(), 2)
    with pytest.raises(Stop):
        list(ahead)
    ahead.close()


def test_progress_is_reported(sources, tmp_path):
    seen = []
    corpus = prepare_corpus(
        sources, tmp_path / "out", progress=lambda p: seen.append((p.documents, p.tokens))
    )
    assert seen[-1] == (72, corpus.train.tokens + corpus.validation.tokens)
