"""Measurements beside peers, in one run: `trellis bench`."""
