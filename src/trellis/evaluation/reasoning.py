"""`trellis eval reasoning`: common-sense tasks through lm-eval, with its prompts and metrics.

Data come from the hub, or from the publishers' files in a folder. Rows of files are checked before
anything runs, and turned into the schema that lm-eval's own configuration expects of the hub.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from .models import EvaluatedModel
from .runner import Job, Record, Records, Report, Table, hash_of, json_rows, lines, read_text
from .scoring import Progress

if TYPE_CHECKING:
    from .lm_eval_model import TrellisLM


class Task(NamedTuple):
    """A task.

    name, folder: what lm-eval calls it. split: the part of the data that is measured. heading: of
        its columns in the paper's table.
    files: names of its file in a folder of data; the first one that is there is taken.
    convert: turns a line of that file into a row of the hub's form.
    labels: the answers, where they stand one a line in a file beside the items, NAME-labels.lst.
    """

    name: str
    folder: str
    split: str
    heading: str
    files: tuple[str, ...]
    convert: Callable[[_Row], dict[str, Any]]
    labels: tuple[str, ...] = ()


#: Metrics of lm-eval and their heads in the table, in its order.
METRICS = {"perplexity": "ppl", "acc": "acc", "acc_norm": "acc_n"}


class Items(NamedTuple):
    """The rows of one task. cleaned: HellaSwag in the form with ready-made prompts."""

    source: str
    rows: list[dict[str, Any]]
    cleaned: bool = False


def run(
    models: Iterable[EvaluatedModel],
    out: Path,
    *,
    data: Path | None,
    tasks: Sequence[str] | None,
    limit: int | None,
    batch_tokens: int,
) -> Report:
    """Measures every model on every task.

    data: a folder of the publishers' files; None asks the hub. tasks: None takes all there are.

    Raises:
        FileNotFoundError: a task that was asked for has no file.
        ValueError: a task is not known, or a file is malformed.
    """
    for name in tasks or ():
        if name not in TASKS:
            raise ValueError(f"--tasks must be of {', '.join(TASKS)}; got {name!r}")
    names = [name for name in TASKS if tasks is None or name in tasks]
    local, left_out = (None, []) if data is None else _local(data, names, asked=tasks is not None)
    names = list(local or names)
    built = build(names, local)
    settings = {name: {"task": name, **about(built[name], limit)} for name in names}
    sources = {
        name: local[name].source if local else f"hub:{built[name].config.dataset_path}"
        for name in names
    }

    def measured(model: EvaluatedModel, name: str, progress: Progress) -> dict[str, Any]:
        from .lm_eval_model import TrellisLM

        # TrellisLM shows its own progress: lm-eval decides how many requests an item makes.
        return measure(TrellisLM(model=model, batch_tokens=batch_tokens), built[name], limit)

    def jobs(model: EvaluatedModel) -> list[Job]:
        return [
            Job(settings[name], partial(measured, model, name), name, note={"data": sources[name]})
            for name in names
        ]

    found = Records(out, "reasoning").measure(models, jobs)
    shown: list[Any] = [*left_out, _table(found, names), *_lines(found)]
    return Report([record for group in found for record in group], shown, [])


def _local(folder: Path, names: Sequence[str], asked: bool) -> tuple[dict[str, Items], list[str]]:
    """The items of every task that has a file, and a line for every task that has none.

    asked: a task without a file is an error.
    """
    paths = {name: find(folder, name) for name in names}
    missing = [
        f"{name}: there is none of {', '.join(TASKS[name].files)} in {folder}"
        for name, path in paths.items()
        if path is None
    ]
    if missing and asked:
        raise FileNotFoundError(missing[0])
    found = {name: read(path, name) for name, path in paths.items() if path}
    if not found:
        raise FileNotFoundError(f"there are no files of reasoning tasks in {folder}")
    return found, [f"left out {line}" for line in missing]


def build(names: Sequence[str], local: Mapping[str, Items] | None = None) -> dict[str, Any]:
    """lm-eval's tasks, on data of the hub, or on `local` rows, where nothing is fetched."""
    from .lm_eval_model import lm_eval  # says what to install where lm-eval is missing

    # Only the folders of these tasks: an index of all of lm-eval's tasks takes long to read.
    home = Path(lm_eval.tasks.__file__).parent
    folders = sorted({str(home / TASKS[name].folder) for name in names})
    with quiet():
        manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=folders)
        found = {}
        for name in names:
            known = TASKS[name].name
            entry = {"task": known, **(_instead(name, local[name]) if local else {})}
            try:
                # Only as a member of a group does a known task accept other fields.
                loaded = manager.load({"group": "reasoning", "task": [entry]})
            except OSError as error:
                raise ValueError(
                    f"the hub does not give the data of {name}: {error}; "
                    "files that are here are read with --data"
                ) from error
            found[name] = loaded["tasks"][known]
            found[name].set_config(key="num_fewshot", value=0)
    return found


