"""log B and the largest non-target cosine against NumPy float64, with every gradient."""

import math
import re

import keras
import numpy as np
import pytest
import reference
from backends import (
    DTYPES,
    ON_JAX,
    float64_only,
    gradients,
    jacobians,
    rounded,
    tensorflow_only,
    value_and_gradients,
)
from keras import ops

import keras_margin as km
from keras_margin.nontarget import nontarget_logsumexp

BATCH, DIM, CLASSES = 5, 4, 6
LABELS = np.array([2, 0, 5, 2, 3])
UPSTREAM = np.array([0.7, -1.3, 0.2, 1.0, 0.4])
ROW_SCALES = np.array([1.0, 64.0, 30.0, 4.0, 0.5])

every_setting = pytest.mark.parametrize(
    ("scale", "settings"),
    [
        (1.0, {}),
        (30.0, {}),
        (ROW_SCALES, {}),
        (30.0, {"normalize_centers": False}),
        (ROW_SCALES, {"num_subcenters": 3}),
        (4.0, {"num_subcenters": 3, "normalize_centers": False}),
    ],
    ids=["1", "30", "scale a row", "centers as they are", "subcenters", "subcenters as they are"],
)


def exactly(message):
    return f"^{re.escape(message)}$"


def random_inputs(num_subcenters=1, seed=0):
    rng = np.random.default_rng(seed)
    embeddings = reference.unit(rng.normal(size=(BATCH, DIM)))
    centers = rng.normal(size=(CLASSES * num_subcenters, DIM)) * rng.uniform(0.2, 3.0)
    return embeddings, centers


def slow(embeddings, centers, scale, normalize_centers=True, num_subcenters=1):
    """log B and the largest non-target cosine, a sample and a class at a time, complex or not."""
    if normalize_centers:
        centers = reference.unit(centers)
    scale = np.broadcast_to(scale, len(embeddings))
    log_b, hardest = [], []
    for x, y, s in zip(embeddings, LABELS, scale, strict=True):
        others = []
        for k in range(CLASSES):
            rows = centers[k * num_subcenters : (k + 1) * num_subcenters] @ x
            others += [rows[rows.real.argmax()]] if k != y else []
        largest = max((s * c).real for c in others)
        log_b.append(largest + np.log(sum(np.exp(s * c - largest) for c in others)))
        hardest.append(max(c.real for c in others))
    return np.array(log_b), np.array(hardest)


def slow_gradients(embeddings, centers, scale, settings):
    """Of sum(UPSTREAM * log_b), by complex steps."""

    def total(x, w, s):
        return UPSTREAM @ slow(x, w, s, **settings)[0]

    scale = np.asarray(scale)
    return (
        reference.numerical_gradient(lambda x: total(x, centers, scale), embeddings),
        reference.numerical_gradient(lambda w: total(embeddings, w, scale), centers),
        reference.numerical_gradient(lambda s: total(embeddings, centers, s), scale),
    )


def values_and_gradients(embeddings, centers, scale, settings):
    values, *found = value_and_gradients(
        lambda x, w, s: nontarget_logsumexp(x, w, LABELS, s, **settings),
        [embeddings, centers, scale],
        upstream=UPSTREAM,
    )
    return *values, *found


@every_setting
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(run, scale, settings, dtype):
    embeddings, centers = random_inputs(settings.get("num_subcenters", 1))
    inputs = [ops.convert_to_tensor(value, dtype) for value in (embeddings, centers, scale)]
    got = run(lambda *inputs: values_and_gradients(*inputs, settings))(*inputs)
    want = (
        *slow(embeddings, centers, scale, **settings),
        *slow_gradients(embeddings, centers, scale, settings),
    )
    relative = 1e-5 if dtype == "float32" else 1e-12
    for value, expected in zip(got, want, strict=True):
        assert value.dtype == dtype
        np.testing.assert_allclose(
            value, expected, rtol=relative, atol=relative * np.abs(expected).max()
        )


@float64_only
@pytest.mark.parametrize("normalize_centers", [True, False])
def test_gradients_are_the_numerical_ones(normalize_centers):
    embeddings, centers = random_inputs()

    def log_b(embeddings, centers, scale):
        return nontarget_logsumexp(
            embeddings, centers, LABELS, scale, normalize_centers=normalize_centers
        )[0]

    inputs = [embeddings, centers, np.linspace(1, 5, BATCH)]
    analytic, numerical = jacobians(log_b, inputs, delta=1e-5)
    for value, expected in zip(analytic, numerical, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-7, atol=1e-8)


def test_no_gradient_flows_through_the_largest_cosine():
    for gradient in gradients(lambda *x: nontarget_logsumexp(*x, LABELS)[1], random_inputs()):
        np.testing.assert_array_equal(gradient, 0.0)


