"""SemiHardTriplet against a loop over every triplet."""

import re

import keras
import numpy as np
import pytest
from backends import (
    ON_JAX,
    WIDEST,
    float64_only,
    jacobians,
    rounded,
    tensorflow_only,
    value_and_gradients,
)
from conftest import RUNS
from keras import ops

import keras_margin as km


def exactly(message):
    return f"^{re.escape(message)}$"


def random_batch(rows=12, identities=4, dim=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, dim)), rng.integers(0, identities, rows)


def slow(embeddings, labels, margin, ignored=()):
    """FaceNet eq. 3 and 4: one anchor, one positive, one negative after the other."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    rows = [i for i in range(len(unit)) if i not in ignored]
    losses = np.zeros(len(unit))
    for a in rows:
        distance = {i: ((unit[a] - unit[i]) ** 2).sum() for i in rows}
        negatives = [distance[n] for n in rows if labels[n] != labels[a]]
        terms = []
        for p in rows:
            if p == a or labels[p] != labels[a] or not negatives:
                continue
            beyond = [d for d in negatives if d > distance[p]]
            chosen = min(beyond) if beyond else max(negatives)
            terms.append(max(distance[p] - chosen + margin, 0.0))
        losses[a] = np.mean(terms) if terms else 0.0
    return losses


def wide(margin=0.2, **kwargs):
    return km.SemiHardTriplet(margin, dtype=WIDEST, **kwargs)


@pytest.mark.parametrize("margin", [0.0, 0.2, 1.0, 5.0])
@pytest.mark.parametrize(
    ("rows", "identities"), [(12, 4), (30, 3), (9, 8), (2, 1), (2, 2), (5, 1), (1, 1)]
)
def test_loss_is_that_of_the_loop(rows, identities, margin):
    embeddings, labels = random_batch(rows, identities, seed=rows)
    got = wide(margin).loss(embeddings, labels)
    np.testing.assert_allclose(
        got, slow(embeddings, labels, margin), rtol=rounded(1e-9), atol=rounded(1e-12, 1e-6)
    )


def test_loss_in_every_way_of_running(run):
    embeddings, labels = random_batch()
    head = km.SemiHardTriplet(0.7)
    got = run(lambda x: head.loss(x, labels))(ops.convert_to_tensor(embeddings, "float32"))
    assert got.dtype == "float32"
    np.testing.assert_allclose(got, slow(embeddings, labels, 0.7), rtol=1e-4, atol=1e-6)


def on_the_circle(*degrees):
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def distance(degrees):
    return 2.0 - 2.0 * np.cos(np.radians(degrees))


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ((20, 50, 90), 50),  # 20 is nearer than the positive, 50 the nearest beyond it
        ((10, 20), 20),  # none beyond: the farthest
        ((31, 180), 31),
        ((-35, 50), 35),
    ],
)
def test_negative_that_is_chosen(others, chosen):
    """The anchor at 0 degrees, its positive at 30."""
    embeddings = on_the_circle(0, 30, *others)
    labels = [0, 0, *range(1, len(others) + 1)]
    got = wide(3.0).loss(embeddings, labels)
    np.testing.assert_allclose(got[0], distance(30) - distance(chosen) + 3.0, rtol=rounded(1e-12))


def test_anchor_has_the_mean_over_its_positives():
    """Positives at 30 and 60 degrees, the negative at 45."""
    got = wide(1.0).loss(on_the_circle(0, 30, 60, 45), [4, 4, 4, 9])
    terms = [distance(30) - distance(45) + 1.0, distance(60) - distance(45) + 1.0]
    np.testing.assert_allclose(got[0], np.mean(terms), rtol=rounded(1e-12))


def test_hinge_is_zero_where_the_negative_is_far_enough():
    got = wide(0.2).loss(on_the_circle(0, 10, 90), [0, 0, 1])
    np.testing.assert_array_equal(got, np.zeros(3))


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0, 0, 0, 0]], ids=["no positive", "no negative"])
def test_rows_without_a_triplet_have_loss_and_gradient_zero(labels):
    loss, gradient = value_and_gradients(lambda x: wide(9.0).loss(x, labels), random_batch(4)[:1])
    np.testing.assert_array_equal(loss, np.zeros(4))
    np.testing.assert_array_equal(gradient, np.zeros((4, 3)))


def test_only_the_row_without_a_positive_is_zero():
    embeddings, _ = random_batch(5)
    got = wide(5.0).loss(embeddings, [3, 3, 8, 5, 5])
    got = ops.convert_to_numpy(got)
    assert got[2] == 0.0
    assert (np.delete(got, 2) > 0.0).all()


def test_same_embeddings_have_the_loss_margin():
    got = wide(0.3).loss(np.ones((6, 4)), [0, 0, 1, 1, 2, 2])
    np.testing.assert_allclose(got, np.full(6, 0.3), atol=rounded(1e-12, 1e-6))


def test_lengths_do_not_matter():
    embeddings, labels = random_batch()
    lengths = np.geomspace(1e-8, 1e8, len(labels))[:, None]
    want = slow(embeddings, labels, 0.5)
    np.testing.assert_allclose(
        wide(0.5).loss(lengths * embeddings, labels), want, rtol=rounded(1e-9)
    )


@float64_only
def test_gradients_are_the_numerical_ones():
    embeddings, labels = random_batch(7, 3)
    loss = RUNS["graph"](lambda x: wide(0.5).loss(x, labels))
    analytic, numerical = jacobians(loss, [embeddings], delta=1e-6)
    np.testing.assert_allclose(analytic[0], numerical[0], rtol=1e-6, atol=1e-8)
    assert np.abs(analytic[0]).max() > 0.1


def test_gradients_are_finite_at_equal_and_opposite_and_zero_embeddings(run):
    embeddings = np.float32([[1.0, 0], [1, 0], [-1, 0], [1, 0], [0, 0], [0, 0]])
    labels = [0, 0, 0, 1, 1, 2]

    def loss(embeddings):
        return km.SemiHardTriplet(0.2).loss(embeddings, labels)

    got = run(lambda x: value_and_gradients(loss, [x]))(embeddings)
    assert all(np.isfinite(value).all() for value in got)


# Labels and rows that do not count


@pytest.mark.parametrize(
    "form",
    [
        lambda y: y - 7,
        lambda y: y.astype("int64") * (2**28 if ON_JAX else 2**40),
        lambda y: y.astype("uint8"),
        lambda y: y.astype("float32"),
        lambda y: y[:, None],
        lambda y: y.tolist(),
    ],
    ids=["negative", "large", "uint8", "floats", "column", "list"],
)
def test_labels_are_only_compared(form):
    embeddings, labels = random_batch()
    want = slow(embeddings, labels, 0.4)
    np.testing.assert_allclose(wide(0.4).loss(embeddings, form(labels)), want, rtol=rounded(1e-9))


def test_ignored_rows_are_in_no_triplet():
    embeddings, labels = random_batch()
    labels[[1, 5]] = -1
    head = wide(0.6, ignore_class=-1)
    want = slow(embeddings, labels, 0.6, ignored=(1, 5))
    np.testing.assert_allclose(head.loss(embeddings, labels), want, rtol=rounded(1e-9))
    np.testing.assert_array_equal(head.counted(labels), labels != -1)
    assert np.all(wide(0.6).counted(labels))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_row_that_is_not_finite_is_nan_and_in_no_triplet(value):
    embeddings, labels = random_batch()
    want = slow(embeddings, labels, 0.6, ignored=(3,))
    embeddings[3, 1], want[3] = value, np.nan
    np.testing.assert_allclose(wide(0.6).loss(embeddings, labels), want, rtol=rounded(1e-9))


def test_ignored_row_may_hold_anything():
    embeddings, labels = random_batch()
    labels[3] = -1
    want = slow(embeddings, labels, 0.6, ignored=(3,))
    embeddings[3] = np.nan
    got = wide(0.6, ignore_class=-1).loss(embeddings, labels)
    np.testing.assert_allclose(got, want, rtol=rounded(1e-9))


def test_empty_batch(run):
    assert run(lambda x, y: km.SemiHardTriplet().loss(x, y))(
        ops.zeros((0, 3)), ops.zeros(0, "int32")
    ).shape == (0,)


# A head


def test_training_argument_changes_nothing():
    embeddings, labels = random_batch()
    head = wide(0.6)
    want = head.loss(embeddings, labels)
    for settings in ({"training": False}, {"training": True}, {"update_state": False}):
        np.testing.assert_array_equal(head.loss(embeddings, labels, **settings), want)
    assert head.variables == []


def test_training_brings_identities_together():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(4), 8)
    x = rng.normal(size=(4, 6))[y] + 0.5 * rng.normal(size=(32, 6))
    tower = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model = km.EmbeddingModel(tower, km.SemiHardTriplet())
    model.compile(keras.optimizers.Adam(0.05), jit_compile=False)
    history = model.fit(x, y, batch_size=32, epochs=15, verbose=0).history
    assert history.keys() == {"loss"}
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    want = slow(ops.convert_to_numpy(model(x)), y, 0.2).mean()
    np.testing.assert_allclose(model.evaluate(x, y, batch_size=32, verbose=0), want, rtol=1e-4)


def test_config():
    head = km.SemiHardTriplet(0.5, ignore_class=-1, name="mine")
    again = km.SemiHardTriplet.from_config(head.get_config())
    assert (again.margin, again.ignore_class, again.name) == (0.5, -1, "mine")
    assert km.SemiHardTriplet().margin == 0.2  # FaceNet's


# Refused


@pytest.mark.parametrize("margin", [-0.1, np.nan, np.inf, None, "0.2"], ids=str)
def test_margins_out_of_range(margin):
    message = f"`margin` must be a finite number, at least 0. Received: margin={margin!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        km.SemiHardTriplet(margin)


@pytest.mark.parametrize("shape", [(), (4, 2), (4, 1, 1)], ids=str)
def test_shapes_of_labels(shape):
    message = f"`labels` must have shape (batch,) or (batch, 1). Received: labels.shape={shape}"
    with pytest.raises(ValueError, match=exactly(message)):
        km.SemiHardTriplet().loss(np.ones((4, 3)), np.zeros(shape, "int32"))


@pytest.mark.parametrize(("embeddings", "labels"), [((4, 3), 3), ((4, 3), 1), ((4,), 4)])
def test_shapes_that_do_not_fit(embeddings, labels):
    with pytest.raises(ValueError, match="embeddings.shape="):
        km.SemiHardTriplet().loss(np.ones(embeddings), np.zeros(labels, "int32"))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0.0, 0.5, 1.0], "whole numbers. Received: labels[1]=0.5"),
        ([0.0, 1.0, np.nan], "whole numbers. Received: labels[2]=nan"),
        ([np.inf, 1.0, 1.0], "whole numbers. Received: labels[0]=inf"),
        (["a", "b", "a"], "numbers. Received: labels.dtype=<U1"),
        ([1j, 0j, 1j], "numbers. Received: labels.dtype=complex128"),
        (None, "numbers. Received: labels.dtype=object"),
    ],
    ids=str,
)
def test_labels_that_are_no_identities(labels, words):
    with pytest.raises(ValueError, match=exactly(f"`labels` must be {words}")):
        km.SemiHardTriplet().loss(np.ones((3, 2)), labels)
    with pytest.raises(ValueError, match=exactly(f"`labels` must be {words}")):
        km.SemiHardTriplet(ignore_class=-1).counted(labels)


@tensorflow_only
def test_labels_that_are_texts_of_tensorflow():
    import tensorflow as tf

    with pytest.raises(ValueError, match="numbers. Received: labels.dtype=string"):
        km.SemiHardTriplet().loss(np.ones((3, 2)), tf.constant(["a", "b", "a"]))


@pytest.mark.skipif(not ON_JAX, reason="TensorFlow has 64 bits")
def test_labels_beyond_32_bits():
    message = (
        "`labels` must be numbers that 32 bits hold: JAX has no others. "
        "Received: labels[1]=4294967296"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        km.SemiHardTriplet().loss(np.ones((2, 2)), [0, 2**32])


@pytest.mark.parametrize("value", [0.5, np.nan])
@pytest.mark.parametrize("run", [name for name in RUNS if name != "eager"], indirect=True)
def test_compiled_row_whose_label_is_not_whole_is_nan_and_in_no_triplet(value, run):
    embeddings, labels = random_batch()
    want = slow(embeddings, labels, 0.6, ignored=(3,))
    labels = labels.astype("float64")
    labels[3], want[3] = value, np.nan
    loss = run(wide(0.6).loss)
    np.testing.assert_allclose(loss(embeddings, labels), want, rtol=rounded(1e-9))


def test_labels_that_are_true_or_false():
    head = km.SemiHardTriplet(0.5, ignore_class=-1)
    labels, x = np.array([True, False, True, False]), random_batch(4)[0]
    assert np.all(head.counted(labels))
    np.testing.assert_allclose(head.loss(x, labels), slow(x, labels, 0.5), rtol=1e-4)
    ignoring = km.SemiHardTriplet(ignore_class=1).counted(labels)
    np.testing.assert_array_equal(ignoring, [False, True, False, True])


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_largest_unsigned_label_is_not_minus_one(dtype):
    # JAX has no uint64: the labels must fit in uint32.
    labels = np.array([np.iinfo("uint32" if ON_JAX else dtype).max, 7], dtype)
    assert np.all(km.SemiHardTriplet(ignore_class=-1).counted(labels))
    np.testing.assert_array_equal(km.SemiHardTriplet(ignore_class=7).counted(labels), [True, False])


@pytest.mark.parametrize("ignore_class", [-1, 300])
def test_ignored_class_that_no_unsigned_label_can_be(ignore_class):
    head = km.SemiHardTriplet(ignore_class=ignore_class)
    np.testing.assert_array_equal(head.counted(np.uint8([255, 44])), [True, True])
