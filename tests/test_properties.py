"""What holds for any batch: laws that the papers' formulas obey, on drawn inputs."""

import keras
import numpy as np
import pytest
from backends import WIDEST, rounded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import keras_margin as km
from keras_margin import margins

CLASSES, DIM, ROWS = 4, 3, 6
FEW = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the seed, which is constant
)

coordinates = st.floats(-10.0, -1e-3) | st.floats(1e-3, 10.0)
vectors = hnp.arrays("float64", (ROWS, DIM), elements=coordinates)
labels = hnp.arrays("int32", (ROWS,), elements=st.integers(0, CLASSES - 1))
angles = hnp.arrays("float64", (ROWS,), elements=st.floats(0.0, np.pi))
CENTERS = np.sin(np.arange(CLASSES * DIM)).reshape(CLASSES, DIM)


def built(head, centers=CENTERS):
    head.build((None, DIM))
    head.centers.assign(centers)
    return head


def assert_equal(got, want, tolerance=1e-9):
    tolerance = rounded(tolerance)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), tolerance, tolerance)


def rule(make, cosines):
    return np.asarray(make(dtype=WIDEST)(keras.ops.convert_to_tensor(cosines)))


@FEW
@given(vectors, labels)
@pytest.mark.parametrize(
    "make",
    [
        lambda: km.CosFace(CLASSES, 0.0, 9.0, dtype=WIDEST),
        lambda: km.ArcFace(CLASSES, 0.0, 9.0, dtype=WIDEST),
        lambda: km.MarginHead(CLASSES, margins.CombinedMargin(), 9.0, dtype=WIDEST),
        lambda: km.ElasticFace(CLASSES, 0.0, 9.0, std=0.0, dtype=WIDEST),
    ],
    ids=["CosFace", "ArcFace", "CombinedMargin", "ElasticFace"],
)
def test_no_margin_is_normface(make, x, y):
    plain = built(km.NormFace(CLASSES, 9.0, dtype=WIDEST))
    assert_equal(built(make()).loss(x, y), plain.loss(x, y))


@FEW
@given(angles, st.floats(0.0, 2.33))
def test_combined_margin_with_one_term_is_that_margin(theta, m):
    cosines = np.cos(theta)
    combined, angular, cosine = margins.CombinedMargin, margins.AngularMargin, margins.CosineMargin
    assert_equal(
        rule(lambda **k: combined(angular=m, **k), cosines),
        rule(lambda **k: angular(m, **k), cosines),
    )
    assert_equal(
        rule(lambda **k: combined(additive=m, **k), cosines),
        rule(lambda **k: cosine(m, **k), cosines),
    )
    power = 1.0 + m
    assert_equal(
        rule(lambda **k: combined(multiplicative=power, **k), cosines),
        rule(
            lambda **k: margins.MultiplicativeMargin(power, lambda_base=0.0, lambda_min=0.0, **k),
            cosines,
        ),
        1e-6,
    )


RULES = {
    "cosine": lambda m, **k: margins.CosineMargin(m, **k),
    "angular": lambda m, **k: margins.AngularMargin(m, **k),
    "multiplicative": lambda m, **k: margins.MultiplicativeMargin(1.0 + m, **k),
    "combined": lambda m, **k: margins.CombinedMargin(1.0 + m, 0.7 * m, 0.3 * m, **k),
}


@FEW
@given(st.floats(0.0, 2.33))
@pytest.mark.parametrize("make", RULES.values(), ids=RULES.keys())
def test_rules_never_rise_with_the_angle(make, m):
    cosines = np.cos(np.linspace(0.0, np.pi, 2000))
    values = rule(lambda **k: make(m, **k), cosines)
    assert (np.diff(values) <= rounded(1e-9)).all()


@FEW
@given(vectors, labels, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
@pytest.mark.parametrize("make", [km.CosFace, km.ArcFace])
def test_larger_margin_never_lowers_the_loss(make, x, y, one, other):
    low, high = sorted([one, other])
    smaller = built(make(CLASSES, low, 9.0, dtype=WIDEST)).loss(x, y)
    larger = built(make(CLASSES, high, 9.0, dtype=WIDEST)).loss(x, y)
    assert (np.asarray(larger) >= np.asarray(smaller) - rounded(1e-9)).all()


@FEW
@given(vectors, labels, st.permutations(range(CLASSES)))
def test_permuted_classes_permute_the_logits(x, y, order):
    order = np.array(order)  # the class at place k was order[k]
    head = built(km.AdaCos(CLASSES, dtype=WIDEST))
    permuted = built(km.AdaCos(CLASSES, dtype=WIDEST), CENTERS[order])
    place = np.argsort(order)
    assert_equal(permuted(x, place[y]), np.asarray(head(x, y))[:, order])
    assert_equal(permuted.current_scale, head.current_scale)


@FEW
@given(vectors, labels, st.permutations(range(ROWS)))
@pytest.mark.parametrize("make", [km.AdaCos, km.CurricularFace, km.AdaFace])
def test_order_of_the_batch_does_not_matter(make, x, y, order):
    one, other = built(make(CLASSES, dtype=WIDEST)), built(make(CLASSES, dtype=WIDEST))
    assert_equal(other.loss(x[order], y[order]), np.asarray(one.loss(x, y))[order], 1e-7)
    for moved, want in zip(other.non_trainable_variables, one.non_trainable_variables, strict=True):
        assert_equal(moved, want, 1e-7)


@FEW
@given(vectors, labels, st.floats(0.0, 0.9), st.floats(0.0, 3.0))
def test_smoothing_and_focal_factor_are_those_of_the_logits(x, y, smoothing, gamma):
    """Against Keras' own smoothed cross-entropy of the margined logits."""
    logits = built(km.ArcFace(CLASSES, 0.3, 9.0, dtype=WIDEST))(x, y)
    one_hot = np.eye(CLASSES)[y]
    smoothed = one_hot * (1.0 - smoothing) + smoothing / CLASSES
    log_p = np.asarray(keras.ops.log_softmax(logits))
    want = -(smoothed * log_p).sum(1) * (1.0 - np.exp(log_p[one_hot > 0])) ** gamma
    head = built(
        km.ArcFace(CLASSES, 0.3, 9.0, label_smoothing=smoothing, focal_gamma=gamma, dtype=WIDEST)
    )
    assert_equal(head.loss(x, y), want, 1e-7)
