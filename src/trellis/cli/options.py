"""Options that several commands read in one way."""

from __future__ import annotations


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"--{name} must be whole numbers separated by commas; got {text!r}")
    return found
