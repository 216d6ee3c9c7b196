"""`trellis eval recall`: the answer stands in a text and must be written after a query.

Prompts, greedy completions and the score are those of lm-eval's tasks squad_completion, swde and
fda: the whole text without the white space around it, at most 48 tokens up to the end of a line,
right if the value occurs in them, in upper or lower case.

Published form of the sets (hazyresearch/based-squad, based-swde-v2, based-fda): rows with `text`,
which ends where the answer begins, and `value`, the answer. SWDE and FDA name in `key` what is
asked for; SQuAD has the passage alone in `context`. Files are .jsonl, .json, .parquet or hub:NAME.

SQuAD 1.1 can also be read as its publisher has it. The published completions were written by a
language model, which turned each question into a sentence that ends in its answer. That cannot be
repeated here, so the question itself is asked: passage, "Question: ...", "Answer:" on a line each;
any of the question's answers is right.

Cut contexts follow "Just read twice" (Arora et al., 2024), whose 1,000 tokens less 50 for the
answer are 950: the document is cut to 950 tokens around the answer, and the query follows,
" Key:" after a full stop for SWDE and FDA, the published query for SQuAD. Three things differ from
their code. The window is centred on the first place of the answer; theirs may be centred on the key
and leave the answer outside. The window has its full length also at the end of a document. And the
query is taken off before the document is cut, not after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ..data.compression import optional
from ..data.documents import form_of
from ..data.sources import HUB, open_hub
from ..data.tokenizer import TextTokenizer
from ..files import parse_json
from .models import EvaluatedModel
from .runner import Job, Record, Records, Report, Rows, Table, hash_of, json_rows, read_text
from .scoring import BATCH_TOKENS, Progress, complete

SETS = ("squad", "swde", "fda")
#: The sets whose rows name what is asked for.
KEYED = ("swde", "fda")
#: The query of SWDE begins with this line.
SUMMARY = "Summary of information above..."
#: The most tokens of an answer, and the text that it ends before.
MAX_TOKENS = 48
STOP = "\n"


class Item(NamedTuple):
    """A document and the query after it, which the answer must follow."""

    where: str  # for errors: file and line, or the number of the item
    document: str
    query: str
    key: str | None  # what is asked for, where rows name it
    answers: tuple[str, ...]  # any of them is right
    span: tuple[int, int] | None  # characters of the document that are the answer

    @property
    def prompt(self) -> str:
        """The whole text, as in lm-eval."""
        return (self.document + self.query).strip()


class Set(NamedTuple):
    """The items of a set, and the form that its file had."""

    name: str
    source: str
    form: str  # "published", or "squad-1.1: passage, question, answer"
    items: list[Item]


def run(
    models: Iterable[EvaluatedModel],
    sources: Mapping[str, str],
    out: Path,
    *,
    context_tokens: int | None,
    limit: int | None,
    batch_tokens: int,
) -> Report:
    """Measures every model on every set. sources: file or hub:NAME by the name of the set."""
    if not sources:
        raise ValueError("there is nothing to measure on: give --squad, --swde or --fda")
    sets = [load_set(name, source, limit) for name, source in sources.items()]
    settings = [_setting(one, context_tokens) for one in sets]

    def jobs(model: EvaluatedModel) -> list[Job]:
        found = []
        for one, setting in zip(sets, settings):
            prompts = encode(model, one.items, context_tokens)
            look = partial(measure, model, one.items, prompts, batch_tokens=batch_tokens)
            found.append(Job(setting, look, one.name, len(prompts), {"data": one.source}))
        return found

    found = Records(out, "recall").measure(models, jobs)
    shown: list[Any] = [_table(found, sets, context_tokens), *_lines(sets)]
    return Report([record for group in found for record in group], shown, [])


def _setting(one: Set, context_tokens: int | None) -> dict[str, Any]:
    return {
        "set": one.name,
        "form": one.form,
        # Everything but where an item stands. The answer's place counts: documents are cut there.
        "data_sha256": hash_of(json.dumps(item[1:]) for item in one.items),
        "items": len(one.items),
        "context_tokens": context_tokens,
        "max_tokens": MAX_TOKENS,
        "stop": STOP,
    }


def load_set(name: str, source: str, limit: int | None = None) -> Set:
    """The first `limit` items of a file, or of hub:<dataset>[:<config>][@<split>].

    The split is `validation` unless another one is named.

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
    """The rows of a source with their places, or the whole object of SQuAD 1.1."""
    if source.startswith(HUB):
        return _numbered(source, _hub(source))
    path = Path(source)
    if path.is_dir():
        raise ValueError(f"{source} is a folder: name one of its files, or hub:{source}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {source}")
    if path.suffix == ".parquet":
        return _numbered(source, _parquet(path))
    form = form_of(path.name)
    if form.kind not in ("json", "jsonl"):
        raise ValueError(f"{source} must be .jsonl, .json or .parquet, or hub:<dataset>")
    text = read_text(path)
    if form.kind == "jsonl":
        return json_rows(text, source)
    # A .json file holds the object of SQuAD 1.1, a list of rows, or one row in each line.
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return json_rows(text, source)
        raise ValueError(f"{source}:{error.lineno}: this is not JSON: {error.msg}") from error
    except ValueError as error:
        raise ValueError(f"{source} cannot be read: {error}") from error
    if isinstance(value, dict) and "data" in value:
        return value
    return _numbered(source, value if isinstance(value, list) else [value])


