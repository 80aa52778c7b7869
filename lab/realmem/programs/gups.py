"""GUPS: random updates of 1 GiB, nine of ten of them in a hot tenth that lies in the middle. A unit: a million updates,
twice, so that the table is afterwards as it was."""

import numpy

from unit import checksum, repeat

WORDS, CHUNK, CHUNKS = 1 << 27, 1 << 16, 16
table = numpy.arange(WORDS, dtype=numpy.uint64)


def updates():
    hot = numpy.uint64(WORDS // 10)
    for _ in range(2):
        random = numpy.random.default_rng(7)
        for _ in range(CHUNKS):
            drawn = random.integers(0, 1 << 63, CHUNK, numpy.uint64)
            at = drawn % numpy.uint64(WORDS)
            is_hot = random.random(CHUNK) < 0.9
            at[is_hot] = at[is_hot] % hot + numpy.uint64(WORDS // 2)
            table[at] ^= drawn
    # The last ones, which are as they were.
    return checksum(int(table[at].sum()))


repeat(updates)
