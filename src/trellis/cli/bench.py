"""`trellis bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from .. import machine
from ..files import write_json
from .options import Program, Threads, names, numbers

app = Program(no_args_is_help=True, help="Measure time and memory, beside peers in one run.")
Out = Annotated[
    Path | None, Option(help="A folder for the record, NAME.json, and its figure if any.")
]
Lengths = Annotated[str, Option(help="Tokens, separated by commas.")]
Contexts = Annotated[str, Option(help="Tokens read before a timed decoding step.")]
Rounds = Annotated[int, Option(help="How many times everything is timed.", min=1)]


@app.command("ops")
def bench_ops(
    lengths: Lengths = "2048,8192",
    contexts: Contexts = "1024,65536",
    memory: Annotated[int, Option(help="Tokens of the memory measurement.")] = 8192,
    rounds: Rounds = 5,
    threads: Threads = 0,
    out: Out = None,
) -> Any:
    """The memory op beside attention, Gated DeltaNet and Mamba2; every mixer as a whole layer."""
    from ..bench import ops

    record = Record("bench-ops")
    result = ops.run(numbers("lengths", lengths), numbers("contexts", contexts), memory, rounds,
                     record.say)  # fmt: skip
    return record.keep(out, result, ops.draw)


@app.command("chunked")
def bench_chunked(
    lengths: Lengths = "2048,8192",
    rounds: Rounds = 3,
    threads: Threads = 2,
    out: Out = None,
) -> Any:
    """The portable memory op, in plain PyTorch, beside attention."""
    from ..bench import ops

    record = Record("bench-chunked")
    ops.run_portable(numbers("lengths", lengths), rounds, record.say)
    return record.keep(out)


@app.command("model")
def bench_model(
    preset: Annotated[str, Option(help="Model size.")] = "125m",
    lengths: Annotated[str, Option(help="Training contexts.")] = "512,2048",
    rounds: Rounds = 3,
    threads: Threads = 0,
    out: Out = None,
) -> Any:
    """Training of a whole model, with Trellis and with attention."""
    from ..bench import model

    record = Record("bench-model")
    result = model.run(preset, numbers("lengths", lengths), rounds, record.say)
    return record.keep(out, result)


@app.command("decoding")
def bench_decoding(
    size: Annotated[str, Option(help="A preset such as 125m, or demo.")] = "demo",
    contexts: Contexts = "1000,10000,100000",
    batches: Annotated[str, Option(help="Sequences of a step, up to 16.")] = "1",
    rounds: Annotated[int, Option(help="Tokens that are timed.")] = 50,
    threads: Threads = 0,
    out: Out = None,
) -> Any:
    """The time of the next token, with Trellis and with attention, natively and in PyTorch."""
    from ..bench import decoding

    record = Record(f"bench-decoding-{size}")
    result = decoding.run(size, numbers("contexts", contexts),
                          numbers("batches", batches, most=16), rounds, record.say)  # fmt: skip
    return record.keep(out, result, decoding.draw)


@app.command("weights")
def bench_weights(
    run: Annotated[Path, Argument(help="A run, or an exported model.")],
    text: Annotated[Path, Argument(help="A text file that the model was not trained on.")],
    tokens: Annotated[int, Option(help="Tokens of each of 16 sequences.")] = 512,
    threads: Threads = 0,
    out: Out = None,
) -> Any:
    """What weights in bf16 cost: the loss of a model that reads token by token, in each decoder."""
    from ..bench import decoding

    record = Record("bench-weights")
    return record.keep(out, decoding.run_weights(run, text, tokens, record.say))


@app.command("serve")
def bench_serve(
    size: Annotated[str, Option(help="A preset such as 125m, or demo.")] = "demo",
    mixer: Annotated[str, Option(help="Names separated by commas.")] = "trellis,transformer",
    sessions: Annotated[str, Option(help="Sessions at once, separated by commas.")] = "1,8,32",
    tokens: Annotated[int, Option(help="Tokens of an answer.", min=1)] = 128,
    context: Annotated[int, Option(help="Tokens of the resumed session.", min=1)] = 100_000,
    idle: Annotated[int, Option(help="Idle sessions to measure.", min=1)] = 64,
    rounds: Rounds = 3,
    peer: Annotated[bool, Option(help="Measure `transformers serve`, too.")] = True,
    out: Out = None,
) -> Any:
    """Sessions over HTTP: batching, resuming and idling, with Trellis and with attention."""
    from ..bench import serve

    record = Record(f"bench-serve-{size}")
    result = serve.run(size, names(mixer), numbers("sessions", sessions, most=64), tokens, context,
                       idle, rounds, peer, record.say)  # fmt: skip
    return record.keep(out, result)


@app.command("busy")
def bench_busy(
    seconds: Annotated[float, Option(help="Time of each measurement.")] = 3.0,
    rounds: Rounds = 3,
    threads: Threads = 0,
    out: Out = None,
) -> Any:
    """Training and decoding on an idle machine, and beside another program on one core."""
    from ..bench import decoding

    record = Record("bench-busy")
    return record.keep(out, decoding.run_busy(seconds, rounds, record.say))


@app.command("training")
def bench_training(
    recipe: Annotated[Path, Argument(help="A recipe (.toml), for its model and batch.")],
    mixers: Annotated[str, Option(help="Names separated by commas.")] = "trellis,transformer",
    vocab_size: Annotated[int, Option(help="Tokens in the vocabulary.")] = 8192,
    rounds: Rounds = 5,
    threads: Threads = 0,
    out: Out = None,
) -> Any:
    """Training steps of a recipe's model with several mixers, and where their time goes."""
    from ..bench import model
    from ..training.recipe import load_recipe

    record = Record("bench-training")
    model.run_training(load_recipe(recipe), names(mixers), vocab_size, rounds, record.say)
    return record.keep(out)


