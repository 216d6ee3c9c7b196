"""What a person sees of a run: metrics.jsonl, the progress line, TensorBoard.

A record of metrics.jsonl has its `step`, what was measured, and under `timing` all that differs
from run to run; without `timing`, an interrupted and resumed run writes the same bytes.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from ..files import write_whole

FILE = "metrics.jsonl"


class Metrics:
    """Appends to a run's metrics. On resuming, records after the checkpoint's step are dropped."""

    def __init__(self, run: Path, after: int, tensorboard: bool):
        self.path = run / FILE
        if self.path.exists():
            kept = [json.dumps(r) + "\n" for r in read_metrics(run) if r["step"] <= after]
            write_whole(self.path, "".join(kept).encode())
        self.file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self.events = _events(run, after) if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.events is not None:
            flat = {**record, **record.get("timing", {})}
            for name, value in flat.items():
                if isinstance(value, (int, float)) and name != "step":
                    self.events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.file.close()
        if self.events is not None:
            self.events.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All records; a last line that was cut off in writing is left out.

    Raises:
        FileNotFoundError: the run has none.
        ValueError: a line other than the last is not JSON.
    """
    path = run / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run} is not a run: it has no {FILE}")
    records = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
    return records


def check_tensorboard() -> None:
    """Raises ValueError where the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "log.tensorboard needs the package tensorboard: pip install "
            "'trellis-memory[tensorboard]', or set log.tensorboard=false"
        )


def _events(run: Path, after: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run / "tensorboard"), purge_step=after + 1)


class ProgressLine:
    """One line per record on a file, one line that is written over on a terminal."""

    def __init__(self, steps: int, out: TextIO | None = None):
        self.steps = steps
        self.out = out or sys.stdout
        self.over = self.out.isatty()
        self.open = False  # whether the cursor stands at the end of a progress line

    def show(self, record: dict[str, Any]) -> None:
        timing, loss = record["timing"], record["loss"]
        parts = [
            f"step {record['step']:>{len(str(self.steps))}}/{self.steps}",
            "no loss" if loss is None else f"loss {loss:.4f}  perplexity {perplexity(loss):,.2f}",
            f"{timing['tokens_per_second']:,.0f} tokens/s",
            f"{timing['utilisation']:.0%} of peak",
            f"{timing['memory_bytes'] / 2**30:.2f} GiB",
            f"{clock(timing['seconds_left'])} left",
        ]
        if record.get("bad_steps"):
            parts.append(f"{record['bad_steps']} skipped")
        line = "  ".join(parts)
        if self.over:  # a line that wraps could not be written over
            line = line[: shutil.get_terminal_size().columns - 1]
        self.out.write(f"\r\033[K{line}" if self.over else f"{line}\n")
        self.out.flush()
        self.open = self.over

    def say(self, text: str) -> None:
        self.out.write(f"\n{text}\n" if self.open else f"{text}\n")
        self.out.flush()
        self.open = False


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def clock(seconds: float) -> str:
    """3:07, or 1:02:33"""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