def test_identity_centers():
    """Cosines (1, 0, 0) with label 0 and label 1, by hand."""
    x, w = ops.convert_to_tensor([[1.0, 0.0, 0.0]] * 2), ops.eye(3)
    log_b, hardest = nontarget_logsumexp(x, w, [0, 1], scale=5.0)
    np.testing.assert_allclose(log_b, [math.log(2.0), math.log(math.exp(5.0) + 1.0)], rtol=1e-6)
    np.testing.assert_array_equal(hardest, [0.0, 1.0])


def test_two_classes_leave_one_other():
    log_b, hardest = nontarget_logsumexp(ops.eye(2), [[3.0, 4.0], [0.0, 2.0]], [0, 1], scale=10.0)
    np.testing.assert_allclose(log_b, [0.0, 8.0], atol=1e-6)
    np.testing.assert_allclose(hardest, [0.0, 0.8], atol=1e-6)


def test_embeddings_are_taken_as_they_are():
    embeddings, centers = random_inputs()
    once = nontarget_logsumexp(2.0 * embeddings, centers, LABELS, 15.0)
    scaled = nontarget_logsumexp(embeddings, centers, LABELS, 30.0)
    np.testing.assert_allclose(once[0], scaled[0], rtol=rounded(1e-12))
    np.testing.assert_allclose(once[1], 2.0 * scaled[1], rtol=rounded(1e-12))


def test_lengths_of_the_centers_do_not_matter_when_normalized():
    embeddings, centers = random_inputs()
    lengths = np.array([1e-12, 1e-3, 0.5, 1.0, 1e3, 1e12])[:, None]
    for got, want in zip(
        nontarget_logsumexp(embeddings, centers * lengths, LABELS, 64.0),
        nontarget_logsumexp(embeddings, centers, LABELS, 64.0),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=rounded(1e-12))


def test_large_common_offset(run):
    """All cosines .99: a difference of large numbers would lose what is left."""
    angle = math.acos(0.99)
    around = 2 * math.pi * np.arange(CLASSES) / CLASSES
    centers = np.stack(
        [
            np.full(CLASSES, 0.99),
            math.sin(angle) * np.cos(around),
            math.sin(angle) * np.sin(around),
        ],
        axis=1,
    )
    embeddings = ops.convert_to_tensor([[1.0, 0.0, 0.0]] * BATCH)
    log_b, hardest = run(lambda x, w: nontarget_logsumexp(x, w, LABELS, 64.0))(
        embeddings, ops.convert_to_tensor(centers, "float32")
    )
    np.testing.assert_allclose(log_b, np.full(BATCH, 64.0 * 0.99 + math.log(5.0)), rtol=1e-6)
    np.testing.assert_allclose(hardest, np.full(BATCH, 0.99), rtol=1e-6)


def test_exponentials_that_would_overflow():
    log_b, _ = nontarget_logsumexp(ops.eye(2), ops.ones((3, 2)), [0, 1], scale=1e5)
    np.testing.assert_allclose(log_b, 1e5 / math.sqrt(2.0) + math.log(2.0), rtol=1e-6)


def test_labels_out_of_range_give_nan_in_their_row_only(run):
    embeddings, centers = random_inputs()
    labels = np.array([2, -1, CLASSES, 2**30 if ON_JAX else 2**40, 3])
    log_b, hardest = run(lambda y: nontarget_logsumexp(embeddings, centers, y, 30.0))(labels)
    want = slow(embeddings, centers, 30.0)
    assert np.isnan(log_b[1:4]).all()
    assert np.isnan(hardest[1:4]).all()
    rows = np.array([0, 4])
    np.testing.assert_allclose(np.asarray(log_b)[rows], want[0][rows], rtol=rounded(1e-12))
    np.testing.assert_allclose(np.asarray(hardest)[rows], want[1][rows], rtol=rounded(1e-12))


def test_zero_center_has_cosine_0_and_a_finite_gradient(run):
    embeddings, centers = random_inputs()
    centers[1] = 0.0
    inputs = [ops.convert_to_tensor(value, "float32") for value in (embeddings, centers, 30.0)]
    got = run(lambda *inputs: values_and_gradients(*inputs, {}))(*inputs)
    np.testing.assert_allclose(got[0], slow(embeddings, centers, 30.0)[0], rtol=2e-6)
    assert all(np.isfinite(value).all() for value in got)