@app.command("forecast")
def bench_forecast(
    rows: Annotated[int, Option(help="Rows that the stream observes.", min=300)] = 1_000_000,
    marks: Annotated[int, Option(help="How often it is measured on the way.", min=1)] = 10,
    channels: Annotated[int, Option(help="Series of the stream.", min=1)] = 7,
    window: Annotated[int, Option(help="Rows that its rival reads at every row.", min=8)] = 512,
    threads: Threads = 0,
    out: Out = None,
) -> Any:
    """A stream of forecasts: time of a row and memory over the rows, beside reading a window."""
    from ..bench import forecasting

    record = Record("bench-forecast")
    return record.keep(
        out, forecasting.run(rows, marks, channels, window, record.say), forecasting.draw
    )


@app.command("stream")
def bench_stream(
    tokens: Annotated[int, Option(help="Tokens to read.", min=1)] = 1_000_000,
    points: Annotated[int, Option(help="Rows of the table.", min=1)] = 20,
    figure: Annotated[Path | None, Option(help="A PNG file to draw.")] = None,
    threads: Threads = 2,
    out: Out = None,
) -> Any:
    """A small model reads a million tokens: the size of its cache and of the process stay flat."""
    from ..bench import model

    record = Record("bench-stream")
    model.run_stream(tokens, points, figure, record.say)
    return record.keep(out)


@app.command("gpu")
def bench_gpu(
    batches: Annotated[str, Option(help="Sequences, separated by commas.")] = "1,8,32",
    lengths: Lengths = "2048,8192,32768",
    heads: Annotated[int, Option(help="Heads of the ops.", min=1)] = 12,
    size: Annotated[int, Option(help="Size of keys, values and codes.", min=1, max=128)] = 64,
    preset: Annotated[str, Option(help="Size of the whole model; none leaves it out.")] = "125m",
    rounds: Rounds = 20,
    tune: Annotated[bool, Option("--tune", help="Try other configurations of kernels.")] = False,
    out: Out = None,
) -> None:
    """The memory on a GPU beside attention, Gated DeltaNet, GSA and TTT; every kernel; a model."""
    from ..bench import gpu

    record = Record("bench-gpu")
    sizes = (numbers("batches", batches), numbers("lengths", lengths), heads, size)
    result = gpu.run(*sizes, preset, rounds, tune, record.say)
    record.keep(out, result, gpu.draw)


@app.command("registers")
def bench_registers(
    architectures: Annotated[str, Option(help="Such as 80,90,100.")] = "80,90,100",
    size: Annotated[int, Option(help="Size of keys, values and codes.", min=1, max=128)] = 64,
    cases: Annotated[str, Option(help="Separated by semicolons.")] = "exact, encode",
    out: Out = None,
) -> None:
    """The memory's GPU kernels compiled without a GPU: registers, spills; estimates of times."""
    from ..bench import registers

    record = Record("bench-registers")
    chosen = [case.strip() for case in cases.split(";")]
    compiled = registers.run(numbers("architectures", architectures), size, chosen, record.say)
    estimates = registers.estimates(8, 12, 2048, size, record.say)
    record.keep(out, {"compiled": compiled, "estimates": estimates})


@app.command("rounding")
def bench_rounding(lengths: Lengths = "1024,8192", threads: Threads = 0, out: Out = None) -> None:
    """What the roundings of the bf16 GPU kernels cost, emulated, beside Gated DeltaNet's."""
    from ..bench import rounding

    record = Record("bench-rounding")
    record.keep(out, rounding.run(numbers("lengths", lengths), record.say))


class Record:
    """Prints what a benchmark says, and keeps it beside the raw result in NAME.json."""

    def __init__(self, name: str):
        self.name = name
        self.printed: list[str] = []

    def say(self, line: str = "") -> None:
        self.printed += line.splitlines()
        typer.echo(line)

    def keep(self, folder: Path | None, result: Any = None, draw: Any = None) -> dict[str, Any]:
        """The record. Writes it into the folder, and the figure that `draw(result, path)` draws."""
        command = ["trellis", *sys.argv[1:]]
        record = {"command": command, "machine": machine.describe(), "printed": self.printed,
                  "result": result}  # fmt: skip
        if folder is None:
            return record
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{self.name}.json", record)
        if draw is not None:
            draw(result, folder / f"{self.name}.png")
        typer.echo(f"\nwritten to {folder}")
        return record