def _instead(name: str, items: Items) -> dict[str, Any]:
    """The fields of a task's configuration that replace the hub's data by local rows."""
    from datasets import Dataset

    split = TASKS[name].split
    return {
        # Without other splits, lm-eval draws no examples from them.
        **dict.fromkeys(("training_split", "validation_split", "test_split")),
        f"{split}_split": split,
        "custom_dataset": lambda **_: {split: Dataset.from_list(items.rows)},
        **({"process_docs": None} if items.cleaned else {}),
    }


def about(task: Any, limit: int | None = None) -> dict[str, Any]:
    """What the result of a task depends on: versions of lm-eval and of the task, and the data."""
    import lm_eval

    config = task.config
    split = config.test_split or config.validation_split
    rows = [json.dumps(row, sort_keys=True) for row in task.dataset[split]]
    return {
        "lm_eval": lm_eval.__version__,
        "version": task.VERSION,
        "few_shot": 0,
        "data_sha256": hash_of(rows),
        "items": len(rows) if limit is None else min(limit, len(rows)),
    }


def measure(model: TrellisLM, task: Any, limit: int | None = None) -> dict[str, Any]:
    """lm-eval's metrics on the first `limit` items, and the log-likelihoods of every item."""
    from lm_eval.evaluator import evaluate

    before = model.cut
    with quiet(), _templates_once():
        out = evaluate(
            lm=model, task_dict={"tasks": {task.task_name: task}},
            limit=limit, bootstrap_iters=0, log_samples=False,
        )  # fmt: skip
    metrics = out["results"][task.task_name]
    items = likelihoods(task)
    result: dict[str, Any] = {"items": len(items), "contexts_cut": model.cut - before}
    for name in METRICS:
        if f"{name},none" in metrics:
            result[name] = float(metrics[f"{name},none"])
    acc = result["acc"]
    result["acc_stderr"] = math.sqrt(acc * (1 - acc) / (len(items) - 1)) if len(items) > 1 else None
    result["likelihoods"] = [[round(value, 6) for value in item] for item in items]
    return result


def likelihoods(task: Any) -> list[list[float]]:
    """The log-likelihood of each choice, for every item that was measured."""
    found: dict[int, list[float]] = {}
    for instance in sorted(task.instances, key=lambda one: (one.doc_id, one.idx)):
        found.setdefault(instance.doc_id, []).append(float(instance.resps[0][0]))
    return list(found.values())


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the messages in which lm-eval reports its steps."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _templates_once() -> Iterator[None]:
    """Makes lm-eval compile the template of a prompt once; it would do so again for every item,
    which takes most of its time."""
    from lm_eval.utils import env

    env.from_string = functools.cache(env.from_string)
    try:
        yield
    finally:
        del env.from_string  # uncovers the method of the class


def _table(found: list[list[Record]], names: Sequence[str]) -> Table:
    """Accuracies as in the paper's table; beside them acc_n, that of likelihoods per character."""
    heads: list[str] = []
    rows = []
    for group in found:
        results = [(name, record["result"]) for name, record in zip(names, group)]
        columns = [(name, m, of[m]) for name, of in results for m in METRICS if m in of]
        heads = [f"{TASKS[name].heading}\n{METRICS[metric]}" for name, metric, _ in columns]
        cells = [_cell(metric, value) for _, metric, value in columns]
        average = fmean(of["acc"] for _, of in results)
        rows.append([group[0]["model"]["name"], *cells, _cell("acc", average)])
    title = (
        f"reasoning: percent; the average is that of acc over {len(names)} of {len(TASKS)} tasks"
    )
    return Table(title, ["model", *heads, "Avg.\nacc"], rows)


def _cell(metric: str, value: float) -> str:
    if metric != "perplexity":
        return f"{100 * value:.2f}"
    return f"{value:.2f}" if value < 1e5 else f"{value:.2e}"


def _lines(found: list[list[Record]]) -> Iterator[str]:
    for record in (record for group in found for record in group):
        if record["result"]["contexts_cut"]:
            yield (
                f"{record['model']['name']}, {record['setting']['task']}: "
                f"{record['result']['contexts_cut']:,} contexts are longer than the model reads; "
                "their beginnings were cut, as lm-eval does"
            )


