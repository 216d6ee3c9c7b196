"""Fresh memory in large pages."""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import c_size_t, c_void_p

from torch import Tensor

MADV_HUGEPAGE = 14


def in_large_pages(fresh: Tensor) -> Tensor:
    """Ask Linux to back a large, untouched tensor with pages of 2 MiB.

    With pages of 4 KiB a kernel would spend up to a third of its time on page faults.
    """
    size, page = fresh.numel() * fresh.element_size(), 2**21
    if size >= 4 * page and sys.platform == "linux":
        begin = -(-fresh.data_ptr() // page) * page
        length = (fresh.data_ptr() + size - begin) // page * page
        _libc().madvise(c_void_p(begin), c_size_t(length), MADV_HUGEPAGE)  # advice: may fail
    return fresh


def blank_like(x: Tensor) -> Tensor:
    """An unfilled, contiguous tensor of the same shape, in large pages if it is large."""
    return in_large_pages(x.new_empty(x.shape))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
