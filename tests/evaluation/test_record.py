import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.evaluation.helpers import ours

from trellis.evaluation import record
from trellis.evaluation.record import Records


def fail():
    raise AssertionError("this should not be measured")


def test_a_copy_of_a_model_has_its_results_under_its_own_name(tmp_path):
    records = Records(tmp_path, "task")
    first = records.measured(ours(name="first"), {"n": 1}, lambda: {"x": 1}, {"data": ["here"]})
    again = records.measured(ours(name="copy"), {"n": 1}, fail, {"data": ["there"]})
    assert again["result"] == first["result"]
    assert (again["model"]["name"], again["note"]) == ("copy", {"data": ["there"]})
    (kept,) = (tmp_path / "task").glob("*.json")
    assert json.loads(kept.read_text()) == first


@pytest.mark.parametrize("change", ["config", "start", "end", "setting", "format"])
def test_what_a_result_depends_on_tells_results_apart(tmp_path, monkeypatch, change):
    records = Records(tmp_path, "task")
    records.measured(ours(), {"n": 1}, lambda: {"x": 1})
    other, setting = ours(), {"n": 1}
    if change == "config":
        other = ours(norm_eps=1e-2)  # the same weights
        assert other.about["weights_sha256"] == ours().about["weights_sha256"]
    elif change == "setting":
        setting = {"n": 2}
    elif change == "format":
        monkeypatch.setattr(record, "FORMAT", record.FORMAT + 1)
    else:
        other.about[change] = [7]
    assert records.measured(other, setting, lambda: {"x": 2})["result"] == {"x": 2}


def test_names_and_versions_in_a_configuration_do_not(tmp_path):
    one, other = ours(), ours()
    other.model.config._name_or_path = "elsewhere"
    other.model.config.architectures = ["TrellisForCausalLM"]
    again = type(other)(other.name, other.model, other.tokenizer, {})
    assert again.about["config_sha256"] == one.about["config_sha256"]


def test_a_folder_that_cannot_be_written_is_named_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out must be a folder that can be written; got .*file"):
        Records(tmp_path / "file", "task").measured(ours(), {}, fail)


def test_a_damaged_record_is_named(tmp_path):
    records = Records(tmp_path, "task")
    records.measured(ours(), {}, lambda: {})
    (kept,) = (tmp_path / "task").glob("*.json")
    kept.write_text("{")
    with pytest.raises(ValueError, match=rf"{kept.name} is damaged"):
        records.measured(ours(), {}, fail)


def test_results_are_kept_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Records(tmp_path, "task").measured(ours(), {}, lambda: {"x": 1})
    assert found["made_by"]["commit"] is None
    assert len(list((tmp_path / "task").glob("*.json"))) == 1


def test_the_commit_of_a_project_around_the_package_is_not_ours(tmp_path):
    """A copy of the package in another's repository, as one of its files."""
    inner = tmp_path / "vendored" / "trellis"
    source = Path(record.__file__).parents[1]
    for name in ("__init__.py", "evaluation/__init__.py", "evaluation/record.py"):
        (inner / name).parent.mkdir(parents=True, exist_ok=True)
        (inner / name).write_bytes((source / name).read_bytes())
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    script = (
        "import sys; from trellis.evaluation import record;"
        f"record.__file__ = {str(inner / 'evaluation' / 'record.py')!r}; print(record._commit())"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "None"
