"""liblinear (that of scikit-learn): a linear SVM of half a million points of 96 features. A unit: the points (384 MiB)
become liblinear's own nodes (776 MiB), then ten rounds of dual coordinate descent, each in another random order."""

import warnings

import numpy
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import LinearSVC

from unit import checksum, repeat

POINTS, FEATURES, BATCH, ROUNDS = 1 << 19, 96, 4096, 10
random = numpy.random.default_rng(42)
points = numpy.empty((POINTS, FEATURES))
classes = numpy.empty(POINTS, dtype=numpy.int32)
normal = random.standard_normal(FEATURES)
for start in range(0, POINTS, BATCH):
    some = random.standard_normal((BATCH, FEATURES))
    points[start : start + BATCH] = some
    classes[start : start + BATCH] = some @ normal + random.standard_normal(BATCH) > 0
# Ten rounds are too few for it to converge, and it says so each time.
warnings.simplefilter("ignore", ConvergenceWarning)


def fit():
    model = LinearSVC(loss="hinge", max_iter=ROUNDS, random_state=7).fit(points, classes)
    return checksum(model.coef_.tolist())


repeat(fit)
