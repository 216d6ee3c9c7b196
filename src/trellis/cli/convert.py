"""`trellis convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from . import options
from .evaluation import show
from .train import exit_codes

_MODEL = (
    "A folder of transformers with a model of the Llama family (llama, mistral, qwen2, qwen3), a "
    ".gguf file of one, a .bin file of llama2.c, or a run or exported folder of ours that has "
    "attention."
)


def convert(
    model: Annotated[Path, Argument(help=_MODEL)],
    out: Annotated[Path, Option(help="The folder to write; the same command goes on with it.")],
    data: Annotated[
        Path | None,
        Option(help="Text that `trellis data prepare` wrote; without it, only import the model."),
    ] = None,
    tokenizer: Annotated[
        Path | None, Option(help="The tokenizer, where it is not beside the model.")
    ] = None,
    mixer: Annotated[str, Option(help="The mixer in place of attention.")] = "trellis",
    settings: Annotated[
        list[str] | None, Option("--set", help="A field of the mixer, such as slots=32.")
    ] = None,
    layers: Annotated[str, Option(help="Layers to convert, such as 0,2; or all.")] = "all",
    keep_attention: Annotated[
        int,
        Option(help="So many layers keep their attention: those that cost most to replace.", min=0),
    ] = 0,
    window: Annotated[
        int, Option(help="Tokens that the attention that stays sees; 0: all.", min=0)
    ] = 128,
    steps: Annotated[str, Option(help="Steps of the three stages.")] = "300,300,100",
    rates: Annotated[str, Option(help="Learning rates of the stages.")] = "1e-2,2e-3,5e-4",
    contexts: Annotated[str, Option(help="Tokens of a row in the stages.")] = "256,256,512",
    batch_tokens: Annotated[int, Option(help="Tokens of a step.", min=2)] = 4096,
    lora: Annotated[
        int,
        Option(help="Rank of what is trained beside the new mixers; 0: all weights.", min=0),
    ] = 0,
    precision: Annotated[
        str,
        Option(help="fp32, bf16 (fast on processors that have it), or auto: bf16 on a GPU."),
    ] = "auto",
    validation_tokens: Annotated[
        int, Option(help="About how many held-out tokens are measured on.", min=2)
    ] = 32768,
    seed: Annotated[int, Option(help="Draws new weights and the order of the text.", min=0)] = 0,
    threads: options.Threads = 0,
) -> dict[str, Any]:
    """Turn a pretrained Transformer into a model with a bounded memory.

    Three stages: each new mixer learns what its attention returns; the whole model learns the
    teacher's distribution of the next token; it learns longer texts. At the end the model is
    measured beside its teacher, with its memory and its windows switched off.
    """
    from transformers.utils import logging

    from ..evaluation import conversion
    from ..training.recipe import parsed_setting

    logging.disable_progress_bar()  # a bar for every model that is loaded or written
    if data is None:
        found = conversion.import_model(model, out, tokenizer)
        typer.echo(f"{found['parameters']:,} parameters, with attention as it was: {out}")
        typer.echo(f"next: trellis data prepare TEXT --tokenizer {out} --out DATA, then")
        typer.echo(f"      trellis convert {out} --data DATA --out RUN")
        return found
    fields: dict[str, Any] = {}
    for setting in settings or ():
        fields |= parsed_setting(setting)
    chosen = conversion.Conversion(
        mixer=mixer, fields=fields, keep_attention=keep_attention, window=window, lora=lora,
        layers=None if layers == "all" else options.numbers("layers", layers, 0, instead="all"),
        seed=seed, validation_tokens=validation_tokens, batch_tokens=batch_tokens,
        precision=precision,
        steps=options.numbers("steps", steps, 0), rates=_rates(rates),
        contexts=options.numbers("contexts", contexts, 2),
    )  # fmt: skip
    with exit_codes():
        report = conversion.convert(model, data, out, chosen, tokenizer, typer.echo)
    return show(report)


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--rates must be numbers separated by commas; got {text!r}") from None
