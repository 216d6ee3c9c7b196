"""`trellis data`, through the command line."""

import json
import os
import subprocess
import sys

import pytest
from tests.support import write_folder, write_jsonl

pytest.importorskip("typer", reason="the command needs typer")

from typer.testing import CliRunner

from trellis import data
from trellis.cli.data import app


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_from_text_to_a_verified_corpus(tmp_path):
    folder = write_folder(tmp_path / "in", {f"{i}.txt": "some words " * 50 for i in range(30)})
    write_jsonl(folder / "bad.jsonl", [b"{"] * 8)
    write_folder(folder, {"x.png": b"x"})
    result = run("tokenizer", folder, "--vocab-size", 300, "--out", tmp_path / "tok")
    assert result.exit_code == 0, result.output
    assert "the text gave" in result.output  # it is too short for 300
    assert "8 inputs were skipped" in result.output
    assert "ignored files, by suffix: 1 .png" in result.output
    out = tmp_path / "out"
    result = run("prepare", folder, "--tokenizer", tmp_path / "tok", "--out", out,
                 "--validation", 0.2)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "bad.jsonl:5: bad JSON" in result.output
    assert "bad.jsonl:6: bad JSON" not in result.output
    assert "8 inputs were skipped; all are named in" in result.output
    assert "ignored files, by suffix: 1 .png" in result.output
    assert f"written to {out}" in result.output
    result = run("info", out)
    assert result.exit_code == 0, result.output
    assert "skipped: 8 bad JSON" in result.output
    assert "ignored: 1 .png" in result.output
    manifest = json.loads((out / "manifest.json").read_text())
    assert f"{manifest['splits']['train']['tokens']:,}" in result.output
    result = run("verify", out)
    assert result.exit_code == 0, result.output
    assert "is intact" in result.output


def test_errors_come_through(tmp_path):
    source = write_folder(tmp_path / "in") / "a.txt"
    assert run("prepare", source, "--out", tmp_path / "out").exit_code == 0
    again = run("prepare", source, "--out", tmp_path / "out")
    assert isinstance(again.exception, FileExistsError)
    missing = run("prepare", tmp_path / "nothing", "--out", tmp_path / "two")
    assert isinstance(missing.exception, FileNotFoundError)


def test_what_was_held_out_is_said(tmp_path):
    source = write_folder(tmp_path / "in") / "a.txt"
    result = run("prepare", source, "--out", tmp_path / "out")
    assert "validation: no document fell to validation" in result.output


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ({}, ""),
        ({"a.bin": b"x", "b.png": b"x"}, "1 .bin, 1 .png"),
        ({"a.txt": b"a\0b"}, "a.txt: binary (NUL bytes)"),
    ],
)
def test_folders_without_text(tmp_path, texts, why):
    folder = write_folder(tmp_path / "in", texts)
    for command in ("prepare", "tokenizer"):
        result = run(command, folder, "--out", tmp_path / "out")
        assert isinstance(result.exception, ValueError)
        assert f"no document was found in {folder}" in str(result.exception)
        assert why in str(result.exception)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_interruption_says_whether_there_is_something_to_go_on_from(tmp_path, monkeypatch):
    source = write_folder(tmp_path / "in") / "a.txt"
    real = data.prepare_corpus

    def interrupted(*arguments, **options):
        def stop(_):
            raise KeyboardInterrupt

        return real(*arguments, **{**options, "progress": stop, "checkpoint_seconds": seconds})

    monkeypatch.setattr(data, "prepare_corpus", interrupted)
    for seconds in (100, 0):
        result = run("prepare", source, "--out", tmp_path / f"out{seconds}")
        partial = tmp_path / f"out{seconds}.partial"
        goes_on = f"; the same command goes on from {partial}" if partial.exists() else ""
        assert str(result.exception) == f"trellis: interrupted{goes_on}"
        assert partial.exists() == (seconds == 0)


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX only")
def test_names_that_a_terminal_cannot_show(tmp_path):
    folder = os.fsencode(tmp_path / "in")
    os.mkdir(folder)
    for name in (b"a\xff.txt", b"good.txt", b"red\x1b[31m.txt"):
        with open(folder + b"/" + name, "wb") as file:
            file.write(b"text" if name == b"good.txt" else b"\0")
    result = run("prepare", tmp_path / "in", "--out", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert result.exit_code == 0, result.output
    assert r"a\udcff.txt: binary" in result.output
    assert r"red\x1b[31m.txt: binary" in result.output
    assert r"/\udcff" in result.output.splitlines()[-1]


def test_a_tokenizer_without_an_end_of_document_is_named(tmp_path):
    source = write_folder(tmp_path / "in") / "a.txt"
    tokenizer = data.load_tokenizer("bytes").json
    tokenizer["added_tokens"] = []
    (tmp_path / "t.json").write_text(json.dumps(tokenizer))
    result = run("prepare", source, "--tokenizer", tmp_path / "t.json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "the tokenizer has no end-of-document token" in result.output


WITHOUT = """
import sys
sys.modules["tokenizers"] = None  # as if it were not installed
from trellis.cli import main
sys.argv[1:] = ["data", "prepare", "stdlib", "--out", "out"]
main()
"""


def test_a_missing_package_is_one_line(tmp_path):
    command = [sys.executable, "-c", WITHOUT]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 1
    message = "trellis: trellis.data needs tokenizers: pip install 'trellis-memory[models]'\n"
    assert out.stderr == message
