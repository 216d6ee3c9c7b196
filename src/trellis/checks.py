"""Checks of arguments: every error names the argument, what it was and what it must be."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def did_you_mean(
    name: object, known: Iterable[str], *, cutoff: float = 0.6, form: str = "{!r}"
) -> str:
    """A hint to append to an error, such as "; did you mean 'slots'?"; empty if nothing is near.

    cutoff: how alike names must be, 0 to 1. form: how the name that was found is written.
    """
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f"; did you mean {form.format(near[0])}?" if near else ""


def streams(
    name: str, value: Sequence[str], allowed: Sequence[str] = ("q", "k", "v")
) -> tuple[str, ...]:
    chosen = tuple(value)
    if isinstance(value, str) or not set(chosen) <= set(allowed):
        listed = ", ".join(repr(stream) for stream in allowed[:-1])
        raise ValueError(
            f"{name} must be a list of some of {listed} and {allowed[-1]!r}; got {value!r}"
        )
    return chosen


def at_least(
    name: str, value: float | None, least: float, *, whole: bool = True, optional: bool = False
) -> None:
    """optional: None is accepted."""
    if optional and value is None:
        return
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or value is None or not least <= value < math.inf:
        kind = "whole number" if whole else "number"
        raise ValueError(f"{name} must be a {kind} of at least {least}; got {value!r}")


def number_range(
    name: str, value: object, least: float, *, open_end: bool = False
) -> tuple[float, float]:
    """(low, high) with least < low <= high (least <= low with `open_end`), both finite."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    numbers = len(pair) == 2 and all(isinstance(x, (int, float)) and math.isfinite(x) for x in pair)
    if not numbers or not (pair[0] >= least if open_end else pair[0] > least) or pair[0] > pair[1]:
        sign = "<=" if open_end else "<"
        raise ValueError(f"{name} must be a range {least:g} {sign} low <= high; got {value!r}")
    return pair[0], pair[1]


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false; got {value!r}")


def number(name: str, value: object) -> None:
    finite = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not finite or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{name} must be a finite number; got {value!r}")


def positive(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number above 0; got {value!r}")


def share(name: str, value: object) -> None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not known or not 0 <= value <= 1:  # type: ignore[operator]
        raise ValueError(f"{name} must be a share from 0 to 1; got {value!r}")


def floats(**tensors: Tensor) -> None:
    device = None
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name} must be of a floating-point type (fp16, bf16, fp32, fp64); "
                f"got {tensor.dtype}"
            )
        if device is not None and tensor.device != device:
            raise ValueError(f"{name} must be on {device} like the rest; got {tensor.device}")
        device = tensor.device


def present(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Of optional tensors those that were given."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def shape(name: str, tensor: Tensor, expected: Sequence[int], letters: str) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(
            f"{name} must have shape {letters} = {list(expected)}; got {list(tensor.shape)}"
        )


def token_ids(name: str, ids: Tensor, vocabulary: int) -> None:
    """ids must be whole numbers [B, T] of tokens that the vocabulary has."""
    dimensions(name, ids, "[B,T]")
    if ids.dtype not in (torch.int64, torch.int32):  # what an embedding takes
        raise ValueError(
            f"{name} must be whole numbers in int64 or int32, the ids of tokens; got {ids.dtype}"
        )
    if ids.is_meta or torch.compiler.is_compiling() or not ids.numel():
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"{name} must be ids of tokens from 0 to {vocabulary - 1}; got ids from {low} to {high}"
        )


def dimensions(name: str, tensor: Tensor, letters: str) -> None:
    if tensor.dim() != len(letters.split(",")):
        raise ValueError(f"{name} must have shape {letters}; got {list(tensor.shape)}")


