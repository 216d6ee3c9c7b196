"""What is measured of a run: the loss on held-out text, metrics.jsonl, the progress line.

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

import torch
from torch import nn

from ..data.batches import assemble, validation_windows
from ..files import parse_json, write_whole
from .distributed import Processes

FILE = "metrics.jsonl"


@torch.no_grad()
def validate(
    called: nn.Module, stream: Any, context: int, tokens: int, rows: int, group: Processes
) -> dict[str, float]:
    """The mean loss over about `tokens` tokens of a stream, in windows of `context` tokens.

    The windows are spread evenly over the stream, so that every call measures the same text. The
    processes share them, `rows` windows at a time; documents in a window are read separately.
    """
    context = min(context, stream.tokens - 1)
    starts = validation_windows(stream, context, tokens)
    total = torch.zeros(2, dtype=torch.float64)  # the summed loss, and the number of targets
    called.eval()
    try:
        for begin in range(0, len(starts), rows * group.world):
            mine = starts[begin + group.rank * rows :][:rows]
            # A sharded model is called by all processes equally often.
            places = [(stream, start) for start in mine or starts[:1]]
            batch = assemble(places, context).to(group.device)
            loss = called(
                **batch.model_inputs(), num_items_in_batch=1, logits_to_keep=1, use_cache=False
            ).loss
            if mine:
                total += torch.tensor([float(loss), batch.predicted], dtype=torch.float64)
    finally:
        called.train()
    summed, count = group.summed(total).tolist()
    loss = summed / count
    return {
        "validation_loss": loss,
        "validation_perplexity": perplexity_of(loss),
        "validation_bits_per_byte": loss / math.log(2) * stream.tokens / max(stream.bytes, 1),
    }


def perplexity_of(loss: float) -> float:
    """exp(loss), for a loss in nats per token; at most exp(700), which is still finite."""
    return math.exp(min(loss, 700.0))


def perplexity_text(loss: float) -> str:
    """The perplexity for a progress line: "7.39", "1,234.50" or "1.0e+12"."""
    perplexity = perplexity_of(loss)
    return f"{perplexity:.1e}" if perplexity >= 1e9 else f"{perplexity:,.2f}"


class Metrics:
    """Appends to a run's metrics. On resuming, records after the checkpoint's step are dropped."""

    def __init__(self, run: Path, after: int, tensorboard: bool):
        self.path = run / FILE
        if self.path.exists():
            kept = [json.dumps(r) + "\n" for r in read_metrics(run) if r["step"] <= after]
            write_whole(self.path, "".join(kept).encode())
        self.file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self.events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(run / "tensorboard"), purge_step=after + 1)

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
    """All records of a run; a last line that was cut off in writing is left out.

    Raises:
        FileNotFoundError: the folder has no metrics.
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
            records.append(parse_json(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
    return records


def check_tensorboard() -> None:
    """Raises ValueError if the package tensorboard is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "log.tensorboard needs the package tensorboard: pip install "
            "'trellis-memory[tensorboard]', or set log.tensorboard=false"
        )


class ProgressLine:
    """The progress of a run: one line that is overwritten on a terminal, else a line per record.

    of_text: whether the loss is that of text, in nats per token, which has a perplexity.
    """

    def __init__(self, steps: int, out: TextIO | None = None, of_text: bool = True):
        self.steps, self.of_text = steps, of_text
        self.out = out or sys.stdout
        self.over = self.out.isatty()
        self.open = False  # whether the cursor stands at the end of a progress line

    def show(self, record: dict[str, Any]) -> None:
        timing, loss = record["timing"], record["loss"]
        parts = [
            f"step {record['step']:>{len(str(self.steps))}}/{self.steps}",
            "no loss" if loss is None else f"loss {loss:.4f}",
            *([f"perplexity {perplexity_text(loss)}"] if self.of_text and loss is not None else []),
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
        """Prints a line of its own, below the progress line if there is one."""
        self.out.write(f"\n{text}\n" if self.open else f"{text}\n")
        self.out.flush()
        self.open = False


def clock(seconds: float) -> str:
    """Seconds as "3:07" (minutes and seconds) or "1:02:33" (with hours)."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
