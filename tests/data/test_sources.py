"""Every form of a source gives the same documents; what cannot be read is named."""

import bz2
import gzip
import importlib
import json
import lzma
import os
import shutil
import sys
import sysconfig
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from tests.support import TEXTS, documents, skips, texts_of, write_folder, write_jsonl, write_tar

from trellis.data import documents as reading
from trellis.data import prepare_corpus
from trellis.data import sources as listing
from trellis.data.sources import kinds, list_sources, parse_hub, whole_texts

ALL = list(TEXTS.values())


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "in")


def compress(path, name):
    data = path.read_bytes()
    if name == "zst":
        zstandard = pytest.importorskip("zstandard", reason="the data extra is not installed")
        packed = zstandard.ZstdCompressor().compress(data[:10])
        packed += zstandard.ZstdCompressor().compress(data[10:])  # two frames
    else:
        packed = {"gz": gzip, "xz": lzma, "bz2": bz2}[name].compress(data)
    out = path.with_name(f"{path.name}.{name}")
    out.write_bytes(packed)
    return out


def test_a_folder(folder, tmp_path):
    assert texts_of([folder], tmp_path / "out") == ALL


def test_files_in_the_order_they_are_named(folder, tmp_path):
    names = ["sub/d.txt", "a.txt"]
    assert texts_of([folder / n for n in names], tmp_path / "out") == [TEXTS[n] for n in names]


@pytest.mark.parametrize("form", ["gz", "xz", "bz2", "zst"])
def test_compressed_forms(folder, tmp_path, form):
    for name in TEXTS:
        path = folder / name
        compress(path, form)
        path.unlink()
    jsonl = compress(write_jsonl(tmp_path / "rows.jsonl", [{"text": t} for t in ALL]), form)
    tar = compress(write_tar(tmp_path / "all.tar", write_folder(tmp_path / "plain")), form)
    short = {"gz": ".tgz", "xz": ".txz", "bz2": ".tbz2", "zst": ".tzst"}[form]
    shutil.copy(tar, tmp_path / f"all{short}")
    sources = [folder, jsonl, tar, tmp_path / f"all{short}"]
    assert texts_of(sources, tmp_path / "out") == ALL * 4


def test_a_tar_of_compressed_files_and_jsonl(folder, tmp_path):
    compress(folder / "b.md", "gz")
    (folder / "b.md").unlink()
    write_jsonl(folder / "e.jsonl", [{"text": "in jsonl"}])
    write_folder(folder, {"picture.png": b"\x89PNG", ".git/config.txt": "x", "LICENSE": "text"})
    corpus = prepare_corpus(
        [write_tar(tmp_path / "t.tgz", folder, "w:gz")], tmp_path / "out", validation=0
    )
    assert sorted(documents(corpus)) == sorted([*ALL, "in jsonl"])
    assert corpus.manifest["ignored"] == {"(hidden)": 1, "(no suffix)": 1, ".png": 1}


def test_a_named_file_is_text_whatever_its_suffix(tmp_path):
    (tmp_path / "LICENSE").write_text("permission")
    (tmp_path / "notes.xyz").write_text("notes")
    sources = [tmp_path / "LICENSE", tmp_path / "notes.xyz"]
    assert texts_of(sources, tmp_path / "out") == ["permission", "notes"]


def test_a_folder_leaves_out_what_is_hidden_or_no_text(folder, tmp_path):
    write_folder(
        folder,
        {".git/a.txt": "x", "__pycache__/b.py": "x", "p.png": b"\x89", "q.png": b"", ".env": "x"},
    )
    corpus = prepare_corpus([folder], tmp_path / "out", validation=0)
    assert documents(corpus) == ALL
    assert corpus.manifest["ignored"] == {"(hidden)": 3, ".png": 2}


