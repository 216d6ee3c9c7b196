"""The sets of `recall`: SQuAD completion, SWDE and FDA.

Published form (hazyresearch/based-squad, based-swde-v2, based-fda): rows with `text`, which ends
where the answer begins, and `value`, the answer; SWDE and FDA name in `key` what is asked for,
SQuAD has the passage alone in `context`. As .jsonl, .json or .parquet, or from the hub.

SQuAD is also read as its publisher has it (version 1.1). The published completions were written by
a language model, which turned each question into a sentence that ends in its answer. That cannot be
repeated here, so the question itself is asked: passage, "Question: ...", "Answer:" on a line each;
any of the question's answers is right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..data.compression import optional
from ..data.documents import form_of
from ..data.sources import HUB, parse_hub
from . import jsonl
from .jsonl import Rows

SETS = ("squad", "swde", "fda")
#: The sets whose rows name what is asked for.
KEYED = ("swde", "fda")
#: Where the query of SWDE begins.
SUMMARY = "Summary of information above..."


class Item(NamedTuple):
    """A document and the query behind it, which the answer is to follow."""

    where: str  # for errors: file and line, or the number of the item
    document: str
    query: str
    key: str | None  # what is asked for, where rows name it
    answers: tuple[str, ...]  # any of them is right
    span: tuple[int, int] | None  # characters of the document that are the answer

    @property
    def prompt(self) -> str:
        """The whole text, as lm-eval has it."""
        return (self.document + self.query).strip()


class Set(NamedTuple):
    """Items, and the form that they were in."""

    name: str
    source: str
    form: str  # "published", or "squad-1.1: passage, question, answer"
    items: list[Item]


def load_set(name: str, source: str, limit: int | None = None) -> Set:
    """The first `limit` items of a file, or of hub:<dataset>[:<config>][@<split>].

    The split is `validation` unless one is named.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no item, or one that is not of the set's form.
    """
    if name not in SETS:
        raise ValueError(f"the set must be one of {', '.join(SETS)}; got {name!r}")
    content = _content(source)
    if isinstance(content, dict):
        if name != "squad":
            raise ValueError(f"{source} is SQuAD's file; --{name} takes rows of text, value, key")
        form, items = "squad-1.1: passage, question, answer", _squad(content, source)
    else:
        form = "published"
        items = (_published(name, row, where) for where, row in content)
    found = list(islice(items, limit))
    if not found:
        raise ValueError(f"there is no item in {source}")
    return Set(name, source, form, found)


def _content(source: str) -> dict[str, Any] | Rows:
    """Rows with where they stand, or SQuAD's whole object."""
    if source.startswith(HUB):
        return _hub(source)
    path = Path(source)
    if path.is_dir():
        raise ValueError(f"{source} is a folder: name one of its files, or hub:{source}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {source}")
    if path.suffix == ".parquet":
        return _parquet(path)
    form = form_of(path.name)
    if form.kind not in ("json", "jsonl"):
        raise ValueError(f"{source} must be .jsonl, .json or .parquet, or hub:<dataset>")
    text = jsonl.read_text(path)
    return jsonl.rows(text, source) if form.kind == "jsonl" else _json(text, source)


def _json(text: str, source: str) -> dict[str, Any] | Rows:
    """SQuAD's object, a list of rows, or lines of them."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return jsonl.rows(text, source)
        raise ValueError(f"{source}:{error.lineno}: this is not JSON: {error.msg}") from error
    if isinstance(value, dict) and "data" in value:
        return value
    rows = value if isinstance(value, list) else [value]
    return ((f"{source}: item {number}", row) for number, row in enumerate(rows, 1))


def _parquet(path: Path) -> Rows:
    parquet = optional("pyarrow.parquet", f"reading {path}")
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(256):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: item {number}", row
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} failed after item {number}: {error}") from error


def _hub(source: str) -> Rows:
    datasets = optional("datasets", source)
    name, config, split = parse_hub(source if "@" in source else f"{source}@validation")
    number = 0
    try:
        for row in datasets.load_dataset(name, config, split=split, streaming=True):
            number += 1
            yield f"{source}: item {number}", row
    except GeneratorExit:
        raise
    except Exception as error:  # the library raises whatever its many backends raise
        raise ValueError(f"{source!r} failed after item {number}: {error}") from error


def _published(name: str, row: Any, where: str) -> Item:
    """A row of the published form, its text parted into document and query."""
    text, value = (_text(row, field, where).strip() for field in ("text", "value"))
    key = _text(row, "key", where).strip() if name in KEYED else None
    if key is not None:
        document = _without_query(text, key)
    else:
        context = row.get("context")
        passage = context.strip() if isinstance(context, str) else ""
        # Without the passage alone, none of the text is known to be the query.
        end = text.find(passage) + len(passage) if passage and passage in text else len(text)
        document = text[:end]
    found = re.search(re.escape(value), document, re.IGNORECASE)
    return Item(
        where, document, text[len(document) :], key, (value,), found.span() if found else None
    )


def _without_query(text: str, key: str) -> str:
    """The document of SWDE and FDA: what stands before the summary and the key that is asked."""
    document = text.split(SUMMARY)[0].rstrip()
    while document.lower().endswith(f"{key}:".lower()):
        document = document[: -len(key) - 1].rstrip()
    return document


def _squad(content: dict[str, Any], source: str) -> Iterator[Item]:
    """Questions of SQuAD 1.1 in their order."""
    number = 0
    for article in _get(content, "data", list, source):
        for paragraph in _get(article, "paragraphs", list, f"{source}: after item {number}"):
            context = _text(paragraph, "context", f"{source}: after item {number}")
            for question in _get(paragraph, "qas", list, f"{source}: after item {number}"):
                number += 1
                yield _question(context, question, f"{source}: item {number}")


def _question(context: str, question: Any, where: str) -> Item:
    asked = _text(question, "question", where).strip()
    answers = _get(question, "answers", list, where)
    if not answers:
        raise ValueError(f"{where}: the question has no answer, as in SQuAD 2.0; 1.1 is read")
    texts = [_text(answer, "text", where) for answer in answers]
    begin = _get(answers[0], "answer_start", int, where)
    span = (begin, begin + len(texts[0]))
    if context[slice(*span)] != texts[0]:
        raise ValueError(
            f"{where}: the answer {texts[0]!r} does not stand at character {begin} of the context"
        )
    query = f"\nQuestion: {asked}\nAnswer:"
    known = tuple(dict.fromkeys(text.strip() for text in texts))
    return Item(where, context, query, None, known, span)


def _get(row: Any, field: str, kind: type, where: str) -> Any:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got a {type(row).__name__}")
    if field not in row:
        has = ", ".join(map(repr, row)) or "nothing"
        raise ValueError(f"{where}: there is no field {field!r}, but {has}")
    if not isinstance(row[field], kind):
        raise ValueError(
            f"{where}: field {field!r} must be a {kind.__name__}, not {type(row[field]).__name__}"
        )
    return row[field]


def _text(row: Any, field: str, where: str) -> str:
    text = _get(row, field, str, where)
    if not text.strip():
        raise ValueError(f"{where}: field {field!r} is empty")
    return text
