"""Imprinted centres against means in float64, and what a row needs to take part."""

import re

import numpy as np
import pytest
from backends import ON_JAX, float64_only, jit
from keras import ops

import keras_margin as km
from keras_margin import imprinting

if ON_JAX:
    compiled = jit
else:
    import tensorflow as tf

    compiled = tf.function

CLASSES, DIM = 5, 4


def built(head, seed=0):
    head.build((None, DIM))
    rng = np.random.default_rng(seed)
    rows = head.centers.shape[0]
    head.centers.assign(rng.normal(size=(rows, DIM)) * rng.uniform(0.3, 3.0, (rows, 1)))
    return head


def samples(rows=40, classes=(0, 2, 3), seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, DIM)) * rng.uniform(0.1, 9.0, (rows, 1)) + 0.5
    return x.astype("float32"), rng.choice(classes, rows)


def as_numpy(tensor):
    return ops.convert_to_numpy(tensor)


def directions(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def mean_direction(x, y, label):
    return directions(directions(x.astype("float64"))[y == label].mean(axis=0))


HEADS = {
    "ArcFace": lambda **k: km.ArcFace(CLASSES, **k),
    "AdaCos": lambda **k: km.AdaCos(CLASSES, **k),
    "SphereFace2": lambda **k: km.SphereFace2(CLASSES, **k),
    "SoftmaxHead": lambda **k: km.SoftmaxHead(CLASSES, **k),
    "LSoftmax": lambda **k: km.LSoftmax(CLASSES, **k),
}


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS.keys())
def test_centers_point_along_the_mean_of_unit_embeddings(make):
    head, (x, y) = built(make()), samples()
    before = as_numpy(head.centers)
    assert head.imprint(x, y) is None
    got = as_numpy(head.centers)
    for label in (0, 2, 3):
        want = mean_direction(x, y, label)
        np.testing.assert_allclose(directions(got[label]), want, atol=1e-6)
        by_length = directions(x[y == label].mean(axis=0))  # long embeddings would count more
        assert np.abs(by_length - want).max() > 1e-3
    np.testing.assert_array_equal(got[[1, 4]], before[[1, 4]])


def test_cosine_heads_keep_lengths():
    head, (x, y) = built(km.ArcFace(CLASSES)), samples()
    before = np.linalg.norm(as_numpy(head.centers), axis=1)
    head.imprint(x, y)
    np.testing.assert_allclose(np.linalg.norm(head.centers, axis=1), before, rtol=1e-6)


@pytest.mark.parametrize("make", [km.SoftmaxHead, km.LSoftmax])
def test_raw_centers_are_as_long_as_the_others_on_average(make):
    head, (x, y) = built(make(CLASSES)), samples()
    before = np.linalg.norm(as_numpy(head.centers), axis=1)
    head.imprint(x, y)
    got = np.linalg.norm(head.centers, axis=1)
    np.testing.assert_allclose(got[[0, 2, 3]], before[[1, 4]].mean(), rtol=1e-6)
    head.imprint(*samples(classes=range(CLASSES)))  # no class stays
    np.testing.assert_allclose(np.linalg.norm(head.centers, axis=1), got.mean(), rtol=1e-6)


def test_a_center_of_length_0_becomes_one_of_length_1():
    head, (x, y) = built(km.ArcFace(CLASSES)), samples()
    head.centers.assign(np.zeros((CLASSES, DIM)))
    head.imprint(x, y)
    np.testing.assert_allclose(np.linalg.norm(head.centers, axis=1), [1, 0, 1, 1, 0], rtol=1e-6)


def test_only_the_dominant_subcenter_moves():
    head, (x, y) = built(km.ArcFace(CLASSES, num_subcenters=3)), samples()
    dominant = as_numpy(head.dominant_subcenters(x, y))
    before = as_numpy(head.centers).reshape(CLASSES, 3, DIM)
    head.imprint(x, y)
    got = as_numpy(head.centers).reshape(CLASSES, 3, DIM)
    moved = {(k, j) for k, j in np.ndindex(CLASSES, 3) if (got[k, j] != before[k, j]).any()}
    assert moved == {(k, dominant[k]) for k in (0, 2, 3)}
    assert set(dominant[[0, 2, 3]]) != {0}  # else the test shows nothing
    for k, j in moved:
        np.testing.assert_allclose(directions(got[k, j]), mean_direction(x, y, k), atol=1e-6)


def test_a_head_that_is_not_built_is_built():
    head, (x, y) = km.NormFace(CLASSES), samples()
    head.imprint(x.tolist(), y.tolist())
    assert head.centers.shape == (CLASSES, DIM)
    np.testing.assert_allclose(directions(head.centers[2]), mean_direction(x, y, 2), atol=1e-6)


