"""The heads against the recorded values of golden_values/, in float32 and in float64."""

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf

import keras_margin as km

HEADS = ["NormFace", "CosFace", "AMSoftmax", "ArcFace", "AdaCos"]
FILES = [*HEADS, "ignore_class"]
CASES = {
    f"{file}: {case['name']}": case
    for file in FILES
    for case in reference.golden_cases(file)
    if case["head"] in HEADS
}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])


def head_of(case, dtype):
    head = getattr(km, case["head"])(**case["config"], dtype=dtype)
    centers = np.array(case["centers"], dtype)
    head.build((None, centers.shape[1]))
    head.centers.assign(centers)
    return head


def steps_of(case, dtype):
    """(recorded step, embeddings, labels) of each training call."""
    for step in case["steps"]:
        yield step, tf.constant(step["embeddings"], dtype), np.array(step["labels"], "int32")


def assert_values(got, want, case, dtype):
    atol = case.get("atol", 1e-4)
    tolerance = {"rtol": 1e-4, "atol": atol} if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-9}
    reference.assert_golden(keras.ops.convert_to_numpy(got), want, **tolerance)


def assert_gradient(got, want, dtype):
    largest = 0.0 if want is None else np.abs(want).max()
    tolerance = {"rtol": 1e-4, "atol": 2e-4 * largest}
    if dtype == "float64":
        tolerance = {"rtol": 1e-9, "atol": 1e-9}
    reference.assert_golden(keras.ops.convert_to_numpy(got), want, **tolerance)


def assert_state(head, step, case, dtype):
    if "state" in step:
        assert_values([head.current_scale], [step["state"]["scale"]], case, dtype)


def state_of(head):
    return [variable.numpy() for variable in head.non_trainable_variables]


def assert_gradients(head, losses_of, embeddings, step, dtype):
    """The gradients of sum(losses) / batch are as recorded."""
    with tf.GradientTape() as tape:
        tape.watch(embeddings)
        mean = tf.reduce_sum(losses_of(embeddings)) / len(embeddings)
    of_embeddings, of_centers = tape.gradient(
        mean,
        [embeddings, head.centers.value],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    assert_gradient(of_embeddings, step["grad_embeddings"], dtype)
    assert_gradient(tf.convert_to_tensor(of_centers), step["grad_centers"], dtype)


@every_dtype
@every_case
def test_plain_logits(case, dtype):
    embeddings = np.array(case["steps"][0]["embeddings"], dtype)
    logits = head_of(case, dtype)(embeddings)
    assert keras.backend.standardize_dtype(logits.dtype) == dtype
    assert_values(logits, case["plain_logits"], case, dtype)


@every_dtype
@every_case
def test_logits_with_margin(case, dtype):
    head = head_of(case, dtype)
    for step, embeddings, labels in steps_of(case, dtype):
        logits = head(embeddings, labels)
        assert keras.backend.standardize_dtype(logits.dtype) == dtype
        assert_values(logits, step["logits"], case, dtype)
        assert_state(head, step, case, dtype)


@every_dtype
@every_case
def test_gradients_of_cross_entropy_of_the_logits(case, dtype):
    head = head_of(case, dtype)
    for step, embeddings, labels in steps_of(case, dtype):
        counted = np.flatnonzero(labels != head.ignore_class)

        def losses_of(embeddings, labels=labels, counted=counted):
            logits = tf.gather(head(embeddings, labels), counted)
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels[counted], logits)

        assert_gradients(head, losses_of, embeddings, step, dtype)


@every_dtype
@every_case
def test_loss(case, dtype):
    head = head_of(case, dtype)
    for step, embeddings, labels in steps_of(case, dtype):
        losses = head.loss(embeddings, labels)
        assert keras.backend.standardize_dtype(losses.dtype) == dtype
        assert_values(losses, step["loss"], case, dtype)
        assert_state(head, step, case, dtype)


@every_dtype
@every_case
def test_gradients_of_loss(case, dtype):
    head = head_of(case, dtype)
    for step, embeddings, labels in steps_of(case, dtype):

        def losses_of(embeddings, labels=labels):
            return head.loss(embeddings, labels)

        assert_gradients(head, losses_of, embeddings, step, dtype)


@every_dtype
@every_case
def test_evaluation_is_plain_and_moves_no_state(case, dtype):
    head = head_of(case, dtype)
    for _, embeddings, labels in steps_of(case, dtype):
        head.loss(embeddings, labels)
    before = state_of(head)

    plain = keras.ops.convert_to_numpy(head(embeddings))
    logits = keras.ops.convert_to_numpy(head(embeddings, labels, training=False))
    losses = head.loss(embeddings, labels, training=False)

    counted = labels != head.ignore_class
    assert_values(logits[counted], plain[counted], case, dtype)
    want = reference.softmax_loss(plain.astype("float64"), labels, head.ignore_class)
    assert_values(losses, want, case, dtype)
    for variable, value in zip(state_of(head), before, strict=True):
        np.testing.assert_array_equal(variable, value)