def test_links_to_folders_are_counted_and_links_of_archives_are_named(folder, tmp_path):
    write_folder(tmp_path / "other")
    os.symlink(tmp_path / "other", folder / "linked")
    os.symlink(folder, folder / "loop")
    corpus = prepare_corpus([folder], tmp_path / "out", validation=0)
    assert documents(corpus) == ALL
    assert corpus.manifest["ignored"] == {"(link)": 2}
    os.link(folder / "a.txt", folder / "z.txt")
    os.mkfifo(folder / "pipe.txt")
    tar = write_tar(tmp_path / "t.tar", folder)
    device = tarfile.TarInfo("tty.txt")
    device.type = tarfile.CHRTYPE
    with tarfile.open(tar, "a") as archive:
        archive.addfile(device)
    corpus = prepare_corpus([tar], tmp_path / "two", validation=0)
    assert sorted(documents(corpus)) == sorted(ALL)
    assert corpus.manifest["ignored"] == {}
    assert corpus.manifest["skipped"]["reasons"] == {"not a regular file": 5}
    assert skips(corpus) == {
        f"{tar}:linked": f"not a regular file: symbolic link to {tmp_path / 'other'}",
        f"{tar}:loop": f"not a regular file: symbolic link to {folder}",
        f"{tar}:pipe.txt": "not a regular file: FIFO",
        f"{tar}:tty.txt": "not a regular file: device",
        f"{tar}:z.txt": "not a regular file: hard link to a.txt",
    }
    assert sorted(whole_texts([tar])) == sorted(ALL)  # what reads whole texts leaves them out


def test_a_corpus_in_a_folder_is_no_text(folder, tmp_path):
    prepare_corpus([folder], folder / "finished", validation=0)

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus([folder], folder / "begun", progress=stop, checkpoint_seconds=0)
    write_folder(folder, {"theirs/manifest.json": '{"text": "of another program"}'})
    corpus = prepare_corpus([folder], tmp_path / "out", validation=0)
    assert sorted(documents(corpus)) == sorted([*ALL, "of another program"])
    assert corpus.manifest["ignored"] == {"(corpus)": 2}
    with pytest.raises(ValueError, match=r"no document was found in .*\n  ignored 1 \(corpus\)"):
        prepare_corpus([tmp_path / "out"], tmp_path / "two")


def test_json_is_read_if_it_is_one_object_in_each_line(tmp_path):
    rows = [b"", *({"text": text} for text in ALL), b"{"]
    for name in ("lines.json", "sub/lines.json"):
        write_folder(tmp_path / "in", {name: ""})
        path = write_jsonl(tmp_path / "in" / name, rows)
    compress(path, "gz")
    no = {"pretty.json": '{\n"text": "x"\n}', "list.json": '[{"text": "x"}]', "text.json": "text",
          "binary.json": b"\xff\0", "nested.json": "[" * 100_000}  # fmt: skip
    write_folder(tmp_path / "no", no)
    sources = [tmp_path / "in", path, tmp_path / "no", *(tmp_path / "no" / name for name in no)]
    sources.append(write_tar(tmp_path / "t.tar", tmp_path / "in"))
    corpus = prepare_corpus(sources, tmp_path / "out", validation=0)
    assert documents(corpus) == ALL * 7
    assert corpus.manifest["skipped"]["reasons"] == {"bad JSON": 7, "not JSON lines": 10}
    reason = skips(corpus)[str(tmp_path / "no" / "pretty.json")]
    assert reason == "not JSON lines: the first line is not an object by itself"


def test_the_output_may_lie_in_the_source(folder):
    write_jsonl(folder / "rows.jsonl", [{"no": 1}])  # so that skipped.jsonl has a line
    assert sorted(texts_of([folder], folder / "out")) == sorted(ALL)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "row"}\n')
    sources = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    assert texts_of(sources, tmp_path / "out") == ["text", "row"]


def test_unreadable_files_are_skipped_and_named(folder, tmp_path):
    write_folder(
        folder,
        {"latin.txt": b"caf\xe9", "nul.txt": b"a\0b", "empty.txt": b" \n",
         "broken.txt.gz": gzip.compress(b"text" * 100)[:-20], "not.txt.xz": b"no xz",
         "broken.tar": b"x" * 2000},
    )  # fmt: skip
    os.symlink(folder / "nowhere", folder / "link.txt")
    corpus = prepare_corpus([folder], tmp_path / "out", validation=0)
    assert documents(corpus) == ALL
    found = {os.path.basename(name): reason for name, reason in skips(corpus).items()}
    assert found["latin.txt"] == "not UTF-8: unexpected end of data at byte 3"
    assert found["nul.txt"] == "binary (NUL bytes)"
    assert found["empty.txt"] == "empty"
    assert found["broken.txt.gz"].startswith("unreadable: Compressed file ended")
    assert found["not.txt.xz"].startswith("unreadable: ")
    assert found["broken.tar"].endswith("the archive ends after 0 members")
    assert found["link.txt"] == "unreadable: No such file or directory"
    assert corpus.manifest["skipped"]["reasons"] == {
        "binary (NUL bytes)": 1, "empty": 1, "not UTF-8": 1, "unreadable": 4,
    }  # fmt: skip