@pytest.mark.parametrize(
    "form",
    [lambda y: y[:, None], lambda y: np.eye(CLASSES)[y], lambda y: y.astype("float32")],
    ids=["column", "one-hot", "floats"],
)
def test_forms_of_labels(form):
    head, other, (x, y) = built(km.ArcFace(CLASSES)), built(km.ArcFace(CLASSES)), samples()
    head.imprint(x, form(y))
    other.imprint(ops.convert_to_tensor(x), y)
    np.testing.assert_array_equal(head.centers, other.centers)


def test_ignored_rows_and_rows_that_are_not_finite_are_left_out():
    head, other = built(km.ArcFace(CLASSES, ignore_class=0)), built(km.ArcFace(CLASSES))
    x, y = samples()
    x[5:8] = np.nan
    x[8, 0] = np.inf
    used = y != 0
    used[5:9] = False
    head.imprint(x, y)
    other.imprint(x[used], y[used])
    np.testing.assert_array_equal(head.centers, other.centers)


@pytest.mark.parametrize("rows", [0, 7, 8, 40])
def test_blocks_of_rows_change_nothing(rows, monkeypatch):
    head, other, (x, y) = built(km.ArcFace(CLASSES)), built(km.ArcFace(CLASSES)), samples(rows)
    head.imprint(x, y)
    monkeypatch.setattr(imprinting, "_ROWS_AT_ONCE", 8)
    other.imprint(x, y)
    np.testing.assert_array_equal(head.centers, other.centers)


@pytest.mark.parametrize(
    "x",
    [
        [[1.0, 0.0, 0.0, 0.0], [-3.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]],
        [[np.nan] * 4, [np.inf] * 4, [0.0, 1.0, 0.0, 0.0]],
        [[0.0] * 4, [0.0] * 4, [0.0, 1.0, 0.0, 0.0]],
        [[0.1, 0.7, 0.3, -0.9], [-0.2, -1.4, -0.6, 1.8], [0.0, 1.0, 0.0, 0.0]],  # but for rounding
    ],
    ids=["opposite", "not finite", "zero", "opposite but for rounding"],
)
def test_a_class_without_a_direction_stays(x):
    head = built(km.ArcFace(CLASSES))
    before = as_numpy(head.centers)
    with pytest.warns(UserWarning, match="stay as they were.*Received: classes 3$"):
        head.imprint(np.array(x, "float32"), [3, 3, 1])
    got = as_numpy(head.centers)
    np.testing.assert_array_equal(got[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
    np.testing.assert_allclose(directions(got[1]), [0, 1, 0, 0], atol=1e-7)


def test_what_is_refused():
    x, y = samples()
    with pytest.raises(ValueError, match="SemiHardTriplet has no classes, and so no centres"):
        km.SemiHardTriplet().imprint(x, y)
    head = built(km.ArcFace(CLASSES))
    before = as_numpy(head.centers)
    with pytest.raises(ValueError, match=re.escape("Received: labels[1]=5")):
        head.imprint(x[:2], [0, 5])
    with pytest.raises(ValueError, match=re.escape("must have shape (batch, 4)")):
        head.imprint(x[:, :3], y)
    with pytest.raises(ValueError, match="one entry for each row"):
        head.imprint(x, y[:-1])
    for none in (None, np.full((len(y), DIM), "a")):
        with pytest.raises(TypeError, match="`embeddings` must be an array or a tensor of numbers"):
            head.imprint(none, y)
    with pytest.raises(ValueError, match="must be called outside of compiled code"):
        compiled(head.imprint)(x, y)
    np.testing.assert_array_equal(head.centers, before)


def test_new_classes_are_told_apart_without_a_step():
    """The nearest class mean: all right where classes are apart, without a step."""
    rng = np.random.default_rng(0)
    means = 4.0 * np.eye(8, DIM + 4)
    y = np.arange(80) % 8
    x = (means[y] + rng.normal(size=(80, DIM + 4)) * 0.3).astype("float32")
    head = km.ArcFace(6)
    head.imprint(x[y < 6], y[y < 6])
    grown = head.resized(8)
    grown.imprint(x[y >= 6], y[y >= 6])
    assert (as_numpy(grown(x)).argmax(axis=1) == y).all()


@float64_only
def test_float64():
    head, (x, y) = built(km.ArcFace(CLASSES, dtype="float64")), samples()
    head.imprint(x.astype("float64"), y)
    want = mean_direction(x, y, 3)
    np.testing.assert_allclose(directions(as_numpy(head.centers)[3]), want, atol=1e-12)
