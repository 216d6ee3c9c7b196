"""Training text: needles in haystacks, with their answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from ..files import whole_file
from .haystack import read_haystack
from .needles import Needles, check_variants
from .tokenizer import load_tokenizer


def write_needles(
    out: Path,
    variants: Sequence[str],
    lengths: Sequence[int],
    items: int,
    haystack: Sequence[str],
    *,
    tokenizer: str = "bytes",
    seed: int = 0,
    force: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Write a jsonl file of `items` documents, a variant, length and depth drawn for each.

    A document does not depend on how many there are. Returns the bytes that were written.

    Raises FileExistsError if `out` exists and `force` is not set; ValueError if it is a folder or
    an argument is out of range; what `read_haystack` and `load_tokenizer` raise.
    """
    check_variants(variants)
    if out.is_dir():
        raise ValueError(f"--out must be a file; {out} is a folder")
    if out.exists() and not force:
        raise FileExistsError(f"{out} exists: give --out a name that is free, or --force")
    made = Needles(load_tokenizer(tokenizer), read_haystack(haystack), seed, "train")
    for variant in variants:
        made.item(variant, min(lengths), 0)  # a length that is too short is named at once
    with whole_file(out) as file:
        for index in range(items):
            rng = random.Random(f"{seed} {index}")
            item = made.item(rng.choice(list(variants)), rng.choice(list(lengths)), index)
            line = json.dumps({"text": f"{item.prompt} {item.value}."})
            file.write(line.encode() + b"\n")
            progress()
        return file.tell()
