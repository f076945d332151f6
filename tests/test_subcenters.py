"""Sub-centres at work, against loops: where a class lives, what lies far from there, one again."""

import collections
import math
import re

import keras
import numpy as np
import pytest
from backends import tensorflow_only
from conftest import RUNS
from keras import ops

import keras_margin as km
from keras_margin import subcenters

CLASSES, NUMBER, DIM = 4, 3, 5


def exactly(message):
    return f"^{re.escape(message)}$"


def built(head):
    head.build((None, DIM))
    rng = np.random.default_rng(100)
    rows = head.centers.shape[0]
    head.centers.assign(rng.normal(size=(rows, DIM)) * rng.uniform(0.3, 3.0, (rows, 1)))
    return head


def arcface(**settings):
    return built(km.ArcFace(CLASSES, num_subcenters=NUMBER, **settings))


def random_set(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, DIM)).astype("float32"), rng.integers(0, CLASSES, rows)


def angles_to_own(head, embeddings, labels):
    """The angle of each row to every sub-centre of its class, one at a time."""
    centers = ops.convert_to_numpy(head.centers).astype("float64")
    angles = np.zeros((len(labels), NUMBER))
    for i, (x, y) in enumerate(zip(embeddings.astype("float64"), labels, strict=True)):
        for k in range(NUMBER):
            w = centers[y * NUMBER + k]
            angles[i, k] = math.acos(x @ w / np.linalg.norm(x) / np.linalg.norm(w))
    return angles


def slow_dominant(head, embeddings, labels):
    wins = collections.Counter()
    for y, angles in zip(labels, angles_to_own(head, embeddings, labels), strict=True):
        wins[y, angles.argmin()] += 1
    return [max(range(NUMBER), key=lambda k: (wins[y, k], -k)) for y in range(CLASSES)]


# The dominant one


@pytest.mark.parametrize("seed", range(5))
def test_dominant_is_the_nearest_to_most_samples(seed):
    head, (embeddings, labels) = arcface(), random_set(seed=seed)
    got = head.dominant_subcenters(embeddings, labels)
    assert got.dtype == "int32"
    assert np.asarray(got).tolist() == slow_dominant(head, embeddings, labels)


def test_first_of_equally_frequent_ones_and_of_a_class_without_samples():
    head = built(km.NormFace(2, num_subcenters=NUMBER))
    head.centers.assign(np.concatenate([np.eye(NUMBER, DIM)] * 2))
    twos_and_ones = np.eye(NUMBER, DIM, dtype="float32")[[2, 1, 2, 1]]
    assert np.asarray(head.dominant_subcenters(twos_and_ones, [1, 1, 1, 1])).tolist() == [0, 1]


def test_dominant_compiled(run):
    head, (embeddings, labels) = arcface(), random_set()
    got = run(head.dominant_subcenters)(embeddings, labels)
    assert np.asarray(got).tolist() == slow_dominant(head, embeddings, labels)


@pytest.mark.parametrize(
    "form",
    [lambda y: y[:, None], lambda y: np.eye(CLASSES)[y], lambda y: y.astype("float32")],
    ids=["column", "one-hot", "floats"],
)
def test_forms_of_labels(form):
    head, (embeddings, labels) = arcface(), random_set()
    got = head.dominant_subcenters(embeddings, form(labels))
    assert np.asarray(got).tolist() == slow_dominant(head, embeddings, labels)


def test_ignored_rows_do_not_count():
    head, (embeddings, labels) = arcface(ignore_class=-1), random_set(30)
    kept = np.arange(30) % 3 > 0
    ignoring = np.where(kept, labels, -1)
    want = slow_dominant(head, embeddings[kept], labels[kept])
    assert want != slow_dominant(head, embeddings, labels)  # else the test shows nothing
    assert np.asarray(head.dominant_subcenters(embeddings, ignoring)).tolist() == want
    assert not np.asarray(head.outliers(embeddings, ignoring, 0.0))[~kept].any()


def test_label_that_is_no_class_is_refused():
    head, (embeddings, labels) = arcface(), random_set()
    labels[7] = CLASSES
    with pytest.raises(ValueError, match=re.escape(f"Received: labels[7]={CLASSES}")):
        head.dominant_subcenters(embeddings, labels)
    with pytest.raises(ValueError, match=re.escape(f"Received: labels[7]={CLASSES}")):
        head.outliers(embeddings, labels, 1.0)


# Outliers


@pytest.mark.parametrize("degrees", [0, 60, 75, 100, 180])
def test_outliers_lie_further_from_the_dominant_one(degrees):
    head, (embeddings, labels) = arcface(), random_set()
    angles = angles_to_own(head, embeddings, labels)
    dominant = slow_dominant(head, embeddings, labels)
    want = [angles[i, dominant[y]] > math.radians(degrees) for i, y in enumerate(labels)]
    got = head.outliers(embeddings, labels, math.radians(degrees))
    assert got.dtype == "bool"
    assert np.asarray(got).tolist() == want


