"""The fused CPU kernel of the memory, and its registration with PyTorch (library.py)."""
