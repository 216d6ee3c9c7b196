import codecs
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import rich.console
from tests.support import evaluated_model

from trellis.cli import options
from trellis.cli.options import print_table
from trellis.evaluation import runner
from trellis.evaluation.reasoning import read
from trellis.evaluation.recall import load_set
from trellis.evaluation.runner import Job, Records, json_rows, progress, read_text

HEADS = ["model", *(f"variant-{n}\n{n}K" for n in range(16))]
CELLS = [[name, *(f"{n}.{n:05d}" for n in range(16))] for name in ("a[bold]", "m[/]x")]
ROWS = [{"text": "red: a\u2028b red:", "value": "a", "key": "red"}, {"text": "x", "value": "y"}]


def fail(**_):
    raise AssertionError("this should not be measured")


def job(setting, measure=lambda **_: {"x": 1}, **fields):
    return Job(setting, measure, "", **fields)


def test_a_copy_of_a_model_has_its_results_under_its_own_name(tmp_path):
    records = Records(tmp_path, "task")
    here, there = (
        job({"n": 1}, note={"data": ["here"]}),
        job({"n": 1}, fail, note={"data": ["there"]}),
    )
    first = records.measured(evaluated_model(name="first"), here)
    again = records.measured(evaluated_model(name="copy"), there)
    assert again["result"] == first["result"]
    assert (again["model"]["name"], again["note"]) == ("copy", {"data": ["there"]})
    (kept,) = (tmp_path / "task").glob("*.json")
    assert json.loads(kept.read_text()) == first


@pytest.mark.parametrize("change", ["config", "start", "end", "setting", "format"])
def test_what_a_result_depends_on_tells_results_apart(tmp_path, monkeypatch, change):
    records = Records(tmp_path, "task")
    records.measured(evaluated_model(), job({"n": 1}))
    other, setting = evaluated_model(), {"n": 1}
    if change == "config":
        other = evaluated_model(norm_eps=1e-2)  # the same weights
        assert other.about["weights_sha256"] == evaluated_model().about["weights_sha256"]
    elif change == "setting":
        setting = {"n": 2}
    elif change == "format":
        monkeypatch.setattr(runner, "FORMAT", runner.FORMAT + 1)
    else:
        other.about[change] = [7]
    found = records.measured(other, job(setting, lambda **_: {"x": 2}))
    assert found["result"] == {"x": 2}


def test_names_and_versions_in_a_configuration_do_not(tmp_path):
    one, other = evaluated_model(), evaluated_model()
    other.network.config._name_or_path = "elsewhere"
    other.network.config.architectures = ["TrellisForCausalLM"]
    again = type(other)(other.name, other.network, other.tokenizer, {})
    assert again.about["config_sha256"] == one.about["config_sha256"]


def test_a_folder_that_cannot_be_written_is_named_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out must be a folder that can be written; got .*file"):
        Records(tmp_path / "file", "task").measured(evaluated_model(), job({}, fail))


def test_a_damaged_record_is_named(tmp_path):
    records = Records(tmp_path, "task")
    records.measured(evaluated_model(), job({}))
    (kept,) = (tmp_path / "task").glob("*.json")
    kept.write_text("{")
    with pytest.raises(ValueError, match=rf"{kept.name} is damaged"):
        records.measured(evaluated_model(), job({}, fail))


def test_results_are_kept_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Records(tmp_path, "task").measured(evaluated_model(), job({}))
    assert found["made_by"]["commit"] is None
    assert len(list((tmp_path / "task").glob("*.json"))) == 1


def test_the_commit_of_a_project_around_the_package_is_not_ours(tmp_path):
    """A copy of the package in another's repository, as one of its files."""
    inner = tmp_path / "vendored" / "trellis"
    source = Path(runner.__file__).parents[1]
    for name in ("__init__.py", "evaluation/__init__.py", "evaluation/runner.py"):
        (inner / name).parent.mkdir(parents=True, exist_ok=True)
        (inner / name).write_bytes((source / name).read_bytes())
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    script = (
        "import sys; from trellis.evaluation import runner;"
        f"runner.__file__ = {str(inner / 'evaluation' / 'runner.py')!r}; print(runner._commit())"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "None"


def test_lines_have_their_numbers_and_blank_ones_are_passed_over():
    text = "".join(f"\n \r\n{json.dumps(row, ensure_ascii=False)}\r\n" for row in ROWS)
    assert list(json_rows(text, "a")) == [("a:3", ROWS[0]), ("a:6", ROWS[1])]
    with pytest.raises(ValueError, match=r"a:2: this is not JSON: .*delimiter"):
        list(json_rows('{}\n{"a" 1}', "a"))


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_files_may_begin_with_a_mark_and_be_compressed(tmp_path, mark):
    (tmp_path / "a.jsonl").write_bytes(mark + "é".encode())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(mark + "é".encode()))
    assert read_text(tmp_path / "a.jsonl") == "é"
    assert read_text(tmp_path / "a.jsonl.gz") == "é"
    (tmp_path / "a.jsonl").write_bytes(mark + b"a\xff")
    with pytest.raises(ValueError, match=r"a\.jsonl is not UTF-8: .* at byte"):
        read_text(tmp_path / "a.jsonl")


def test_recall_and_reasoning_read_the_same_files(tmp_path):
    goal = {"goal": "red: a red:", "sol1": "a", "sol2": "b", "text": "red: a red:", "value": "a"}
    line = json.dumps({**goal, "key": "red"}).encode()
    path = tmp_path / "valid.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + line + b"\n\n" + line + b"\n \n")
    (tmp_path / "valid-labels.lst").write_bytes(codecs.BOM_UTF8 + b"0\n\n1\n")
    assert [row["label"] for row in read(path, "piqa").rows] == [0, 1]
    assert [item.where for item in load_set("fda", str(path)).items] == [f"{path}:1", f"{path}:3"]
    path.write_bytes(line + b"\n\n{\n")
    for reader in (lambda: read(path, "lambada"), lambda: load_set("fda", str(path))):
        with pytest.raises(ValueError, match=r"valid\.jsonl:3: this is not JSON"):
            reader()


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(options, "_on_terminal", lambda: True)


def test_a_wide_table_is_several_whole_ones(terminal, capsys):
    print_table(HEADS, CELLS, "a title")
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    for row in CELLS:
        for cell in row[1:]:
            assert printed.count(f" {cell} ") == 2  # once for each model
    assert "…" not in printed
    assert printed.count("a[bold]") == printed.count("m[/]x") == printed.count("a title") > 1


def test_a_cell_that_is_wider_than_the_terminal_is_whole(terminal, capsys):
    print_table(["model", "x"], [["m" * 100, "1"]])
    assert "m" * 100 in capsys.readouterr().out


def test_without_a_terminal_a_table_is_one(capsys):
    print_table(HEADS, CELLS)
    assert capsys.readouterr().out.count("a[bold]") == 1


def test_progress_takes_any_name(monkeypatch):
    stream = io.StringIO()
    shown = rich.console.Console(file=stream, force_terminal=True, width=80)
    monkeypatch.setattr(rich.console, "Console", lambda **_: shown)
    with progress("a[bold] {0} {x", 3) as advance:
        advance(3)
    assert "a[bold] {0} {x" in stream.getvalue()
    assert "3/3" in stream.getvalue()