def test_nearest_subcenter_of_an_outlier_may_be_close():
    """The last row lies on a sub-centre that is not the dominant one."""
    head = built(km.NormFace(2, num_subcenters=NUMBER))
    head.centers.assign(np.concatenate([np.eye(NUMBER, DIM)] * 2))
    embeddings = np.eye(NUMBER, DIM, dtype="float32")[[2, 2, 2, 0]]
    got = head.outliers(embeddings, [0, 0, 0, 0], math.radians(75))
    assert np.asarray(got).tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    "max_angle", [75, -0.1, 3.2, math.nan, math.inf, "75", None, [1.0], np.ones(2), True]
)
def test_angles_are_radians(max_angle):
    message = (
        "`max_angle` must be in radians, from 0 to pi; for degrees use math.radians. "
        f"Received: max_angle={max_angle!r}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        arcface().outliers(*random_set(), max_angle)


# One centre again


def test_collapsed_has_the_dominant_centers():
    head = arcface()
    got = head.collapsed([2, 0, 1, 2])
    assert got is not head
    assert got.num_subcenters == 1
    centers = ops.convert_to_numpy(head.centers)
    want = [centers[0 * NUMBER + 2], centers[NUMBER], centers[2 * NUMBER + 1], centers[-1]]
    np.testing.assert_array_equal(got.centers, want)
    np.testing.assert_array_equal(head.centers, centers)


HEADS = {
    "AdaCos": lambda: km.AdaCos(CLASSES, num_subcenters=NUMBER, max_scale=9.0),
    "AdaFace": lambda: km.AdaFace(CLASSES, 0.3, 20.0, num_subcenters=NUMBER, momentum=0.5),
    "CurricularFace": lambda: km.CurricularFace(CLASSES, num_subcenters=NUMBER, momentum=0.5),
    "LearnedScale": lambda: km.MarginHead(
        CLASSES, None, km.scales.LearnedScale(7.0), num_subcenters=NUMBER
    ),
    "SphereFace2": lambda: km.SphereFace2(CLASSES, 0.3, num_subcenters=NUMBER),
}


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS.keys())
def test_collapsed_keeps_settings_and_state(make):
    head, (embeddings, labels) = built(make()), random_set()
    for _ in range(3):
        head.loss(embeddings, labels)
    got = head.collapsed(head.dominant_subcenters(embeddings, labels))
    assert type(got) is type(head)
    assert got.get_config() == {**head.get_config(), "num_subcenters": 1}
    for one, other in zip(got.variables, head.variables, strict=True):
        if one is not got.centers:
            np.testing.assert_array_equal(one, other)
    assert np.isfinite(got.loss(embeddings, labels)).all()


def test_collapsed_of_samples_at_their_dominant_centers_has_the_same_loss():
    head, labels = arcface(), np.arange(CLASSES)
    dominant = np.array([1, 2, 0, 1])
    embeddings = ops.convert_to_numpy(head.centers)[labels * NUMBER + dominant]
    # The other sub-centres lie opposite, where they never win.
    centers = -np.repeat(embeddings, NUMBER, axis=0)
    centers[labels * NUMBER + dominant] = embeddings
    head.centers.assign(centers)
    assert np.asarray(head.dominant_subcenters(embeddings, labels)).tolist() == dominant.tolist()
    got = head.collapsed(dominant)(embeddings)
    cosines = embeddings @ embeddings.T
    lengths = np.linalg.norm(embeddings, axis=1)
    np.testing.assert_allclose(got, 64.0 * cosines / np.outer(lengths, lengths), atol=1e-4)


