"""`trellis eval reasoning`: the paper's table of common-sense tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import reasoning_data
from .lm_eval_model import TrellisLM
from .output import print_table
from .reasoning import TASKS, about, average, build, measure, source_of
from .reasoning_data import FILES, Items
from .record import Records
from .subject import Subject


def run(
    subjects: Iterable[Subject],
    out: Path,
    *,
    data: Path | None,
    tasks: Sequence[str] | None,
    limit: int | None,
    batch_tokens: int,
) -> list[dict[str, Any]]:
    """Measure every model on every task; print and keep.

    data: a folder of local files; else the hub is asked. tasks: all that there are, if None.

    Raises:
        FileNotFoundError: a task that was asked for has no file.
        ValueError: a task is not known, or a file is not as it should be.
    """
    names = _known(tasks)
    local = None if data is None else _local(data, names, asked=tasks is not None)
    if local is not None:
        names = list(local)
    built = build(names, local)
    settings = {name: about(built[name], limit) for name in names}
    sources = {name: source_of(built[name], local[name] if local else None) for name in names}
    records = Records(out, "reasoning")
    found = []
    for subject in subjects:
        for name in names:
            work = partial(_measure, subject, built[name], limit, batch_tokens)
            setting, note = {"task": name, **settings[name]}, {"data": sources[name]}
            found.append(records.measured(subject, setting, work, note=note))
    _print(found, names)
    return found


def _known(tasks: Sequence[str] | None) -> list[str]:
    for name in tasks or ():
        if name not in TASKS:
            raise ValueError(f"--tasks must be of {', '.join(TASKS)}; got {name!r}")
    # In the order of the table, each once.
    return [name for name in TASKS if tasks is None or name in tasks]


def _local(folder: Path, names: Sequence[str], asked: bool) -> dict[str, Items]:
    paths = {name: reasoning_data.find(folder, name) for name in names}
    for name, path in paths.items():
        if path is None:
            what = f"{name}: there is none of {', '.join(FILES[name])} in {folder}"
            if asked:
                raise FileNotFoundError(what)
            print(f"left out {what}")
    found = {name: reasoning_data.read(path, name) for name, path in paths.items() if path}
    if not found:
        raise FileNotFoundError(f"there are no files of reasoning tasks in {folder}")
    return found


def _measure(subject: Subject, task: Any, limit: int | None, batch_tokens: int) -> dict[str, Any]:
    return measure(TrellisLM(subject=subject, batch_tokens=batch_tokens), task, limit)


def _print(found: list[dict[str, Any]], names: Sequence[str]) -> None:
    """As in the paper: accuracy, here with that of likelihoods per character beside it."""
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for record in found:
        model = record["model"]["name"], record["model"]["weights_sha256"]
        rows.setdefault(model, {})[record["setting"]["task"]] = record["result"]
    sample = next(iter(rows.values()))
    columns = [
        (name, metric)
        for name in names
        for metric in ("perplexity", "acc", "acc_norm")
        if metric in sample[name]
    ]
    short = {"perplexity": "ppl", "acc": "acc", "acc_norm": "acc_n"}
    heads = [f"{TASKS[name].heading}\n{short[metric]}" for name, metric in columns]
    cells = [
        [
            model,
            *(_cell(metric, results[name][metric]) for name, metric in columns),
            _cell("acc", average(list(results.values()))),
        ]
        for (model, _), results in rows.items()
    ]
    title = (
        f"reasoning: percent; the average is that of acc over {len(names)} of {len(TASKS)} tasks"
    )
    print_table(["model", *heads, "Avg.\nacc"], cells, title)
    for record in found:
        if record["result"]["contexts_cut"]:
            print(
                f"{record['model']['name']}, {record['setting']['task']}: "
                f"{record['result']['contexts_cut']:,} contexts are longer than the model reads; "
                "their beginnings were cut, as lm-eval does"
            )


def _cell(metric: str, value: float) -> str:
    if metric != "perplexity":
        return f"{100 * value:.2f}"
    return f"{value:.2f}" if value < 1e5 else f"{value:.2e}"
