import codecs
import gzip
import json

import pytest

from trellis.evaluation import jsonl
from trellis.evaluation.reasoning_data import read
from trellis.evaluation.recall_data import load_set

ROWS = [{"text": "red: a\u2028b red:", "value": "a", "key": "red"}, {"text": "x", "value": "y"}]


def test_lines_have_their_numbers_and_blank_ones_are_passed_over():
    text = "".join(f"\n \r\n{json.dumps(row, ensure_ascii=False)}\r\n" for row in ROWS)
    assert list(jsonl.rows(text, "a")) == [("a:3", ROWS[0]), ("a:6", ROWS[1])]
    with pytest.raises(ValueError, match=r"a:2: this is not JSON: .*delimiter"):
        list(jsonl.rows('{}\n{"a" 1}', "a"))


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_files_may_begin_with_a_mark_and_be_compressed(tmp_path, mark):
    (tmp_path / "a.jsonl").write_bytes(mark + "é".encode())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(mark + "é".encode()))
    assert jsonl.read_text(tmp_path / "a.jsonl") == "é"
    assert jsonl.read_text(tmp_path / "a.jsonl.gz") == "é"
    (tmp_path / "a.jsonl").write_bytes(mark + b"a\xff")
    with pytest.raises(ValueError, match=r"a\.jsonl is not UTF-8: .* at byte"):
        jsonl.read_text(tmp_path / "a.jsonl")


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
