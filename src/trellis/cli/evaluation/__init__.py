"""`trellis eval`: one file per task."""

from __future__ import annotations

import typer

from . import inspection, mqar, niah, ppl, reasoning, recall, scaling

app = typer.Typer(no_args_is_help=True, help="Measure models: ours, or any of transformers.")
app.command("inspect")(inspection.inspect)
app.command("mqar")(mqar.mqar)
app.command("niah")(niah.niah)
app.command("ppl")(ppl.ppl)
app.command("reasoning")(reasoning.reasoning)
app.command("recall")(recall.recall)
app.command("scaling")(scaling.scaling)
