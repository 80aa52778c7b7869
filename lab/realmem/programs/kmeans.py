"""k-means of scikit-learn: 2 million points of 64 features (1 GiB), 16 centres. A unit: one step of mini-batches, that
is, 50 batches of 4096 points that are chosen at random, and a prediction of one eighth of the points in order."""

import numpy
from sklearn.cluster import MiniBatchKMeans

from unit import checksum, repeat

POINTS, FEATURES, CENTRES, BATCH, BATCHES, PARTS = 1 << 21, 64, 16, 4096, 50, 8
random = numpy.random.default_rng(42)
points = numpy.empty((POINTS, FEATURES))
centres = random.random((CENTRES, FEATURES)) * 10
for start in range(0, POINTS, BATCH):
    of = random.integers(0, CENTRES, BATCH)
    points[start : start + BATCH] = centres[of] + random.standard_normal((BATCH, FEATURES))


def step():
    # Each unit begins from one seed, so its points and its result are those of the unit before.
    chosen = numpy.random.default_rng(7)
    model = MiniBatchKMeans(CENTRES, batch_size=BATCH, n_init=1, random_state=7)
    for _ in range(BATCHES):
        model.partial_fit(points[chosen.integers(0, POINTS, BATCH)])
    part = model.predict(points[: POINTS // PARTS])
    return checksum(numpy.bincount(part).tolist(), model.cluster_centers_.sum().item())


repeat(step)