def _parquet(path: Path) -> Iterator[Any]:
    parquet = optional("pyarrow.parquet", f"reading {path}")
    for batch in parquet.ParquetFile(path).iter_batches(256):
        yield from batch.to_pylist()


def _hub(source: str) -> Iterator[Any]:
    yield from open_hub(source if "@" in source else f"{source}@validation")


def _numbered(source: str, rows: Iterable[Any]) -> Rows:
    """Rows with their numbers. Errors of the library that reads them get the number, too."""
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield f"{source}: item {number}", row
    except (GeneratorExit, ModuleNotFoundError):
        raise
    except Exception as error:  # libraries raise whatever their many backends raise
        said = repr(source) if source.startswith(HUB) else source
        raise ValueError(f"{said} failed after item {number}: {error}") from error


def _published(name: str, row: Any, where: str) -> Item:
    """An item of the published form; its text is split into document and query."""
    text, value = (_text(row, field, where).strip() for field in ("text", "value"))
    key = _text(row, "key", where).strip() if name in KEYED else None
    if key is not None:
        # The document of SWDE and FDA stands before the summary and before the key at its end.
        document = text.split(SUMMARY)[0].rstrip()
        while document.lower().endswith(f"{key}:".lower()):
            document = document[: -len(key) - 1].rstrip()
    else:
        context = row.get("context")
        passage = context.strip() if isinstance(context, str) else ""
        # Without the passage, nobody knows which part of the text is the query.
        end = text.find(passage) + len(passage) if passage and passage in text else len(text)
        document = text[:end]
    found = re.search(re.escape(value), document, re.IGNORECASE)
    query, span = text[len(document) :], found.span() if found else None
    return Item(where, document, query, key, (value,), span)


def _squad(content: dict[str, Any], source: str) -> Iterator[Item]:
    """The questions of SQuAD 1.1 in their order."""
    number, where = 0, source
    for article in _get(content, "data", list, where):
        for paragraph in _get(article, "paragraphs", list, where):
            context = _text(paragraph, "context", where)
            for question in _get(paragraph, "qas", list, where):
                number += 1
                yield _question(context, question, f"{source}: item {number}")
                where = f"{source}: after item {number}"


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


def encode(
    model: EvaluatedModel, items: Sequence[Item], context_tokens: int | None
) -> list[list[int]]:
    """Token ids of the prompts: whole texts, or documents cut to `context_tokens`.

    As in lm-eval, a prompt begins with the tokens that the tokenizer puts before every text. Raises
    ValueError if the model cannot read a prompt, or a document cannot be cut.
    """
    if context_tokens is None:
        texts = model.tokenizer.encode_batch([item.prompt for item in items])
        encoded = [ids.tolist() for ids in texts]
    else:
        encoded = [cut_prompt(item, model.tokenizer, context_tokens) for item in items]
    prompts = [[*model.prefix, *ids] for ids in encoded]
    limit = model.max_context
    for item, prompt in zip(items, prompts):
        tokens = len(prompt) + MAX_TOKENS
        if limit is not None and tokens > limit:
            raise ValueError(
                f"{item.where}: the prompt with {MAX_TOKENS} tokens of answer has {tokens:,}, but "
                f"{model.name} reads at most {limit:,}: cut contexts with --context-tokens"
            )
    return prompts


