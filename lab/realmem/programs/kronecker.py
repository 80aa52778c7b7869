"""A Kronecker graph with Graph500's probabilities, as a matrix of SciPy's."""

import numpy
import scipy.sparse

CHUNK = 1 << 20
A, B, C = 0.57, 0.19, 0.19


def edges(scale, count):
    """Pairs of vertices, chosen bit by bit."""
    random = numpy.random.default_rng(42)
    for _ in range(count // CHUNK):
        rows = numpy.zeros(CHUNK, numpy.int32)
        columns = numpy.zeros(CHUNK, numpy.int32)
        for bit in range(scale):
            quarter = random.random(CHUNK, numpy.float32)
            rows |= (quarter >= A + B).astype(numpy.int32) << bit
            columns |= (((quarter >= A) & (quarter < A + B)) | (quarter >= A + B + C)).astype(numpy.int32) << bit
        yield rows, columns


def graph(scale, degree):
    """The graph with 2 to the power of `scale` vertices and so many edges for each."""
    vertices = 1 << scale
    chunks = list(edges(scale, vertices * degree))
    rows = numpy.concatenate([rows for rows, _ in chunks])
    columns = numpy.concatenate([columns for _, columns in chunks])
    return scipy.sparse.csr_matrix((numpy.ones(len(rows)), (rows, columns)), shape=(vertices, vertices))
