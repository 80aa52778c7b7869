"""BFS and PageRank on a Kronecker graph of scale 21 with 8 edges a vertex, by SciPy. A unit: a BFS from each of four
roots, and two steps of PageRank after each."""

import itertools

import numpy
from scipy.sparse.csgraph import breadth_first_order

from kronecker import graph as kronecker
from unit import checksum, repeat

ROOTS = 4
graph = kronecker(21, 8)
vertices = graph.shape[0]
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