def test_a_truncated_archive_gives_what_it_has(folder, tmp_path):
    tar = write_tar(tmp_path / "t.tar", folder)
    size = tar.read_bytes().index(b"berschrift")
    tar.write_bytes(tar.read_bytes()[:size])  # in the middle of the second file
    corpus = prepare_corpus([tar], tmp_path / "out", validation=0)
    assert documents(corpus) == ALL[:1]
    assert "unexpected end of data" in skips(corpus)[f"{tar}:b.md"]


def test_truncated_zstd_is_not_taken_for_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(os.urandom(50_000).hex().encode())
    packed = compress(path, "zst")
    packed.write_bytes(packed.read_bytes()[:-1000])
    (tmp_path / "bad.txt.zst").write_bytes(b"this is not zstd at all")
    sources = [tmp_path / "bad.txt.zst", packed, path]
    corpus = prepare_corpus(sources, tmp_path / "out", validation=0)
    assert corpus.train.documents == 1
    bad, truncated = skips(corpus).values()
    assert bad.startswith("unreadable: not valid zstd")
    assert "ended before the end of its zstd frame" in truncated


def test_bad_lines_of_jsonl_are_named_with_their_line(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONG", 500)
    rows = [{"text": "good"}, b"{bad", {"other": 1}, {"text": 5}, b"[1]", b"", b'{"text": "\xff"}',
            {"text": ""}, b'{"text": "\\ud800"}', {"text": "x" * 600}, b"[" * 400,
            {"text": "last"}]  # fmt: skip
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    corpus = prepare_corpus([path], tmp_path / "out", validation=0)
    assert documents(corpus) == ["good", "last"]
    found = {name.rpartition(":")[2]: reason for name, reason in skips(corpus).items()}
    assert found["2"].startswith("bad JSON: Expecting property name")
    assert found["3"] == "no text: no field 'text'"
    assert found["4"] == "no text: field 'text' is a int, not a string"
    assert found["5"] == "no text: the line is a list, not an object"
    assert found["7"].startswith("not UTF-8: invalid start byte")
    assert found["8"] == "empty"
    assert found["9"].startswith("not UTF-8: surrogates not allowed")
    assert found["10"] == "bad JSON: the line is longer than 500 bytes"
    assert found["11"].startswith("bad JSON")
    assert "6" not in found  # a blank line is nothing
    assert all(name.startswith(str(path)) for name in skips(corpus))


def test_the_text_field_can_be_chosen(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"content": "here"}])
    assert texts_of([path], tmp_path / "out", text_field="content") == ["here"]


@pytest.mark.parametrize("bad", [b"", b"\xff", b"\0"])
def test_long_texts_are_streamed_and_end_where_they_break(tmp_path, monkeypatch, bad):
    monkeypatch.setattr(reading, "LONG", 1000)
    monkeypatch.setattr(reading, "STREAM_PIECE", 300)
    text = "Überall sind wörter,\nand some é more.\n" * 100
    path = tmp_path / "long.txt"
    path.write_bytes(text.encode() + bad + (b"rest" if bad else b""))
    pieces = [e for e in reading.read_text(path.open("rb"), "n") if isinstance(e, reading.Piece)]
    assert len(pieces) > 10
    assert max(p.size for p in pieces) < 500
    corpus = prepare_corpus([path], tmp_path / "out", validation=0)
    assert documents(corpus) == [text]
    assert corpus.train.bytes == len(text.encode())
    expected = {b"\xff": "not UTF-8: invalid start byte", b"\0": "binary (NUL bytes):"}.get(bad)
    reasons = list(skips(corpus).values())
    if expected is None:
        assert reasons == []
    else:
        assert reasons[0].startswith(expected)
        assert reasons[0].endswith(f"at byte {len(text.encode())}; the document ends there")


def test_a_long_text_that_breaks_at_once_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONG", 1000)
    (tmp_path / "long.txt").write_bytes(b"a\xff" + b"b" * 5000)
    events = list(reading.read_text((tmp_path / "long.txt").open("rb"), "n"))
    assert [e.reason for e in events] == ["not UTF-8: invalid start byte at byte 1"]


