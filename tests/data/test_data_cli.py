"""`trellis data`, through the command line."""

import json

import pytest
from corpora import write_folder, write_jsonl

pytest.importorskip("typer", reason="the command needs typer")

from typer.testing import CliRunner

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
        ({"a.bin": b"x", "b.png": b"x"}, ".bin"),
        ({"a.txt": b"a\0b"}, "a.txt: binary (NUL bytes)"),
    ],
)
def test_folders_without_text(tmp_path, texts, why):
    folder = write_folder(tmp_path / "in", texts)
    for command in ("prepare",):
        result = run(command, folder, "--out", tmp_path / "out")
        assert isinstance(result.exception, ValueError)
        assert f"no document was found in {folder}" in str(result.exception)
        assert why in str(result.exception)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
