"""The loss on held-out text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..data.batches import Stream, assemble, validation_windows
from .distributed import Processes


@torch.no_grad()
def validate(
    called: nn.Module, stream: Any, context: int, tokens: int, rows: int, group: Processes
) -> dict[str, float]:
    """Mean loss over windows of `context` tokens, documents apart, about `tokens` in all.

    Windows are spread evenly over the stream, so that two calls measure on the same text. Processes
    share them.
    """
    context = min(context, stream.tokens - 1)
    starts = validation_windows(stream, context, tokens)
    rounds = math.ceil(len(starts) / (rows * group.world))
    total = torch.zeros(2, dtype=torch.float64)
    called.eval()
    try:
        for number in range(rounds):
            begin = (number * group.world + group.rank) * rows
            mine = starts[begin : begin + rows]
            # A sharded model is called by all processes equally often.
            summed, count = _loss(called, stream, mine or starts[:1], context, group.device)
            if mine:
                total += torch.tensor([summed, count], dtype=torch.float64)
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
    """Of nats per token; never so large that it is no number."""
    return math.exp(min(loss, 700.0))


def _loss(
    called: nn.Module, stream: Stream, starts: list[int], context: int, device: torch.device
) -> tuple[float, int]:
    """The summed loss of some windows, and how many tokens it is of."""
    batch = assemble([(stream, start) for start in starts], context).to(device)
    loss = called(
        **batch.model_inputs(), num_items_in_batch=1, logits_to_keep=1, use_cache=False
    ).loss
    return float(loss), batch.predicted
