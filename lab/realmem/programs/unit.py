"""Runs a unit of work again and again, and prints a line `unit SECONDS CHECKSUM` after each one.

Before: the program has built its data. After: this never returns; `batch.rs` ends the process. Promise: equal units
have equal checksums as long as no byte of the memory changes.
"""

import ctypes
import gc
import hashlib
import time


def checksum(*parts):
    """A checksum of the text of all parts."""
    return hashlib.sha256("|".join(map(repr, parts)).encode()).hexdigest()[:16]


def repeat(unit):
    gc.collect()
    # `realmem.c` frees what only the building of the data needed.
    ctypes.CDLL(None).realmem_trim()
    while True:
        start = time.monotonic()
        found = unit()
        print("unit", f"{time.monotonic() - start:.6f}", found, flush=True)
