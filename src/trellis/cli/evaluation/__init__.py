"""`trellis eval`: one file per task."""

from __future__ import annotations

import typer

from . import mqar, niah, ppl, reasoning, recall

app = typer.Typer(no_args_is_help=True, help="Measure models: ours, or any of transformers.")
app.command("mqar")(mqar.mqar)
app.command("niah")(niah.niah)
app.command("ppl")(ppl.ppl)
app.command("reasoning")(reasoning.reasoning)
app.command("recall")(recall.recall)
