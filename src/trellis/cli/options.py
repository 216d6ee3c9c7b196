"""How several commands read lists of numbers and names in their options."""

from __future__ import annotations


def numbers(
    name: str, text: str, least: int = 1, most: int | None = None, instead: str = ""
) -> list[int]:
    """Whole numbers from `least` to `most`, separated by commas.

    instead: for the error, what else may be given.

    Raises:
        ValueError: they are something else.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least or (most is not None and max(found) > most):
        bounds = "" if most is None else f" from {least} to {most}"
        other = f", or {instead}" if instead else ""
        raise ValueError(
            f"--{name} must be whole numbers{bounds} separated by commas{other}; got {text!r}"
        )
    return found


def names(text: str) -> list[str]:
    """Names separated by commas, with or without spaces."""
    return [part.strip() for part in text.split(",")]
