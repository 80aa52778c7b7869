"""dgemm by OpenBLAS (NumPy's): the product of a tall matrix, 1 GiB, and small ones. A unit: one pass over all of it."""

import numpy

from unit import checksum, repeat

ROWS, COLUMNS, BLOCK = 1 << 17, 1 << 10, 1 << 10
random = numpy.random.default_rng(42)
tall = numpy.empty((ROWS, COLUMNS))
for start in range(0, ROWS, BLOCK):
    tall[start : start + BLOCK] = random.random((BLOCK, COLUMNS))
small = random.random((COLUMNS, 64))


def product():
    total = numpy.zeros(64)
    for start in range(0, ROWS, BLOCK):
        total += (tall[start : start + BLOCK] @ small).sum(axis=0)
    return checksum(total.tolist())


repeat(product)
