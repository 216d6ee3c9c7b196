"""Cases of the common suite."""

CASES = {}