def find(folder: Path, task: str) -> Path | None:
    """The file of a task in a folder; None if there is none."""
    if not folder.is_dir():
        raise FileNotFoundError(f"--data must be a folder of task files; {folder} is none")
    names = TASKS[task].files
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read(path: Path, task: str) -> Items:
    """The items of a task's file, each checked."""
    rows = []
    for where, fields in json_rows(read_text(path), str(path)):
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: a line must be a JSON object; got {str(fields)[:60]!r}")
        rows.append(_Row(where, fields))
    if not rows:
        raise ValueError(f"{path} has no items")
    cleaned = task == "hellaswag" and "query" in rows[0].fields
    if labels := TASKS[task].labels:
        for row, label in zip(rows, _labels(path, labels, len(rows))):
            row.fields["label"] = label
    convert = _cleaned_hellaswag if cleaned else TASKS[task].convert
    return Items(path.name, [convert(row) for row in rows], cleaned)


class _Row:
    """The fields of one line of a file; errors name the line."""

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

    def each(self, *names: str) -> dict[str, str]:
        return {name: self.text(name) for name in names}

    def choice(self, name: str, allowed: Iterable[object]) -> str:
        """A number or a text among those allowed, returned as text."""
        found, known = self.get(name), [str(one) for one in allowed]
        if isinstance(found, bool) or str(found) not in known:
            raise self.error(f"{name!r} must be one of {', '.join(known)}; got {found!r}")
        return str(found)


def _labels(path: Path, allowed: Sequence[str], count: int) -> list[str]:
    path = path.with_name(f"{path.stem}-labels.lst")
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}, the labels of the items beside it")
    found = []
    for number, line in lines(read_text(path)):
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


def _hellaswag(row: _Row) -> dict[str, Any]:
    endings = row.texts("endings")
    return {
        "activity_label": row.text("activity_label"),
        "ctx_a": row.text("ctx_a", empty=True),
        "ctx_b": row.text("ctx_b", empty=True),
        "endings": endings,
        "label": row.choice("label", range(len(endings))),
    }


def _cleaned_hellaswag(row: _Row) -> dict[str, Any]:
    endings = row.texts("endings")
    label = row.choice("gold", range(len(endings)))
    return {"query": row.text("query"), "choices": endings, "label": label}


def _winogrande(row: _Row) -> dict[str, Any]:
    sentence = row.text("sentence")
    if "_" not in sentence:
        raise row.error(f"'sentence' must have a gap, '_'; got {sentence!r}")
    options = row.each("option1", "option2")
    return {"sentence": sentence, **options, "answer": row.choice("answer", (1, 2))}


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


def _piqa(row: _Row) -> dict[str, Any]:
    return {**row.each("goal", "sol1", "sol2"), "label": int(row.fields["label"])}


def _siqa(row: _Row) -> dict[str, Any]:
    fields = ("context", "question", "answerA", "answerB", "answerC")
    return {**row.each(*fields), "label": row.fields["label"]}


TASKS = {
    "lambada": Task("lambada_openai", "lambada", "test", "LMB.", (
        "lambada_openai_test.jsonl", "lambada_test.jsonl", "lambada/lambada_test.jsonl"), _lambada),
    "piqa": Task("piqa", "piqa", "validation", "PIQA",
                 ("piqa_valid.jsonl", "piqa/valid.jsonl"), _piqa, ("0", "1")),
    "hellaswag": Task("hellaswag", "hellaswag", "validation", "Hella.",
                      ("hellaswag_val.jsonl", "hellaswag/hellaswag_val.jsonl"), _hellaswag),
    "winogrande": Task(
        "winogrande", "winogrande", "validation", "Wino.",
        ("winogrande_xl_dev.jsonl", "winogrande/dev.jsonl", "winogrande_1.1/dev.jsonl"),
        _winogrande),
    "arc_easy": Task("arc_easy", "arc", "test", "ARC-e",
                     ("ARC-Easy-Test.jsonl", "ARC-Easy/ARC-Easy-Test.jsonl"), _arc),
    "arc_challenge": Task("arc_challenge", "arc", "test", "ARC-c", (
        "ARC-Challenge-Test.jsonl", "ARC-Challenge/ARC-Challenge-Test.jsonl"), _arc),
    "siqa": Task("social_iqa", "siqa", "validation", "SIQA", (
        "siqa_dev.jsonl", "socialiqa_dev.jsonl", "siqa/dev.jsonl", "socialiqa/dev.jsonl",
        "socialiqa-train-dev/dev.jsonl"), _siqa, ("1", "2", "3")),
}  # fmt: skip