def test_equal_subcenters_share_no_gradient():
    """The row that wins gets the gradient of the class once, not once for each equal row."""
    embeddings, centers = random_inputs()
    doubled, scale = np.repeat(centers, 2, axis=0), np.array(8.0)
    single = values_and_gradients(embeddings, centers, scale, {})
    double = values_and_gradients(embeddings, doubled, scale, {"num_subcenters": 2})
    of_classes = ops.sum(ops.reshape(double[3], (CLASSES, 2, DIM)), axis=1)
    np.testing.assert_allclose(double[0], single[0], rtol=rounded(1e-12))
    close = {"rtol": rounded(1e-12), "atol": rounded(1e-14, 1e-6)}
    np.testing.assert_allclose(of_classes, single[3], **close)


def test_centers_may_be_a_variable():
    embeddings, centers = random_inputs()
    variable = keras.Variable(centers.astype("float32"))
    got = value_and_gradients(
        lambda x: nontarget_logsumexp(x, variable, LABELS, 30.0)[0],
        [embeddings.astype("float32")],
        [variable],
        upstream=UPSTREAM,
    )
    want = slow_gradients(embeddings, centers, 30.0, {})[1]
    np.testing.assert_allclose(got[2], want, atol=1e-5 * np.abs(want).max())


@tensorflow_only
def test_centers_may_be_a_variable_of_tensorflow():
    import tensorflow as tf

    embeddings, centers = random_inputs()
    variable = tf.Variable(centers.astype("float32"))
    with tf.GradientTape() as tape:
        log_b, _ = nontarget_logsumexp(embeddings.astype("float32"), variable, LABELS, 30.0)
        total = tf.reduce_sum(log_b * tf.cast(UPSTREAM, "float32"))
    want = slow_gradients(embeddings, centers, 30.0, {})[1]
    gradient = tape.gradient(total, variable)
    np.testing.assert_allclose(gradient, want, atol=1e-5 * np.abs(want).max())


def test_lists_and_columns_of_labels():
    embeddings, centers = random_inputs()
    log_b, _ = nontarget_logsumexp(embeddings.tolist(), centers.tolist(), LABELS[:, None], 4.0)
    np.testing.assert_allclose(log_b, slow(embeddings, centers, 4.0)[0], rtol=1e-5)


def test_empty_batch(run):
    labels = np.zeros(0, "int32")
    log_b, hardest = run(lambda x: nontarget_logsumexp(x, ops.eye(3), labels))(ops.zeros((0, 3)))
    assert log_b.shape == hardest.shape == (0,)


@tensorflow_only
def test_unknown_batch_size():
    import tensorflow as tf

    embeddings, centers = random_inputs()

    @tf.function(
        input_signature=[tf.TensorSpec((None, DIM), tf.float64), tf.TensorSpec((None,), tf.int32)]
    )
    def log_b_of(embeddings, labels):
        return nontarget_logsumexp(embeddings, centers, labels, 30.0)[0]

    want = slow(embeddings, centers, 30.0)[0]
    np.testing.assert_allclose(log_b_of(embeddings, LABELS), want, rtol=1e-12)
    np.testing.assert_allclose(log_b_of(embeddings[:2], LABELS[:2]), want[:2], rtol=1e-12)


def test_rows_that_are_no_multiple_of_the_subcenters():
    message = (
        "`centers` must have `num_subcenters` rows for each class. "
        "Received: centers.shape=(5, 2), num_subcenters=2"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        nontarget_logsumexp(ops.eye(2), ops.ones((5, 2)), [0, 1], num_subcenters=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": -1.0}, "`scale` must be a finite number, at least 0. Received: scale=-1.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"scale": "a"}, "`scale` must be a number or a tensor. Received: scale='a'"),
        ({"scale": None}, "scale=None"),
        ({"scale": [1.0, 2.0]}, "scalar or (batch,). Received: scale.shape=(2,), batch=3"),
        ({"scale": [[1.0], [2.0], [3.0]]}, "scale.shape=(3, 1)"),
        ({"centers": np.ones(4, "float32")}, "`centers` must be a matrix of real numbers"),
        ({"embeddings": np.ones((3, 4), "complex64")}, "embeddings.dtype="),
        ({"normalize_centers": "no"}, "normalize_centers='no'"),
    ],
)
def test_arguments_that_are_refused(change, message):
    given = {
        "embeddings": np.ones((3, 4), "float32"),
        "centers": np.ones((5, 4), "float32"),
        "labels": np.array([0, 1, 2]),
    }
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        nontarget_logsumexp(**{**given, **change})


def test_a_negative_scale_of_a_row_gives_nan_there_only():
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(rows, 4)).astype("float32") for rows in (3, 5))
    scale = np.array([2.0, -2.0, 0.0], "float32")
    log_b, _ = nontarget_logsumexp(x, w, np.array([0, 1, 2]), scale)
    assert np.isnan(log_b).tolist() == [False, True, False]
    assert float(log_b[2]) == pytest.approx(np.log(4.0))


def test_public_name():
    assert km.nontarget_logsumexp is nontarget_logsumexp