def test_the_standard_library_is_the_same_every_time(tmp_path, monkeypatch):
    files = listing.stdlib_files(Path(sysconfig.get_path("stdlib")))
    assert "argparse.py" in files
    assert "json/decoder.py" in files
    assert not [f for f in files if "/test/" in f or "site-packages" in f or "cp1252" in f]
    first = list(listing.stdlib_documentation())
    assert list(listing.stdlib_documentation()) == first
    texts = {e.name: e.text for e in first if isinstance(e, reading.Piece)}
    assert "Boolean operations" in texts["stdlib:topic/booleans"]
    monkeypatch.setattr(listing, "stdlib_files", lambda _: files[:3])
    corpus = prepare_corpus(["stdlib"], tmp_path / "out")
    assert corpus.manifest["sources"][0]["python"] == sys.version.split()[0]


def test_a_dataset_of_the_hub(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="the data extra is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"text": t, "n": 1} for t in ALL])
    assert texts_of([f"hub:{folder}"], tmp_path / "out") == ALL
    assert texts_of([f"hub:{folder}@train"], tmp_path / "two", max_documents=2) == ALL[:2]
    with pytest.raises(ValueError, match=r"no field 'body' but 'text', 'n'; choose one"):
        prepare_corpus([f"hub:{folder}"], tmp_path / "three", text_field="body")
    with pytest.raises(ValueError, match=r"source 'hub:.*' failed after row 0"):
        prepare_corpus([f"hub:{folder}@nothing"], tmp_path / "three")
    assert not list(tmp_path.glob("three*"))


@pytest.mark.parametrize("place", ["absolute", "above", "link", "file"])
def test_a_dataset_reads_no_local_file_outside_its_folder(tmp_path, monkeypatch, place):
    """A dataset's card may name any file."""
    pytest.importorskip("datasets", reason="the data extra is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    secret = write_jsonl(tmp_path / "secret.jsonl", [{"text": "secret"}])
    folder = write_folder(tmp_path / "rows", {})
    named = {"absolute": str(secret), "above": "../secret.jsonl", "file": f"file://{secret}"}
    os.symlink(secret, folder / "link.jsonl")
    files = named.get(place, "link.jsonl")
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\n"
    (folder / "README.md").write_text(card)
    with pytest.raises(ValueError, match=rf"would read {secret}, a file .* not in the folder"):
        prepare_corpus([f"hub:{folder}"], tmp_path / "out")


def test_names_of_the_hub_never_stand_for_the_current_folder(tmp_path, monkeypatch):
    """The library takes `json` for all JSON files of the current folder."""
    pytest.importorskip("datasets", reason="the data extra is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", [{"text": "mine"}])
    with pytest.raises(
        ValueError, match=r"would read .*, a file of this machine that is not on the hub"
    ):
        prepare_corpus(["hub:json"], tmp_path / "out")


def test_names_of_datasets():
    assert parse_hub("hub:allenai/c4:en@validation") == ("allenai/c4", "en", "validation")
    assert parse_hub("hub:pg19") == ("pg19", None, "train")
    with pytest.raises(ValueError, match="must be hub:<dataset>"):
        parse_hub("hub:")


@pytest.mark.parametrize(
    ("module", "source"), [("datasets", "hub:pg19"), ("zstandard", "a.txt.zst")]
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, module, source):
    real = importlib.import_module

    def without(name, *rest):
        if name == module:
            raise ModuleNotFoundError(name, name=name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt.zst").write_bytes(b"")
    message = rf"needs {module}: pip install 'trellis-memory\[data\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        prepare_corpus([source], tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_sources_that_do_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing' does not exist"):
        list_sources([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="no source was given"):
        list_sources([])


def test_only_the_most_frequent_kinds_are_named():
    ignored = Counter({f".{i:02d}": i for i in range(1, 14)})
    assert kinds(ignored).startswith("13 .13, 12 .12, ")
    assert kinds(ignored).endswith(", 4 .04, 6 others")
    assert kinds(Counter({".png": 1000, ".\udcff": 1})) == r"1,000 .png, 1 .\udcff"


def test_nothing_to_read_is_an_error_that_says_why(tmp_path):
    folder = write_folder(tmp_path / "in", {"a.txt": b"\0\1", "b.png": b"x"})
    with pytest.raises(ValueError, match="no document was found") as error:
        prepare_corpus([folder], tmp_path / "out")
    assert "a.txt: binary (NUL bytes)" in str(error.value)
    assert "ignored 1 .png" in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no document was found"):
        prepare_corpus([tmp_path / "empty"], tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    rows = [json.dumps({"a": i}).encode() for i in range(20)]
    with pytest.raises(ValueError, match="and 15 more"):
        prepare_corpus([write_jsonl(tmp_path / "r.jsonl", rows)], tmp_path / "out")