def cut_prompt(item: Item, tokenizer: TextTokenizer, size: int) -> list[int]:
    """Token ids of a document cut to `size` tokens around the answer, and of the query.

    A shorter document stays whole; a document without the answer keeps its end.
    """
    # Tokens are cut, not text: encoding a cut text again could give more tokens.
    kept = _cut_document(item, tokenizer, size)
    if item.key is None:
        return [*kept, *tokenizer.encode(item.query.rstrip()).tolist()]
    while kept and tokenizer.decode(kept[-1:]).isspace():
        kept.pop()
    stop = "" if tokenizer.decode(kept).endswith(".") else "."
    asked = f"{stop} {item.key[0].upper()}{item.key[1:]}:"
    return [*kept, *tokenizer.encode(asked).tolist()]


def _cut_document(item: Item, tokenizer: TextTokenizer, size: int) -> list[int]:
    text = item.document
    encoded = tokenizer.inner.encode(text, add_special_tokens=False)
    ids = encoded.ids
    if len(ids) <= size:
        return ids
    if item.key is None and not item.query:
        raise ValueError(
            f"{item.where}: the text of {len(ids):,} tokens cannot be cut to {size:,}: it has no "
            "field 'context' with the passage that it begins with"
        )
    # A document without the answer is cut as if the answer followed it.
    begin, end = _tokens_of(encoded.offsets, item.span or (len(text), len(text)))
    if end - begin > size:
        raise ValueError(
            f"{item.where}: the answer has {end - begin:,} tokens, which do not fit into {size:,}: "
            "give more to --context-tokens"
        )
    return ids[slice(*window(len(ids), begin, end, size))]


def _tokens_of(offsets: Sequence[tuple[int, int]], span: tuple[int, int]) -> tuple[int, int]:
    """The range of tokens that hold characters of `span`; empty if the tokenizer drops them."""
    first, last = span
    held = [n for n, (begin, end) in enumerate(offsets) if begin < last and end > first]
    if held:
        return held[0], held[-1] + 1
    place = sum(end <= first for _, end in offsets)
    return place, place


def window(length: int, begin: int, end: int, size: int) -> tuple[int, int]:
    """A range of `size` of `length` tokens with begin:end in its middle, moved to stay inside."""
    start = (begin + end) // 2 - size // 2
    start = max(0, min(start, length - size))
    return start, min(length, start + size)


def measure(
    model: EvaluatedModel,
    items: Sequence[Item],
    prompts: Sequence[Sequence[int]],
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = lambda done: None,
) -> dict[str, Any]:
    """The number of items that a model completes with their answer, and what it wrote for each."""
    outputs = complete(
        model, prompts, max_tokens=MAX_TOKENS, stop=STOP,
        batch_tokens=batch_tokens, progress=progress,
    )  # fmt: skip
    right = [contains(output, item.answers) for output, item in zip(outputs, items)]
    return {
        "accuracy": sum(right) / len(right),
        "right": sum(right),
        "items": len(right),
        # These cannot be answered by copying; they count all the same.
        "answer_not_in_document": sum(item.span is None for item in items),
        "outputs": [
            {"item": number, "answers": list(item.answers), "output": output, "right": hit}
            for number, (item, output, hit) in enumerate(zip(items, outputs, right), 1)
        ],
    }


def contains(output: str, answers: Sequence[str]) -> bool:
    """Whether one of the answers occurs in the output, in upper or lower case."""
    return any(re.search(re.escape(answer), output, re.IGNORECASE) for answer in answers)


def _table(found: list[list[Record]], sets: list[Set], context_tokens: int | None) -> Table:
    rows = []
    for group in found:
        scores = [100 * record["result"]["accuracy"] for record in group]
        rows.append([group[0]["model"]["name"], *(f"{s:.1f}" for s in (*scores, fmean(scores)))])
    heads = ["model", *(f"{one.name} ({len(one.items):,})" for one in sets), "average"]
    form = "whole texts" if context_tokens is None else f"cut to {context_tokens:,} tokens"
    return Table(f"recall, % (items), {form}", heads, rows)


def _lines(sets: list[Set]) -> Iterator[str]:
    for one in sets:
        absent = sum(item.span is None for item in one.items)
        if absent:
            yield f"{one.name}: {absent:,} of {len(one.items):,} documents do not hold the answer"
