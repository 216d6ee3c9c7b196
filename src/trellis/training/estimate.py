"""The memory that a run needs, counted before it is started: what cannot fit is refused."""

from __future__ import annotations

import torch

from .. import machine
from ..models.presets import count_parameters
from .distributed import Processes
from .recipe import Recipe

#: Keys of [model] that say how large the model is.
SIZES = (
    "start", "preset", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size",
)  # fmt: skip
#: Bytes of a weight in fp32 with its gradient and AdamW's two moments.
BYTES_OF_A_WEIGHT = 16
#: Bytes of the place of a row in the text: a pair of Python objects.
BYTES_OF_A_ROW = 96


def least_memory(recipe: Recipe, vocab_size: int, group: Processes) -> dict[str, tuple[int, str]]:
    """What takes memory in this process: its least bytes, and the keys that they depend on.

    Less is not possible, and a run takes more: of activations, only the input of each layer for one
    row is counted.
    """
    model, train = recipe.model, recipe.train
    config = model.config(vocab_size)
    shares = group.world if train.strategy == "fsdp" else 1
    tokens = recipe.data.context // train.sequence_parallel
    activations = 4 * tokens * config.num_hidden_layers * config.hidden_size
    sizes = [f"model.{key}" for key in SIZES if getattr(model, key) is not None]
    rows = "train.rows" if train.rows is not None else "train.batch_tokens"
    return {
        "weights, gradients and moments": (
            BYTES_OF_A_WEIGHT * count_parameters(config) // shares,
            f"{', '.join(sizes)} and a vocabulary of {vocab_size:,} tokens",
        ),
        "activations of a row": (activations, f"data.context, {', '.join(sizes)}"),
        "the places of a batch's rows": (BYTES_OF_A_ROW * recipe.rows, rows),
    }


def memory_of(device: torch.device) -> int:
    """The bytes of memory that a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return machine.total_bytes()


def check_fits(recipe: Recipe, vocab_size: int, group: Processes) -> None:
    """Raises ValueError, naming the keys, if a run needs more memory than there is."""
    needs = least_memory(recipe, vocab_size, group)
    total, have = sum(size for size, _ in needs.values()), memory_of(group.device)
    if total > have:
        what, (size, keys) = max(needs.items(), key=lambda part: part[1][0])
        raise ValueError(
            f"the run needs at least {machine.gib(total)} of memory, but there are "
            f"{machine.gib(have)}: {what} take {machine.gib(size)}, by {keys}"
        )
