"""Kernels in C++ for the CPU: their build (build.py), and the pointwise ones (pointwise.py)."""
