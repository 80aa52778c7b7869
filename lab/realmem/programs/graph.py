"""BFS and PageRank on a Kronecker graph of scale 21 with 8 edges a vertex (Graph500's probabilities), by SciPy. A
unit: a BFS from one of four roots by turns, and two steps of PageRank."""

import itertools

import numpy
import scipy.sparse
from scipy.sparse.csgraph import breadth_first_order

from unit import checksum, repeat

SCALE, DEGREE, ROOTS, CHUNK = 21, 8, 4, 1 << 20
A, B, C = 0.57, 0.19, 0.19
vertices = 1 << SCALE
random = numpy.random.default_rng(42)


def edges():
    """Pairs of vertices, chosen bit by bit."""
    for _ in range(vertices * DEGREE // CHUNK):
        rows = numpy.zeros(CHUNK, numpy.int32)
        columns = numpy.zeros(CHUNK, numpy.int32)
        for bit in range(SCALE):
            quarter = random.random(CHUNK, numpy.float32)
            rows |= (quarter >= A + B).astype(numpy.int32) << bit
            columns |= (((quarter >= A) & (quarter < A + B)) | (quarter >= A + B + C)).astype(numpy.int32) << bit
        yield rows, columns


chunks = list(edges())
rows = numpy.concatenate([rows for rows, _ in chunks])
columns = numpy.concatenate([columns for _, columns in chunks])
del chunks
graph = scipy.sparse.csr_matrix((numpy.ones(len(rows)), (rows, columns)), shape=(vertices, vertices))
del rows, columns
out_degree = numpy.maximum(numpy.diff(graph.indptr), 1)
roots = itertools.cycle(numpy.argsort(out_degree)[-ROOTS:])
transposed = graph.T.tocsr()


def work():
    order, _ = breadth_first_order(graph, next(roots), return_predecessors=True)
    rank = numpy.full(vertices, 1.0 / vertices)
    for _ in range(2):
        rank = 0.15 / vertices + 0.85 * (transposed @ (rank / out_degree))
    return checksum(len(order), float(rank.sum()), float(rank.max()))


def unit():
    return checksum(*(work() for _ in range(ROOTS)))


repeat(unit)
