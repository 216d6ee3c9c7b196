"""The fused CPU kernel: its build (build.py) and its registration with PyTorch (library.py)."""