@pytest.mark.parametrize(
    "dominant",
    [
        np.array([0, 1, 2]),
        np.array([[0, 1, 2, 0]]),
        np.array([0, 1, 2, 3]),
        np.array([0, -1, 2, 0]),
        np.array([0.0, 1.0, 2.0, 0.0]),
    ],
    ids=["length", "shape", "too large", "negative", "floats"],
)
def test_collapsed_needs_a_subcenter_for_each_class(dominant):
    message = (
        "`dominant` must name a sub-centre for each class: integers from 0 to 2, shape (4,). "
        f"Received: dominant.shape={dominant.shape}, dominant.dtype={dominant.dtype}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        arcface().collapsed(dominant)


@pytest.mark.parametrize("run", [name for name in RUNS if name != "eager"], indirect=True)
def test_rows_without_a_class_or_a_finite_embedding_do_not_vote(run):
    head = km.ArcFace(2, num_subcenters=2, ignore_class=-1)
    head.build((None, 2))
    head.centers.assign([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    x = np.array([[0.0, 1.0], [1.0, 0.1], [np.nan, 0.0], [np.inf, 0.0]], "float32")
    dominant = run(head.dominant_subcenters)(x, np.int32([0, 7, 0, 0]))
    np.testing.assert_array_equal(dominant, [1, 0])
    is_outlier = head.outliers(x, np.array([0, -1, 0, 0]), 1.0)
    np.testing.assert_array_equal(is_outlier, [False, False, True, True])


def test_head_that_is_not_built():
    for use in (
        lambda head: head.dominant_subcenters(np.eye(2), [0, 1]),
        lambda head: head.outliers(np.eye(2), [0, 1], 1.0),
        lambda head: head.collapsed([0, 0]),
    ):
        with pytest.raises(ValueError, match="has no centres yet"):
            use(km.ArcFace(2))


def test_vectors_are_compared_as_the_head_compares_them():
    """The longer sub-centre has the larger product, the other one the smaller angle."""
    centers = [[1.0, 0.0], [3.0, 3.0], [0.0, 1.0], [0.0, -1.0]]
    x = np.array([[2.0, 0.5]], "float32")
    for make, dominant in ((km.SoftmaxHead, 1), (km.NormFace, 0)):
        head = make(2, num_subcenters=2)
        head.build((None, 2))
        head.centers.assign(centers)
        assert head.dominant_subcenters(x, [0])[0] == dominant


@pytest.mark.parametrize("rows", [0, 1, 8, 59, 60])
def test_blocks_of_rows_change_nothing(rows, monkeypatch):
    head, (embeddings, labels) = arcface(ignore_class=2), random_set(rows)
    embeddings[3:5] = np.nan
    want = [head.dominant_subcenters(embeddings, labels), head.outliers(embeddings, labels, 1.0)]
    monkeypatch.setattr(subcenters, "_ROWS_AT_ONCE", 8)
    got = [head.dominant_subcenters(embeddings, labels), head.outliers(embeddings, labels, 1.0)]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_blocks_of_rows_say_which_label_of_all_is_no_class(monkeypatch):
    monkeypatch.setattr(subcenters, "_ROWS_AT_ONCE", 8)
    embeddings, labels = random_set()
    labels[29] = CLASSES
    with pytest.raises(ValueError, match=re.escape(f"Received: labels[29]={CLASSES}")):
        arcface().dominant_subcenters(embeddings, labels)


@tensorflow_only
def test_number_of_rows_that_is_not_known_when_compiling():
    import tensorflow as tf

    head, (embeddings, labels) = arcface(), random_set()
    rows = tf.TensorSpec((None, DIM)), tf.TensorSpec((None,), "int64")
    got = tf.function(lambda x, y: head.outliers(x, y, 1.0), input_signature=rows)
    np.testing.assert_array_equal(got(embeddings, labels), head.outliers(embeddings, labels, 1.0))


def test_angles_near_zero_are_exact(run):
    """In float32 the cosine of 3e-4 is 1: arccos would give 0, or 3.5e-4 for a sample at 0."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(100, 64)).astype("float32")
    head = km.NormFace(100)
    head.build((None, 64))
    head.centers.assign(centers)
    aside = rng.normal(size=(100, 64))
    aside -= (aside * centers).sum(1, keepdims=True) / (centers**2).sum(1, keepdims=True) * centers
    lengths = np.linalg.norm(centers, axis=1, keepdims=True)
    aside *= lengths / np.linalg.norm(aside, axis=1, keepdims=True)
    for angle in (0.0, 0.9e-4, 1.1e-4):
        x = (3.0 * (centers + math.tan(angle) * aside)).astype("float32")
        got = np.asarray(run(lambda x: head.outliers(x, np.arange(100), 1e-4))(x))
        assert got.all() if angle > 1e-4 else not got.any()


def only_for_six(shape, dtype=None):
    assert tuple(shape) == (6, 4)
    return np.ones(shape, dtype)


def shrinking(centers):
    return 0.1 * keras.ops.sum(centers**2)


@pytest.mark.parametrize(
    "settings",
    [
        {"centers_initializer": keras.initializers.Constant(np.ones((6, 4)))},
        {"centers_initializer": only_for_six},
        {"centers_regularizer": shrinking},
    ],
    ids=["array", "function", "regularizer"],
)
def test_collapsed_needs_no_initial_centers(settings):
    head = km.ArcFace(3, num_subcenters=2, **settings)
    head.build((None, 4))
    head.centers.assign(np.arange(24.0).reshape(6, 4))
    got = head.collapsed([1, 0, 1])
    np.testing.assert_array_equal(got.centers, np.arange(24.0).reshape(6, 4)[[1, 2, 5]])
    assert len(got.losses) == len(head.losses)
    again = km.ArcFace.from_config({**got.get_config(), "centers_regularizer": None})
    again.build((None, 4))
    assert again.centers.shape == (3, 4)
