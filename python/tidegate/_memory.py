"""What the command line asks of the C library's memory allocator."""

from __future__ import annotations

import ctypes
import os

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST, _LARGEST_OF_OLDER_GLIBC = 1 << 30, 32 << 20  # bytes


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees. A training step on the CPU frees its
    activations and asks for as much at the next one; by default glibc gives most of it back to the
    system in between, which hands it out anew page by page, zeroed (docs/training_memory.md).

    Returns False, with nothing changed, where the environment sets malloc already or the C library
    has no such setting.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    from_heap = mallopt(_M_MMAP_THRESHOLD, _LARGEST) or mallopt(
        _M_MMAP_THRESHOLD, _LARGEST_OF_OLDER_GLIBC
    )
    return bool(from_heap and mallopt(_M_TRIM_THRESHOLD, _NEVER))
