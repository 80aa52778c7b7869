"""Triangles of a Kronecker graph of scale 21 with 8 edges a vertex, by SciPy: each edge leads to the vertex of higher
degree, and each pair of edges of one vertex is looked up. A unit: those of 2^13 vertices in 8 blocks."""

import numpy
import scipy.sparse

from kronecker import graph as kronecker
from unit import checksum, repeat

BLOCK, BLOCKS = 1 << 10, 8
graph = kronecker(21, 8)
vertices = graph.shape[0]
graph = graph + graph.T
degree = numpy.diff(graph.indptr)
graph = graph.tocoo()
is_up = (degree[graph.row] < degree[graph.col]) | ((degree[graph.row] == degree[graph.col]) & (graph.row < graph.col))
shape = (vertices, vertices)
up = scipy.sparse.csr_matrix((numpy.ones(is_up.sum()), (graph.row[is_up], graph.col[is_up])), shape=shape)
up.data[:] = 1
del graph, is_up


def triangles():
    found = 0.0
    for block in range(BLOCKS):
        rows = up[block * (vertices // BLOCKS) :][:BLOCK]
        found += (rows @ up).multiply(rows).sum()
    return checksum(float(found))


repeat(triangles)
