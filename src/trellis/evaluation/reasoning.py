"""Common-sense tasks through lm-eval: its prompts, its metrics, its own task configurations."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .lm_eval_model import TrellisLM
from .reasoning_data import Items
from .texts import hash_of


class Known(NamedTuple):
    """A task: its name and its folder in lm-eval, and its heading in the paper's table."""

    name: str
    folder: str
    heading: str


TASKS = {
    "lambada": Known("lambada_openai", "lambada", "LMB."),
    "piqa": Known("piqa", "piqa", "PIQA"),
    "hellaswag": Known("hellaswag", "hellaswag", "Hella."),
    "winogrande": Known("winogrande", "winogrande", "Wino."),
    "arc_easy": Known("arc_easy", "arc", "ARC-e"),
    "arc_challenge": Known("arc_challenge", "arc", "ARC-c"),
    "siqa": Known("social_iqa", "siqa", "SIQA"),
}
METRICS = ("acc", "acc_norm", "perplexity")


def build(names: Sequence[str], local: Mapping[str, Items] | None = None) -> dict[str, Any]:
    """lm-eval's tasks, on the hub's data or on rows that are here, in which case nothing is
    fetched.

    Raises:
        ValueError: the hub does not give the data.
    """
    import lm_eval.tasks

    # Only the folders of these tasks: the index of all of them takes long to read.
    home = Path(lm_eval.tasks.__file__).parent
    folders = sorted({str(home / TASKS[name].folder) for name in names})
    with quiet():
        manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=folders)
        found = {}
        for name in names:
            known = TASKS[name].name
            entry = {"task": known, **(_instead(name, local[name]) if local else {})}
            try:
                # A member of a group is the one form in which a known task takes other fields.
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
    """What takes the place of the hub's data in a task's configuration."""
    split = "test" if name in ("lambada", "arc_easy", "arc_challenge") else "validation"
    # Without other splits no examples are drawn from them.
    instead: dict[str, Any] = {
        f"{one}_split": one if one == split else None for one in ("training", "validation", "test")
    }
    instead["custom_dataset"] = _dataset(split, items.rows)
    return {**instead, "process_docs": None} if items.cleaned else instead


def _dataset(split: str, rows: list[dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def load(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {split: Dataset.from_list(rows)}

    return load


def source_of(task: Any, items: Items | None = None) -> str:
    """Where a task's data come from: the name of a file, or of a dataset of the hub."""
    return items.source if items else f"hub:{task.config.dataset_path}"


def about(task: Any, limit: int | None = None) -> dict[str, Any]:
    """What the result of a task depends on: lm-eval, the task's version, the data."""
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
    with quiet(), templates_once():
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
    """Of every item that was measured, the log-likelihood of each choice."""
    found: dict[int, list[float]] = {}
    for instance in sorted(task.instances, key=lambda one: (one.doc_id, one.idx)):
        found.setdefault(instance.doc_id, []).append(float(instance.resps[0][0]))
    return list(found.values())


def average(results: Sequence[Mapping[str, Any]]) -> float:
    """The mean of the accuracies, each task counting once."""
    return sum(result["acc"] for result in results) / len(results)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what lm-eval tells of its steps."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def templates_once() -> Iterator[None]:
    """lm-eval compiles the template of a prompt anew for every item, which takes most of its time.
    Here each is compiled once."""
    from lm_eval.utils import env

    env.from_string = functools.cache(env.from_string)
    try:
        yield
    finally:
        del env.from_string  # the method of the class is seen again