def sizes(**given: tuple[Tensor | None, str]) -> dict[str, int]:
    """Checks tensors against shapes in letters, and returns the size that each letter stands for.

    sizes(q=(q, "B,T,H,K"), v=(v, "B,T,H,V")) gives {"B": 2, "T": 9, "H": 3, "K": 8, "V": 5}. A
    letter has the same size in every tensor; the first tensor that has it decides. A batch may have
    no sequences (B = 0) or no tokens (T = 0); every other size is at least 1. "?" behind the
    letters, as in "B,T,H?", stands for an optional argument, which may be None.
    """
    found: dict[str, int] = {}
    needed = {k: x for k, (x, letters) in given.items() if x is not None or letters[-1] != "?"}
    floats(**needed)  # type: ignore[arg-type]
    for name, tensor in needed.items():
        assert tensor is not None
        letters = given[name][1].removesuffix("?")
        dimensions(name, tensor, f"[{letters}]")
        each = letters.split(",")
        for letter, size in zip(each, tensor.shape):
            if size == 0 and letter not in ("B", "T"):
                leading = "B and T" if "T" in letters else "B"
                raise ValueError(
                    f"{name} must have shape [{letters}] with sizes of at least 1 behind "
                    f"{leading}; got {list(tensor.shape)}"
                )
            if found.setdefault(letter, size) != size:
                expected = [found.get(other, n) for other, n in zip(each, tensor.shape)]
                shape(name, tensor, expected, f"[{letters}]")
    return found


def state(
    name: str,
    given: Tensor | None,
    expected: Sequence[int],
    letters: str,
    like: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """A tensor of an initial state, checked, in the dtype of the computation; zeros if it is None.

    like: an input of the op, on whose device the state must be.
    """
    if given is None:
        return torch.zeros(tuple(expected), dtype=dtype, device=like.device)
    floats(**{"input": like, name: given})
    shape(name, given, expected, letters)
    return given.to(dtype)


def parts(name: str, given: object, counts: Sequence[int], what: str) -> tuple[Any, ...]:
    """The parts of a state given as a tuple or a list. counts: how many parts it may have."""
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"{name} must be {what}; got {type(given).__name__}")
    if len(given) not in counts:
        raise TypeError(f"{name} must be {what}; got {type(given).__name__} of {len(given)}")
    return tuple(given)


def offsets(offset: Tensor, minibatch: int) -> list[int]:
    """How many tokens of its mini-batch each sequence has read, as numbers; zeros for meta."""
    if not isinstance(offset, Tensor):
        raise TypeError(f"initial_state.offset must be a tensor; got {type(offset).__name__}")
    if offset.is_floating_point() or offset.dtype == torch.bool:
        raise TypeError(f"initial_state.offset must be of an integer type; got {offset.dtype}")
    if offset.is_meta:  # a tensor without numbers
        return [0] * len(offset)
    found = [int(o) for o in offset.tolist()]
    if any(not 0 <= o < minibatch for o in found):
        raise ValueError(
            f"initial_state.offset must lie in 0 .. minibatch - 1 = {minibatch - 1}; got "
            f"{found}. Was the state made with another minibatch?"
        )
    return found


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any input is, else fp32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def sequences(batch: int, cu_seqlens: Tensor | None, device: torch.device) -> int:
    if cu_seqlens is None:
        return batch
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor; got {got}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            "cu_seqlens must have shape [N+1], the bounds of N packed sequences; "
            f"got {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens must be on {device}; got {cu_seqlens.device}")
    if batch != 1:
        raise ValueError(f"with cu_seqlens the batch size must be 1 (one packed row); got {batch}")
    return cu_seqlens.shape[0] - 1


def bounds(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The bounds of a pack of `tokens` tokens as numbers."""
    if cu_seqlens.is_meta:
        raise ValueError("cu_seqlens must hold numbers; got a tensor on meta, which has none")
    found = [int(bound) for bound in cu_seqlens.tolist()]
    falls = any(after < before for before, after in zip(found, found[1:]))
    if found[0] != 0 or found[-1] != tokens or falls:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {tokens}; got {found}"
        )
    return found
