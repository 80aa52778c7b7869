"""Lookups as XSBench makes them: an energy is searched in a sorted grid of 128 MiB; then 8 of 64 materials are read at
that place, each in a table of 16 MiB of its own. A unit: 2^18 lookups."""

import numpy

from unit import checksum, repeat

GRID, MATERIALS, READS, CHUNK, CHUNKS = 1 << 24, 64, 8, 1 << 14, 16
random = numpy.random.default_rng(42)
grid = numpy.sort(random.random(GRID))
# A value of 4 bytes for four points of the grid.
table = numpy.empty((MATERIALS, GRID // 4), numpy.float32)
for material in range(MATERIALS):
    table[material] = random.random(GRID // 4, numpy.float32)


def lookups():
    random = numpy.random.default_rng(7)
    total = 0.0
    for _ in range(CHUNKS):
        at = numpy.minimum(numpy.searchsorted(grid, random.random(CHUNK)), GRID - 1) // 4
        materials = random.integers(0, MATERIALS, (CHUNK, READS))
        total += float(table[materials, at[:, None]].sum(dtype=numpy.float64))
    return checksum(total)


repeat(lookups)
