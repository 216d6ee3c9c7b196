"""The files of the reasoning tasks, as their publishers give them, checked before anything runs.

Rows come out in the schema that lm-eval's own configuration of the task expects of the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import jsonl

#: Where the files of a task are looked for in a folder; the first that is there is taken.
FILES = {
    "lambada": (
        "lambada_openai_test.jsonl", "lambada_test.jsonl", "lambada/lambada_test.jsonl",
    ),
    "piqa": ("piqa_valid.jsonl", "piqa/valid.jsonl"),
    "hellaswag": ("hellaswag_val.jsonl", "hellaswag/hellaswag_val.jsonl"),
    "winogrande": (
        "winogrande_xl_dev.jsonl", "winogrande/dev.jsonl", "winogrande_1.1/dev.jsonl",
    ),
    "arc_easy": ("ARC-Easy-Test.jsonl", "ARC-Easy/ARC-Easy-Test.jsonl"),
    "arc_challenge": ("ARC-Challenge-Test.jsonl", "ARC-Challenge/ARC-Challenge-Test.jsonl"),
    "siqa": (
        "siqa_dev.jsonl", "socialiqa_dev.jsonl", "siqa/dev.jsonl", "socialiqa/dev.jsonl",
        "socialiqa-train-dev/dev.jsonl",
    ),
}  # fmt: skip
#: Tasks whose answers stand in a file of their own beside it, one a line: NAME-labels.lst.
LABELS = {"piqa": ("0", "1"), "siqa": ("1", "2", "3")}


class Items(NamedTuple):
    """One task's rows; `cleaned` HellaSwag has its prompts made already."""

    source: str
    rows: list[dict[str, Any]]
    cleaned: bool = False


def find(folder: Path, task: str) -> Path | None:
    """The file of a task in a folder, if there is one.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"--data must be a folder of task files; {folder} is none")
    return next((folder / name for name in FILES[task] if (folder / name).is_file()), None)


def read(path: Path, task: str) -> Items:
    """The rows of a task's file.

    Raises:
        FileNotFoundError: its file of labels is not there.
        ValueError: a row is not as it should be, or there is none.
    """
    rows = _rows(path)
    cleaned = task == "hellaswag" and "query" in rows[0].fields
    if task in LABELS:
        answers = _labels(path, LABELS[task], len(rows))
        for row, answer in zip(rows, answers):
            row.fields["label"] = answer
    convert = _cleaned_hellaswag if cleaned else _CONVERT[task]
    return Items(path.name, [convert(row) for row in rows], cleaned)


class _Row:
    """A line of a file; what is asked of it is checked."""

    def __init__(self, where: str, fields: dict[str, Any]):
        self.where, self.fields = where, fields

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.where}: {what}")

    def get(self, name: str) -> Any:
        if name not in self.fields:
            raise self.error(f"there is no field {name!r}, only {', '.join(self.fields) or 'none'}")
        return self.fields[name]

    def text(self, name: str, empty: bool = False) -> str:
        found = self.get(name)
        if not isinstance(found, str) or not (empty or found.strip()):
            raise self.error(f"{name!r} must be a text; got {found!r}")
        return found

    def texts(self, name: str) -> list[str]:
        found = self.get(name)
        good = isinstance(found, list) and all(isinstance(x, str) and x.strip() for x in found)
        if not good or len(found) < 2:
            raise self.error(f"{name!r} must be a list of two texts or more; got {found!r}")
        return found

    def choice(self, name: str, allowed: Collection[str]) -> str:
        """A number or a text, as the text that it is."""
        found = self.get(name)
        if isinstance(found, bool) or str(found) not in allowed:
            raise self.error(f"{name!r} must be one of {', '.join(allowed)}; got {found!r}")
        return str(found)


def _rows(path: Path) -> list[_Row]:
    found = []
    for where, fields in jsonl.rows(jsonl.read_text(path), str(path)):
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: a line must be a JSON object; got {str(fields)[:60]!r}")
        found.append(_Row(where, fields))
    if not found:
        raise ValueError(f"{path} has no items")
    return found


def _labels(path: Path, allowed: Sequence[str], count: int) -> list[str]:
    path = path.with_name(f"{path.stem}-labels.lst")
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}, the labels of the items beside it")
    found = []
    for number, line in jsonl.lines(jsonl.read_text(path)):
        label = line.strip()
        if label not in allowed:
            raise ValueError(
                f"{path}:{number}: a label must be one of {', '.join(allowed)}; got {label!r}"
            )
        found.append(label)
    if len(found) != count:
        raise ValueError(f"{path} has {len(found):,} labels for {count:,} items")
    return found


def _lambada(row: _Row) -> dict[str, Any]:
    text = row.text("text")
    if not text.split(" ")[-1].strip():
        raise row.error(f"'text' must end with a word; got {text[-20:]!r}")
    return {"text": text}


def _piqa(row: _Row) -> dict[str, Any]:
    texts = {name: row.text(name) for name in ("goal", "sol1", "sol2")}
    return {**texts, "label": int(row.fields["label"])}


def _hellaswag(row: _Row) -> dict[str, Any]:
    endings = row.texts("endings")
    return {
        "activity_label": row.text("activity_label"),
        "ctx_a": row.text("ctx_a", empty=True),
        "ctx_b": row.text("ctx_b", empty=True),
        "endings": endings,
        "label": row.choice("label", _numbers(endings)),
    }


def _cleaned_hellaswag(row: _Row) -> dict[str, Any]:
    endings = row.texts("endings")
    return {
        "query": row.text("query"),
        "choices": endings,
        "label": row.choice("gold", _numbers(endings)),
    }


def _winogrande(row: _Row) -> dict[str, Any]:
    sentence = row.text("sentence")
    if "_" not in sentence:
        raise row.error(f"'sentence' must have a gap, '_'; got {sentence!r}")
    options = {name: row.text(name) for name in ("option1", "option2")}
    return {"sentence": sentence, **options, "answer": row.choice("answer", ("1", "2"))}


def _arc(row: _Row) -> dict[str, Any]:
    question = row.get("question")
    if not isinstance(question, dict):
        raise row.error(f"'question' must be an object with stem and choices; got {question!r}")
    inner = _Row(f"{row.where}, question", question)
    choices = inner.get("choices")
    if not isinstance(choices, list) or len(choices) < 2:
        raise inner.error(f"'choices' must be a list of two or more; got {choices!r}")
    if not all(isinstance(choice, dict) for choice in choices):
        raise inner.error("'choices' must be objects with text and label")
    each = [_Row(f"{row.where}, choice {n}", choice) for n, choice in enumerate(choices, 1)]
    labels = [choice.text("label") for choice in each]
    return {
        "question": inner.text("stem"),
        "choices": {"text": [choice.text("text") for choice in each], "label": labels},
        "answerKey": row.choice("answerKey", labels),
    }


def _siqa(row: _Row) -> dict[str, Any]:
    names = ("context", "question", "answerA", "answerB", "answerC")
    return {**{name: row.text(name) for name in names}, "label": row.fields["label"]}


def _numbers(of: Sequence[object]) -> list[str]:
    return [str(number) for number in range(len(of))]


_CONVERT: dict[str, Callable[[_Row], dict[str, Any]]] = {
    "lambada": _lambada,
    "piqa": _piqa,
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "siqa": _siqa,
}
