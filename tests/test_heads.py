"""The heads: against the NumPy reference, on every edge, in every precision, and through Keras."""

import inspect
import json
import math
import os
import re
import subprocess
import sys
from typing import NamedTuple

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay

import keras_margin as km
from keras_margin.margins import AngularMargin, CosineMargin
from keras_margin.scales import AdaCosScale, FixedScale, ScalePolicy

DIM, CLASSES = 5, 6


class Case(NamedTuple):
    make: object  # (**layer arguments) -> head
    slow: object  # the head in reference.py
    settings: dict  # its keyword arguments


def slow_adacos_with_margin(embeddings, centers, labels=None, state=None, *, margin, **settings):
    """AdaCos' scale, moved first, and ArcFace's margin."""
    _, state = reference.adacos(embeddings, centers, labels, state, **settings)
    scale = state["scale"]
    logits, _ = reference.arcface(
        embeddings, centers, labels, margin=margin, scale=scale, **settings
    )
    return logits, state


CASES = {
    "NormFace": Case(
        lambda **k: km.NormFace(CLASSES, 20.0, **k), reference.normface, {"scale": 20.0}
    ),
    "CosFace": Case(lambda **k: km.CosFace(CLASSES, **k), reference.cosface, {}),
    "AMSoftmax": Case(lambda **k: km.AMSoftmax(CLASSES, **k), reference.amsoftmax, {}),
    "ArcFace": Case(lambda **k: km.ArcFace(CLASSES, **k), reference.arcface, {}),
    "ArcFace-1.2": Case(
        lambda **k: km.ArcFace(CLASSES, 1.2, 8.0, **k),
        reference.arcface,
        {"margin": 1.2, "scale": 8.0},
    ),
    "AdaCos": Case(lambda **k: km.AdaCos(CLASSES, **k), reference.adacos, {}),
    "AdaCos-fixed": Case(
        lambda **k: km.AdaCos(CLASSES, dynamic=False, **k), reference.adacos, {"dynamic": False}
    ),
    "MarginHead": Case(
        lambda **k: km.MarginHead(CLASSES, AngularMargin(0.3), AdaCosScale(CLASSES), **k),
        slow_adacos_with_margin,
        {"margin": 0.3},
    ),
    "ArcFace-subcenters": Case(
        lambda **k: km.ArcFace(CLASSES, num_subcenters=3, **k),
        reference.arcface,
        {"num_subcenters": 3},
    ),
    "AdaCos-subcenters": Case(
        lambda **k: km.AdaCos(CLASSES, num_subcenters=2, **k),
        reference.adacos,
        {"num_subcenters": 2},
    ),
}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
compiled = pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
mixed = pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])


def exactly(message):
    return f"^{re.escape(message)}$"


def random_batch(number=7, seed=0):
    """Embeddings of lengths from 0.1 to 30, and their labels."""
    rng = np.random.default_rng(seed)
    embeddings = rng.normal(size=(number, DIM)) * np.geomspace(0.1, 30.0, number)[:, None] / 2
    return embeddings, rng.integers(0, CLASSES, number)


def centers_of(head):
    rng = np.random.default_rng(100)
    rows = head.num_classes * head.num_subcenters
    return rng.normal(size=(rows, DIM)) * rng.uniform(0.3, 3.0, (rows, 1))


def built(head, centers=None):
    centers = centers_of(head) if centers is None else np.asarray(centers)
    head.build((None, centers.shape[1]))
    head.centers.assign(centers)
    return head


def state_of(head):
    return [variable.numpy() for variable in head.non_trainable_variables]


def loss_and_gradients(head, embeddings, labels, **settings):
    """Losses, and the gradients of their mean."""
    with tf.GradientTape() as tape:
        tape.watch(embeddings)
        loss = head.loss(embeddings, labels, **settings)
        mean = tf.reduce_mean(loss)
    return loss, *tape.gradient(mean, [embeddings, head.centers.value])


def through_keras(head, embeddings, labels, ignore_class=None):
    """The same from Keras' cross-entropy of the logits."""
    entropy = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignore_class, reduction="none"
    )
    with tf.GradientTape() as tape:
        tape.watch(embeddings)
        loss = entropy(labels, head(embeddings, labels))
        mean = tf.reduce_mean(loss)
    return loss, *tape.gradient(mean, [embeddings, head.centers.value])


def slow_loss(case, embeddings, centers, labels, ignore_class=None, state=None):
    logits, _ = case.slow(
        embeddings, centers, labels, state, ignore_class=ignore_class, **case.settings
    )
    return reference.softmax_loss(logits, labels, ignore_class)


def slow_loss_and_gradients(case, embeddings, centers, labels, ignore_class=None):
    def loss(x, w):
        return slow_loss(case, x, w, labels, ignore_class)

    return loss(embeddings, centers), *reference.gradients(loss, embeddings, centers)


def assert_close(got, want, relative=1e-5):
    """Within `relative` of each value, and of the largest one."""
    for value, expected in zip(got, want, strict=True):
        largest = np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(value, expected, rtol=relative, atol=relative * largest)


def assert_equal(got, want):
    for value, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(value, expected)


# The formulas


@every_case
def test_loss_and_gradients(case):
    embeddings, labels = random_batch()
    head = built(case.make())
    got = loss_and_gradients(head, tf.constant(embeddings, "float32"), labels)
    assert_close(got, slow_loss_and_gradients(case, embeddings, centers_of(head), labels))


@compiled
@pytest.mark.parametrize("name", ["ArcFace", "AdaCos", "MarginHead", "ArcFace-subcenters"])
def test_loss_and_gradients_compiled(name, jit_compile):
    embeddings, labels = random_batch()
    head = built(CASES[name].make())
    ask = tf.function(lambda x: loss_and_gradients(head, x, labels), jit_compile=jit_compile)
    got = ask(tf.constant(embeddings, "float32"))
    assert_close(got, slow_loss_and_gradients(CASES[name], embeddings, centers_of(head), labels))


@every_case
def test_loss_and_gradients_in_float64(case):
    embeddings, labels = random_batch()
    head = built(case.make(dtype="float64"))
    got = loss_and_gradients(head, tf.constant(embeddings), labels)
    assert [value.dtype for value in got] == [tf.float64] * 3
    want = slow_loss_and_gradients(case, embeddings, centers_of(head), labels)
    assert_close(got, want, relative=1e-9)


@every_case
def test_cross_entropy_of_the_logits_is_the_loss(case):
    embeddings, labels = random_batch()
    head = built(case.make())
    got = through_keras(head, tf.constant(embeddings, "float32"), labels)
    assert_close(got, slow_loss_and_gradients(case, embeddings, centers_of(head), labels))


@every_case
def test_logits(case):
    embeddings, labels = random_batch()
    head = built(case.make())
    plain = head(embeddings)
    want, _ = case.slow(embeddings, centers_of(head), **case.settings)
    np.testing.assert_allclose(plain, want, rtol=1e-5, atol=1e-4)
    margined = head(embeddings, labels)
    want, _ = case.slow(embeddings, centers_of(head), labels, **case.settings)
    np.testing.assert_allclose(margined, want, rtol=1e-5, atol=1e-4)
    assert margined.shape == (7, CLASSES)
    assert margined.dtype == plain.dtype == tf.float32


@every_case
def test_three_training_calls(case):
    head, state = built(case.make(dtype="float64")), None
    for seed in range(3):
        embeddings, labels = random_batch(seed=seed)
        want, state = case.slow(embeddings, centers_of(head), labels, state, **case.settings)
        np.testing.assert_allclose(head(embeddings, labels), want, rtol=1e-12, atol=1e-12)
    assert head.steps.numpy() == 3


@every_case
def test_loss_and_cosines(case):
    embeddings, labels = random_batch()
    head = built(case.make(dtype="float64"))
    loss, target, hardest = head.loss_and_cosines(embeddings, labels)
    subcenters = case.settings.get("num_subcenters", 1)
    cosines = reference.cosines(embeddings, centers_of(head), subcenters)
    rows = np.arange(len(labels))
    np.testing.assert_allclose(loss, slow_loss(case, embeddings, centers_of(head), labels))
    np.testing.assert_allclose(target, cosines[rows, labels], rtol=1e-12)
    cosines[rows, labels] = -2.0
    np.testing.assert_allclose(hardest, cosines.max(axis=1), rtol=1e-12)


def test_margin_per_class_is_that_of_the_label():
    margins = [0.0, 0.1, 0.4, 0.9, 0.2, 0.6]
    head = built(km.ArcFace(CLASSES, margins))
    embeddings, labels = random_batch()
    want = [
        reference.softmax_loss(
            reference.arcface(x[None], centers_of(head), [y], margin=np.float64(margins[y]))[0], [y]
        )
        for x, y in zip(embeddings, labels, strict=True)
    ]
    np.testing.assert_allclose(head.loss(embeddings, labels), np.ravel(want), rtol=1e-5, atol=1e-5)


def test_subcenters_are_class_major_and_the_best_one_counts():
    head = built(km.NormFace(2, 10.0, num_subcenters=2), np.eye(4))
    logits = head(np.array([[0.6, 0.8, 0.0, 0.0], [0.0, 0.0, 0.8, -0.6]]))
    np.testing.assert_allclose(logits, [[8.0, 0.0], [0.0, 8.0]], atol=1e-6)


@pytest.mark.parametrize("num_classes", [10, 1000, 10572])
def test_loss_at_right_angles(num_classes):
    """A zero embedding has cosine 0 with all: 32.88, 37.59, 39.95 for ArcFace."""
    zero = np.zeros((1, DIM))
    angular = built(km.ArcFace(num_classes)).loss(zero, [3])
    np.testing.assert_allclose(angular, math.log(num_classes - 1) + 64 * math.sin(0.5), rtol=1e-6)
    cosine = built(km.CosFace(num_classes)).loss(zero, [3])
    np.testing.assert_allclose(cosine, math.log(num_classes - 1) + 64 * 0.35, rtol=1e-6)


class ScaleOfNorms(ScalePolicy):
    """A policy whose scale differs per row."""

    def scale_of(self, norms):
        return 2.0 * norms


def test_scale_may_differ_per_row():
    embeddings, labels = random_batch()
    head = built(km.MarginHead(CLASSES, CosineMargin(0.35), ScaleOfNorms(), dtype="float64"))
    assert head.current_scale is None
    scales = 2.0 * reference.norms(embeddings)[:, None]
    logits, _ = reference.cosface(embeddings, centers_of(head), labels, scale=1.0)
    np.testing.assert_allclose(head(embeddings, labels), scales * logits, rtol=1e-12)
    losses = reference.softmax_loss(scales * logits, labels)
    np.testing.assert_allclose(head.loss(embeddings, labels), losses, rtol=1e-9)


# What must hold whatever the numbers


@pytest.mark.parametrize("rule", [CosineMargin(0.0), AngularMargin(0.0)])
def test_zero_margin_is_the_normalized_softmax(rule):
    embeddings, labels = random_batch()
    head = built(km.MarginHead(CLASSES, rule, 20.0))
    plain = built(km.NormFace(CLASSES, 20.0))
    assert_equal(head.loss(embeddings, labels), plain.loss(embeddings, labels))


@every_case
def test_lengths_do_not_matter(case):
    embeddings, labels = random_batch()
    lengths = np.geomspace(1e-6, 1e6, len(embeddings))[:, None]
    want = built(case.make()).loss(embeddings, labels)
    np.testing.assert_allclose(
        built(case.make()).loss(embeddings * lengths, labels), want, rtol=1e-5
    )
    head = case.make()
    built(head, centers_of(head) * 1e3)
    np.testing.assert_allclose(head.loss(embeddings, labels), want, rtol=1e-5)


@every_case
def test_order_of_the_classes_does_not_matter(case):
    embeddings, labels = random_batch()
    order = np.array([3, 0, 5, 1, 4, 2])
    head = built(case.make())
    want = head(embeddings, labels).numpy()[:, order]
    grouped = centers_of(head).reshape(CLASSES, -1, DIM)[order].reshape(-1, DIM)
    permuted = built(case.make(), grouped)
    got = permuted(embeddings, np.argsort(order)[labels])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("head", [km.CosFace, km.ArcFace])
def test_larger_margin_never_lowers_the_loss(head):
    embeddings, labels = random_batch(50)
    losses = [
        built(head(CLASSES, margin, 8.0)).loss(embeddings, labels).numpy()
        for margin in np.linspace(0.0, 1.2, 9)
    ]
    assert np.diff(losses, axis=0).min() >= -1e-5


@every_case
def test_labels_leave_evaluation_logits_alone(case):
    embeddings, labels = random_batch()
    head = built(case.make())
    plain = head(embeddings)
    assert_equal(head(embeddings, labels, training=False), plain)
    assert_equal(head(embeddings, labels[::-1], training=False), plain)


# Labels


FORMS = {
    "int64": lambda y: y,
    "uint8": lambda y: y.astype("uint8"),
    "int32 column": lambda y: y.astype("int32")[:, None],
    "whole floats": lambda y: y.astype("float32"),
    "float column": lambda y: y.astype("float64")[:, None],
    "one-hot": lambda y: np.eye(CLASSES)[y],
    "one-hot integers": lambda y: np.eye(CLASSES, dtype="int8")[y],
    "one-hot bool": lambda y: np.eye(CLASSES, dtype=bool)[y],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_forms_of_labels(form):
    embeddings, labels = random_batch()
    head = built(km.ArcFace(CLASSES))
    assert_equal(head.loss(embeddings, form(labels)), head.loss(embeddings, labels))
    assert_equal(head(embeddings, form(labels)), head(embeddings, labels))


ASKED = {
    "call": lambda head, x, y: head(x, y),
    "loss": lambda head, x, y: head.loss(x, y),
    "loss_and_cosines": lambda head, x, y: head.loss_and_cosines(x, y),
}
every_way = pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED.keys())


@every_way
@pytest.mark.parametrize(
    ("labels", "received"),
    [([0, 7], "labels[1]=7"), ([0.5, 1], "labels[0]=0.5"), ([0, math.nan], "labels[1]=nan")],
)
def test_labels_that_mean_no_class(ask, labels, received):
    message = f"`labels` must be whole numbers from 0 to 5 (num_classes=6). Received: {received}"
    with pytest.raises(ValueError, match=re.escape(message)):
        ask(built(km.ArcFace(CLASSES)), np.ones((2, DIM)), np.array(labels))


@every_way
def test_one_hot_of_another_width(ask):
    message = (
        "`labels` must have shape (batch,), (batch, 1) or, one-hot, (batch, 6) for num_classes=6. "
        "Received: labels.shape=(2, 4)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        ask(built(km.ArcFace(CLASSES)), np.ones((2, DIM)), np.eye(4)[:2])


@compiled
def test_compiled_code_gives_nan_for_labels_that_mean_no_class(jit_compile):
    embeddings, labels = random_batch()
    head = built(km.ArcFace(CLASSES))
    logits, loss = head(embeddings, labels), head.loss(embeddings, labels)
    bad = tf.constant(np.where(np.arange(7) % 3 == 1, [9, -1, 6, 0, 1.5, 0, 0], labels), tf.float32)

    @tf.function(jit_compile=jit_compile)
    def ask(labels):
        return head(embeddings, labels), *head.loss_and_cosines(embeddings, labels)

    rows, good = [1, 4], [0, 2, 3, 5, 6]
    for got in ask(bad):
        assert np.isnan(got.numpy()[rows]).all()
    got_logits, got_loss, target, hardest = (value.numpy()[good] for value in ask(bad))
    np.testing.assert_allclose(got_logits, logits.numpy()[good], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_loss, loss.numpy()[good], rtol=1e-5, atol=1e-5)
    assert np.isfinite([target, hardest]).all()


@compiled
def test_label_that_means_no_class_moves_no_statistic(jit_compile):
    embeddings, labels = random_batch()
    head, good = built(km.AdaCos(CLASSES)), built(km.AdaCos(CLASSES))
    bad = tf.constant([*labels[:-1], 99])
    tf.function(lambda y: head.loss(embeddings, y), jit_compile=jit_compile)(bad)
    good.loss(embeddings[:-1], labels[:-1])
    assert_close(state_of(head), state_of(good))


# Training and state


def schedule():
    return PolynomialDecay(0.1, 4, end_learning_rate=0.5, power=1.0)


STATEFUL = {
    "AdaCos": lambda: km.AdaCos(CLASSES),
    "AdaCosScale": lambda: km.ArcFace(CLASSES, scale=AdaCosScale(CLASSES)),
    "schedules": lambda: km.ArcFace(CLASSES, schedule(), schedule()),
    "ArcFace": lambda: km.ArcFace(CLASSES),
}
every_stateful = pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())


MOVES = {
    "call": lambda head, x, y: head(x, y),
    "call, training": lambda head, x, y: head(x, y, training=True),
    "loss": lambda head, x, y: head.loss(x, y),
    "loss, training": lambda head, x, y: head.loss(x, y, training=True),
    "loss_and_cosines": lambda head, x, y: head.loss_and_cosines(x, y),
}
STAYS = {
    "no labels": lambda head, x, y: head(x),
    "no labels, training": lambda head, x, y: head(x, training=True),
    "call": lambda head, x, y: head(x, y, training=False),
    "loss": lambda head, x, y: head.loss(x, y, training=False),
    "loss_and_cosines": lambda head, x, y: head.loss_and_cosines(x, y, training=False),
    "update_state": lambda head, x, y: head.loss(x, y, update_state=False),
}


@every_stateful
@pytest.mark.parametrize("ask", MOVES.values(), ids=MOVES.keys())
def test_labels_mean_training(make, ask):
    embeddings, labels = random_batch()
    head, same = built(make()), built(make())
    before = state_of(head)
    ask(head, embeddings, labels)
    same.loss(embeddings, labels)
    assert head.steps.numpy() == 1
    assert not any(np.array_equal(a, b) for a, b in zip(state_of(head), before, strict=True))
    assert_close(state_of(head), state_of(same), relative=1e-6)


@every_stateful
@pytest.mark.parametrize("ask", STAYS.values(), ids=STAYS.keys())
def test_all_else_leaves_state_alone(make, ask):
    embeddings, labels = random_batch()
    head = built(make())
    head.loss(embeddings, labels)
    before = state_of(head)
    ask(head, embeddings[::-1], labels)
    assert_equal(state_of(head), before)


def test_loss_without_training_has_no_margin():
    embeddings, labels = random_batch()
    arcface, plain = built(km.ArcFace(CLASSES)), built(km.NormFace(CLASSES))
    loss = arcface.loss(embeddings, labels, training=False)
    assert_equal(loss, plain.loss(embeddings, labels))


def test_update_state_false_has_the_margin_and_the_scale_in_force():
    embeddings, labels = random_batch()
    head = built(km.ArcFace(CLASSES, scale=AdaCosScale(CLASSES)))
    head.loss(embeddings, labels)
    scale = float(head.current_scale)
    other = np.roll(labels, 1)
    want = built(km.ArcFace(CLASSES, scale=scale)).loss(embeddings, other)
    assert_close(head.loss(embeddings, other, update_state=False), want)


def test_no_gradient_flows_through_the_scale_of_adacos():
    embeddings, labels = random_batch()
    head = built(km.AdaCos(CLASSES, dtype="float64"))
    moving = loss_and_gradients(head, tf.constant(embeddings), labels)
    fixed = built(km.NormFace(CLASSES, float(head.current_scale), dtype="float64"))
    assert_close(moving, loss_and_gradients(fixed, tf.constant(embeddings), labels), 1e-12)


def test_schedules_of_margin_and_scale_follow_the_training_calls_in_one_trace():
    margins = PolynomialDecay(0.0, 4, end_learning_rate=0.5, power=1.0)
    scales = PolynomialDecay(16.0, 4, end_learning_rate=64.0, power=1.0)
    head = built(km.ArcFace(CLASSES, margins, scales))
    embeddings, labels = random_batch()
    traces = []

    @tf.function
    def step():
        traces.append(1)
        return head.loss(embeddings, labels)

    got = [step() for _ in range(6)]
    want = [
        reference.softmax_loss(
            reference.arcface(
                embeddings,
                centers_of(head),
                labels,
                margin=np.float64(0.5 * min(t / 4, 1)),
                scale=16.0 + 48.0 * min(t / 4, 1),
            )[0],
            labels,
        )
        for t in range(6)
    ]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert len(traces) == 1


def test_steps_are_an_integer_under_mixed_precision():
    """float16 counts 2048 + 1 = 2048."""
    head = built(km.ArcFace(CLASSES, dtype="mixed_float16"))
    head.steps.assign(2048)
    head.loss(*random_batch())
    assert head.steps.numpy() == 2049
    assert head.steps.dtype == "int32"
    assert head.steps.aggregation == "only_first_replica"


# Rows that do not count


@every_case
def test_ignored_rows(case):
    embeddings, labels = random_batch()
    labels[[1, 4]] = -1
    head = built(case.make(ignore_class=-1))
    got = loss_and_gradients(head, tf.constant(embeddings, "float32"), labels)
    want = slow_loss_and_gradients(case, embeddings, centers_of(head), labels, ignore_class=-1)
    assert_close(got, want)
    np.testing.assert_array_equal(got[0].numpy()[[1, 4]], 0.0)
    np.testing.assert_array_equal(got[1].numpy()[[1, 4]], 0.0)


@every_stateful
def test_ignored_rows_are_in_no_statistic(make):
    embeddings, labels = random_batch()
    rows = np.array([0, 2, 3, 5, 6])
    all_rows, kept = make(), built(make())
    all_rows.ignore_class = -1
    built(all_rows).loss(embeddings, np.where(np.isin(np.arange(7), rows), labels, -1))
    kept.loss(embeddings[rows], labels[rows])
    assert_close(state_of(all_rows), state_of(kept))


ASKED_WITH_GRADIENTS = {
    "loss": loss_and_gradients,
    "logits": lambda head, x, y: through_keras(head, x, y, ignore_class=-1),
}


@pytest.mark.parametrize("ask", ASKED_WITH_GRADIENTS.values(), ids=ASKED_WITH_GRADIENTS.keys())
def test_ignored_row_may_hold_anything(run, ask):
    embeddings, labels = random_batch()
    labels[2], embeddings[2] = -1, 0.0
    head, same = (built(km.AdaCos(CLASSES, ignore_class=-1)) for _ in range(2))
    want = ask(same, tf.constant(embeddings, "float32"), labels)
    embeddings[2] = [math.nan, math.inf, -math.inf, 0.0, 1.0]
    got = run(lambda x: ask(head, x, labels))(tf.constant(embeddings, "float32"))
    assert_close(got, want)
    assert_close(state_of(head), state_of(same))


@every_stateful
def test_all_rows_ignored(make):
    embeddings, _ = random_batch()
    head = make()
    head.ignore_class = -1
    before = state_of(built(head))
    got = loss_and_gradients(head, tf.constant(embeddings, "float32"), np.full(7, -1))
    assert_equal(got, [np.zeros(7), np.zeros((7, DIM)), np.zeros((CLASSES, DIM))])
    assert_equal(state_of(head), before)


@every_stateful
@pytest.mark.parametrize("ask", [MOVES["call"], MOVES["loss"]], ids=["call", "loss"])
def test_row_that_is_not_finite_poisons_no_state(make, ask):
    embeddings, labels = random_batch()
    poisoned = embeddings.copy()
    poisoned[2, 0], poisoned[5, 1] = math.nan, math.inf
    rows = np.array([0, 1, 3, 4, 6])
    head, same = built(make()), built(make())
    ask(head, poisoned, labels)
    same.loss(embeddings[rows], labels[rows])
    assert_close(state_of(head), state_of(same))


@every_stateful
@pytest.mark.parametrize("ask", [MOVES["call"], MOVES["loss"]], ids=["call", "loss"])
def test_bad_batch_then_a_good_one_is_the_good_one_alone(make, ask):
    embeddings, labels = random_batch()
    head, same = built(make()), built(make())
    ask(head, np.full_like(embeddings, math.nan), labels)
    assert_close([ask(head, embeddings, labels)], [ask(same, embeddings, labels)])
    assert_equal(state_of(head), state_of(same))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_of_a_row_that_is_not_finite_is_nan(value):
    embeddings, labels = random_batch()
    head = built(km.ArcFace(CLASSES))
    want = head.loss(embeddings, labels).numpy()
    embeddings[3, 2] = value
    loss, target, hardest = head.loss_and_cosines(embeddings, labels)
    want[3] = math.nan
    np.testing.assert_allclose(loss, want, rtol=1e-5, atol=1e-6)
    assert np.isnan([target[3], hardest[3]]).all()


def test_empty_batch(run):
    head = built(km.AdaCos(CLASSES))
    before = state_of(head)

    def ask(x, y):
        return (
            head(x),
            head(x, y),
            *head.loss_and_cosines(x, y),
            *loss_and_gradients(head, x, y)[1:],
        )

    plain, logits, loss, target, hardest, of_embeddings, of_centers = run(ask)(
        tf.zeros((0, DIM)), tf.zeros(0, tf.int32)
    )
    assert plain.shape == logits.shape == (0, CLASSES)
    assert loss.shape == target.shape == hardest.shape == (0,)
    assert of_embeddings.shape == (0, DIM)
    assert np.isfinite(of_centers).all()
    assert_equal(state_of(head), before)


def test_empty_batch_with_subcenters():
    head = built(km.ArcFace(CLASSES, num_subcenters=2))
    assert head(np.zeros((0, DIM)), np.zeros(0, "int32")).shape == (0, CLASSES)
    assert head.loss(np.zeros((0, DIM)), np.zeros(0, "int32")).shape == (0,)


# Edges


@every_case
def test_batch_of_one(case):
    embeddings, labels = random_batch(1)
    head = built(case.make())
    got = loss_and_gradients(head, tf.constant(embeddings, "float32"), labels)
    assert_close(got, slow_loss_and_gradients(case, embeddings, centers_of(head), labels))


@every_case
def test_batch_of_one_class(case):
    embeddings, labels = random_batch()[0], np.full(7, 4)
    head = built(case.make())
    got = loss_and_gradients(head, tf.constant(embeddings, "float32"), labels)
    assert_close(got, slow_loss_and_gradients(case, embeddings, centers_of(head), labels))


def test_embedding_on_a_center():
    """x = w_0, y = 0 and y = 1, two classes: 4e-25 and 94.68."""
    head = built(km.ArcFace(2), np.eye(2))
    x = tf.constant([[1.0, 0.0]] * 2)
    loss, *gradients = loss_and_gradients(head, x, [0, 1])
    np.testing.assert_allclose(
        loss, [math.exp(-64 * math.cos(0.5)), 64 + 64 * math.sin(0.5)], rtol=1e-5
    )
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_embedding_opposite_to_its_center(run):
    """cos -1: the fallback's 64 (-1 - .5 sin .5) = -79.34."""
    head = built(km.ArcFace(2), np.eye(2))
    x = tf.constant([[-1.0, 0.0]])
    np.testing.assert_allclose(
        head(x, np.array([0]))[0, 0], -64 * (1 + 0.5 * math.sin(0.5)), rtol=1e-6
    )
    loss, *gradients = run(lambda x: loss_and_gradients(head, x, [0]))(x)
    np.testing.assert_allclose(loss, [64 * (1 + 0.5 * math.sin(0.5))], rtol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@every_case
def test_every_embedding_on_its_center(case):
    """Rounding brings the cosine of one in ten above 1."""
    rows = reference.unit(np.random.default_rng(0).normal(size=(CLASSES, DIM))).astype("float32")
    head = case.make()
    head = built(head, np.repeat(rows, head.num_subcenters, axis=0))
    got = loss_and_gradients(head, tf.constant(rows), np.arange(CLASSES))
    assert all(np.isfinite(value).all() for value in got)


def test_cosines_above_one():
    rows = reference.unit(np.random.default_rng(0).normal(size=(300, 64))).astype("float32")
    head = built(km.ArcFace(300), rows)
    target = head.loss_and_cosines(rows, np.arange(300))[1]
    assert np.max(target) > 1.0  # else the test shows nothing
    got = loss_and_gradients(head, tf.constant(rows), np.arange(300))
    assert all(np.isfinite(value).all() for value in got)


@pytest.mark.parametrize("ask", ASKED_WITH_GRADIENTS.values(), ids=ASKED_WITH_GRADIENTS.keys())
@pytest.mark.parametrize("head", [km.CosFace, km.ArcFace, km.AdaCos])
def test_edges_have_the_same_gradients_compiled(head, ask):
    """A non-target cosine of 1 gives 0 * inf through `where` elsewhere: NaN with XLA only."""
    centers = np.eye(4)
    centers[3] = 0.0
    x = tf.constant([[1.0, 0, 0, 0], [1, 0, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 0], [0, 6e9, 8e9, 0]])
    labels = np.array([1, 0, 0, 2, 3])
    want = ask(built(head(4), centers), x, labels)
    compiled_head = built(head(4), centers)
    got = tf.function(lambda x: ask(compiled_head, x, labels), jit_compile=True)(x)
    assert all(np.isfinite(value).all() for value in want)
    assert_close(got, want)


@every_case
def test_zero_vectors(case):
    embeddings, labels = random_batch()
    embeddings[2] = 0.0
    head = case.make()
    centers = centers_of(head)
    centers[1] = 0.0
    built(head, centers)
    got = loss_and_gradients(head, tf.constant(embeddings, "float32"), labels)
    assert_close(got[:1], [slow_loss(case, embeddings, centers, labels)])
    assert all(np.isfinite(value).all() for value in got)
    assert np.abs(got[1][2]).max() > 0  # so that it can leave 0


@every_case
def test_extreme_lengths(case):
    embeddings, labels = random_batch()
    embeddings = reference.unit(embeddings)
    lengths = np.array([1e-30, 1e-10, 1.0, 1e4, 1e10, 1e30, 0.3])[:, None]
    head = built(case.make())
    loss, of_embeddings, of_centers = loss_and_gradients(
        head, tf.constant(embeddings * lengths, "float32"), labels
    )
    want = slow_loss_and_gradients(case, embeddings, centers_of(head), labels)
    assert_close([loss, of_embeddings * lengths, of_centers], want)


# Precision


@mixed
@every_case
def test_mixed_precision_computes_in_float32(case, policy):
    embeddings, labels = random_batch()
    head, plain = built(case.make(dtype=policy)), built(case.make())
    half = tf.cast(embeddings, policy.removeprefix("mixed_"))
    assert_close(head.loss(half, labels), plain.loss(tf.cast(half, "float32"), labels), 1e-2)
    logits = head(half, labels)
    assert logits.dtype == head(half).dtype == head.loss(half, labels).dtype == tf.float32
    assert_close(logits, plain(tf.cast(half, "float32"), labels), 1e-2)
    assert {variable.dtype for variable in head.variables} <= {"float32", "int32"}


@mixed
def test_symbolic_output_is_float32_under_mixed_precision(policy):
    head = km.ArcFace(CLASSES, dtype=policy)
    logits = head(keras.Input((DIM,)), keras.Input((), dtype="int32"))
    assert logits.shape == (None, CLASSES)
    assert logits.dtype == "float32"


@mixed
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_large_labels_under_mixed_precision(policy, dtype):
    """In float16 69999 is infinite, and 2049 is 2048."""
    rng = np.random.default_rng(0)
    centers, embeddings = rng.normal(size=(70000, 4)), rng.normal(size=(3, 4))
    labels = np.array([69999, 2049, 65519], dtype)
    want = built(km.CosFace(70000), centers).loss(embeddings, labels)
    head = built(km.CosFace(70000, dtype=policy), centers)
    assert_close(head.loss(embeddings, labels), want, 1e-2)
    model = keras.Model(inputs := [keras.Input((4,)), keras.Input((), dtype=dtype)], head(*inputs))
    logits = model([embeddings, labels], training=True)
    loss = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    assert_close(loss, want, 1e-2)


@mixed
def test_adacos_trains_under_mixed_precision(policy):
    head = km.AdaCos(CLASSES, dtype=policy)
    inputs = [keras.Input((DIM,)), keras.Input((), dtype="int32")]
    embeddings = keras.layers.Dense(DIM, dtype=policy)(inputs[0])
    model = keras.Model(inputs, head(embeddings, inputs[1]))
    optimizer = keras.optimizers.SGD(0.05)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = random_batch(30)
    start = float(head.current_scale)
    history = model.fit([x / 5, y], y, batch_size=10, epochs=5, shuffle=False, verbose=0)
    losses = history.history["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert head.scale_policy.scale.dtype == "float32"
    assert float(head.current_scale) != start


def test_python_numbers_are_exact_in_float64():
    head = built(km.CosFace(CLASSES, 0.1, 9.3, dtype="float64"), np.eye(CLASSES))
    logits = head(np.eye(CLASSES)[:1], np.array([0])).numpy()
    np.testing.assert_array_equal(logits[0], [9.3 * (1.0 - 0.1), 0, 0, 0, 0, 0])


# Configuration


class Settings(NamedTuple):
    head: type
    own: object  # () -> its own arguments; a rule or a policy belongs to one head

    def make(self):
        return self.head(**self.own(), **COMMON)


COMMON = {
    "num_classes": 7,
    "num_subcenters": 2,
    "ignore_class": -1,
    "centers_initializer": keras.initializers.RandomNormal(stddev=0.3, seed=3),
    "centers_regularizer": keras.regularizers.L2(0.01),
    "seed": 5,
    "name": "mine",
    "dtype": "mixed_float16",
}
NON_DEFAULT = [
    Settings(
        km.MarginHead,
        lambda: {"margin": AngularMargin(0.3), "scale": AdaCosScale(7, max_scale=9.0)},
    ),
    Settings(
        km.MarginHead,
        lambda: {"margin": CosineMargin([0.1] * 7), "scale": FixedScale(schedule())},
    ),
    Settings(km.NormFace, lambda: {"scale": 12.0}),
    Settings(km.CosFace, lambda: {"margin": 0.2, "scale": 16.0}),
    Settings(km.CosFace, lambda: {"margin": schedule(), "scale": schedule()}),
    Settings(km.AMSoftmax, lambda: {"margin": 0.25, "scale": 15.0}),
    Settings(km.ArcFace, lambda: {"margin": 0.4, "scale": 32.0}),
    Settings(km.ArcFace, lambda: {"margin": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], "scale": 32.0}),
    Settings(
        km.SphereFace,
        lambda: {
            "margin": schedule(),
            "lambda_base": schedule(),
            "lambda_gamma": 0.2,
            "lambda_power": 2.0,
            "lambda_min": schedule(),
        },
    ),
    Settings(km.AdaCos, lambda: {"dynamic": False, "min_scale": 0.2, "max_scale": 5.0}),
    Settings(km.AdaCos, lambda: {"dynamic": True, "min_scale": 0.2, "max_scale": 5.0}),
]
every_config = pytest.mark.parametrize(
    "made", NON_DEFAULT, ids=[f"{made.head.__name__}-{i}" for i, made in enumerate(NON_DEFAULT)]
)


@every_config
def test_config_holds_every_argument(made):
    config = made.make().get_config()
    arguments = inspect.signature(made.head).parameters.keys() - {"kwargs"}
    arguments |= inspect.signature(km.MarginHead).parameters.keys() - {"kwargs", "margin", "scale"}
    assert arguments <= config.keys()


@every_config
def test_config_survives_json(made):
    head = built(made.make())
    text = json.dumps(keras.saving.serialize_keras_object(head))
    again = keras.saving.deserialize_keras_object(json.loads(text))
    assert type(again) is made.head
    assert again.get_config() == head.get_config()
    assert again.dtype_policy.name == "mixed_float16"
    again.centers.assign(centers_of(again))
    embeddings, labels = random_batch()
    assert_equal(again(embeddings, labels), head(embeddings, labels))
    # The second step of schedules.
    assert_equal(again(embeddings, labels), head(embeddings, labels))


def test_defaults_are_the_papers():
    config = km.ArcFace(10).get_config()
    assert (config["margin"], config["scale"]) == (0.5, 64.0)
    config = km.CosFace(10).get_config()
    assert (config["margin"], config["scale"]) == (0.35, 64.0)
    config = km.AMSoftmax(10).get_config()
    assert (config["margin"], config["scale"]) == (0.35, 30.0)
    assert km.NormFace(10).get_config()["scale"] == 64.0
    assert float(built(km.AdaCos(10)).current_scale) == pytest.approx(3.107, abs=5e-4)


def test_seed():
    first, same, other = (km.ArcFace(50, seed=seed) for seed in (3, 3, 4))
    for head in (first, same, other):
        head.build((None, 16))
    assert_equal(first.centers.numpy(), same.centers.numpy())
    assert not np.array_equal(first.centers, other.centers)


@pytest.mark.parametrize(("num_classes", "dim"), [(20, 512), (2000, 16)])
def test_centers_start_with_lengths_about_one(num_classes, dim):
    head = km.ArcFace(num_classes, seed=0)
    head.build((None, dim))
    lengths = reference.norms(head.centers.numpy())
    np.testing.assert_allclose(lengths.mean(), 1.0, atol=0.1)


def test_centers():
    head = km.ArcFace(CLASSES, num_subcenters=3)
    head.build((None, DIM))
    assert head.centers.shape == (CLASSES * 3, DIM)
    assert head.centers.path.endswith("/centers")
    assert [variable.path for variable in head.trainable_variables] == [head.centers.path]


def test_regularizer_of_the_centers():
    head = built(km.ArcFace(CLASSES, centers_regularizer=keras.regularizers.L2(0.5)))
    np.testing.assert_allclose(head.losses, [0.5 * (centers_of(head) ** 2).sum()], rtol=1e-5)


# Refused


@pytest.mark.parametrize("argument", ["num_classes", "num_subcenters"])
@pytest.mark.parametrize("value", [2.5, "10", True, None, math.nan, math.inf, [3]], ids=str)
def test_counts_that_are_no_whole_numbers(argument, value):
    message = f"`{argument}` must be a whole number. Received: {argument}={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        km.ArcFace(**{"num_classes": 10, argument: value})


@pytest.mark.parametrize(
    ("argument", "value", "smallest"),
    [
        ("num_classes", 1, 2),
        ("num_classes", 0, 2),
        ("num_classes", -3, 2),
        ("num_subcenters", 0, 1),
        ("num_subcenters", -1, 1),
    ],
)
def test_counts_that_are_too_small(argument, value, smallest):
    message = f"`{argument}` must be at least {smallest}. Received: {argument}={value}"
    with pytest.raises(ValueError, match=exactly(message)):
        km.ArcFace(**{"num_classes": 10, argument: value})


@pytest.mark.parametrize("value", [10.0, np.int64(10), np.float32(10)])
def test_whole_counts_of_any_type(value):
    assert km.ArcFace(value).num_classes == 10
    assert type(km.ArcFace(value).num_classes) is int


@pytest.mark.parametrize("margin", [0.5, "arcface", AngularMargin])
def test_margin_of_margin_head_is_a_rule(margin):
    message = (
        "`margin` of MarginHead must be a rule, such as keras_margin.margins.AngularMargin(0.5), "
        f"or None. Received: margin={margin!r}"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        km.MarginHead(10, margin)


def test_margin_of_a_head_is_checked_as_its_rule_is():
    with pytest.raises(
        ValueError, match=exactly("`margin` must be from 0 to 2.33 radians. Received: margin=28.6")
    ):
        km.ArcFace(10, 28.6)
    with pytest.raises(
        ValueError, match=exactly("`margin` must be finite and at least 0. Received: margin=-0.1")
    ):
        km.CosFace(10, -0.1)


def test_one_margin_per_class_means_as_many_as_classes():
    message = (
        "A `margin` per class must have one number for each of the num_classes=3 classes. "
        "Received: len(margin)=2"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        km.ArcFace(3, [0.1, 0.2])


@pytest.mark.parametrize("shape", [(None,), (None, None), (None, 4, 4, 8), ()], ids=str)
def test_shapes_of_embeddings(shape):
    message = (
        "`embeddings` must be (batch, dim) with a known dim: end the backbone with "
        f"GlobalAveragePooling2D, Flatten or Dense. Received: embeddings.shape={shape}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        km.ArcFace(10).build(shape)


def test_call_refuses_feature_maps():
    message = "GlobalAveragePooling2D, Flatten or Dense. Received: embeddings.shape=(2, 4, 4, 8)"
    with pytest.raises(ValueError, match=re.escape(message)):
        km.ArcFace(10)(np.zeros((2, 4, 4, 8)))


# Functional models


def functional(head, dtype="int32", label_shape=()):
    image, label = (
        keras.Input((3,), name="image"),
        keras.Input(label_shape, dtype=dtype, name="label"),
    )
    embeddings = keras.layers.Dense(DIM, name="embedding")(image)
    model = keras.Model([image, label], head(embeddings, label))
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model, keras.Model(image, head(embeddings))


def images(number=20):
    rng = np.random.default_rng(0)
    return rng.normal(size=(number, 3)).astype("float32"), rng.integers(0, CLASSES, number)


@every_stateful
def test_functional_model(make):
    head = make()
    model, inference = functional(head)
    x, y = images()
    centers = head.centers.numpy()
    model.fit([x, y], y, batch_size=5, epochs=2, verbose=0)
    assert head.steps.numpy() == 8
    assert not np.array_equal(head.centers, centers)

    before = state_of(head)
    logits = model.predict([x, y], verbose=0)
    evaluated = model.evaluate([x, y], y, verbose=0, return_dict=True)
    assert_equal(state_of(head), before)
    assert_close([logits], [inference.predict(x, verbose=0)])
    np.testing.assert_allclose(
        evaluated["loss"], reference.softmax_loss(logits.astype("float64"), y).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(evaluated["accuracy"], (logits.argmax(axis=1) == y).mean())


@pytest.mark.parametrize(
    ("dtype", "shape"), [("int64", (1,)), ("uint8", ()), ("float32", ()), ("float32", (CLASSES,))]
)
def test_functional_model_with_other_label_inputs(dtype, shape):
    x, y = images()
    labels = np.eye(CLASSES)[y] if shape == (CLASSES,) else y.reshape(-1, *shape)
    logits = []
    for label_dtype, label_shape, value in [("int32", (), y), (dtype, shape, labels.astype(dtype))]:
        keras.utils.set_random_seed(0)
        model, _ = functional(km.ArcFace(CLASSES), label_dtype, label_shape)
        logits.append(model([x, value], training=True))
    assert_equal(*logits)


def test_inference_model_shares_the_weights_and_sees_the_scale_move():
    head = km.AdaCos(CLASSES)
    model, inference = functional(head)
    x, y = images()
    model.fit([x, y], y, epochs=2, verbose=0)
    assert {v.path for v in inference.variables} == {v.path for v in model.variables}
    embeddings = model.get_layer("embedding")(x).numpy()
    want = float(head.current_scale) * reference.cosines(embeddings, head.centers.numpy())
    np.testing.assert_allclose(inference.predict(x, verbose=0), want, rtol=1e-4, atol=1e-5)
    assert inference.inputs[0].name == "image"
    assert len(inference.inputs) == 1


def test_random_two_class_model_is_right_half_the_time():
    """Accuracy of margined logits would be 0 % at the start."""
    x = np.random.default_rng(0).normal(size=(400, 3)).astype("float32")
    y = np.random.default_rng(1).integers(0, 2, 400)
    model, _ = functional(km.ArcFace(2))
    assert 0.4 < model.evaluate([x, y], y, verbose=0, return_dict=True)["accuracy"] < 0.6


def test_jit_compiled_functional_model_trains_to_the_same_weights():
    x, y = images()
    weights = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(0)
        model, _ = functional(km.AdaCos(CLASSES))
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=jit_compile,
        )
        model.fit([x, y], y, batch_size=5, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert_close(*weights, relative=1e-4)


@every_stateful
def test_save_and_load_keep_all_state(make, tmp_path):
    head = make()
    model, _ = functional(head)
    x, y = images()
    model.fit([x, y], y, batch_size=5, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    again = keras.saving.load_model(tmp_path / "model.keras")
    fresh, _ = functional(make())
    fresh.load_weights(tmp_path / "model.weights.h5")
    assert_equal(again.get_weights(), model.get_weights())
    assert_equal(fresh.get_weights(), model.get_weights())
    want = model([x, y], training=True)
    assert_close([again([x, y], training=True), fresh([x, y], training=True)], [want, want])


FRESH_PROCESS = """
import sys
from pathlib import Path
import keras, numpy as np
import keras_margin
for path in sorted(Path(sys.argv[1]).glob("*.keras")):
    model = keras.saving.load_model(path)
    arrays = np.load(path.with_suffix(".npz"))
    np.testing.assert_allclose(model([arrays["x"], arrays["y"]]), arrays["plain"], rtol=1e-5)
    logits = model([arrays["x"], arrays["y"]], training=True)
    np.testing.assert_allclose(logits, arrays["logits"], rtol=1e-5, atol=1e-5)
    print(path.stem)
"""


def test_load_in_a_fresh_process(tmp_path):
    x, y = images()
    for i, made in enumerate(NON_DEFAULT):
        model, _ = functional(made.make())
        model([x, y], training=True)
        model.save(tmp_path / f"{i:02}.keras")
        plain, logits = model([x, y]), model([x, y], training=True)
        np.savez(tmp_path / f"{i:02}.npz", x=x, y=y, plain=plain, logits=logits)
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{i:02}" for i in range(len(NON_DEFAULT))]


# Faults found by trying


@pytest.mark.parametrize("rows", [1, 6, 8])
@pytest.mark.parametrize(
    "ask",
    [
        lambda head, x, y: head.loss(x, y),
        lambda head, x, y: head(x, y),
        lambda head, x, y: km.nontarget_logsumexp(x, head.centers, y),
    ],
    ids=["loss", "call", "nontarget_logsumexp"],
)
def test_another_number_of_labels_than_rows_is_refused(ask, rows):
    embeddings, _ = random_batch(7)
    message = rf"`labels` must have one entry for each row of `embeddings`. Received: {rows} labels"
    with pytest.raises(ValueError, match=message):
        ask(built(km.ArcFace(CLASSES)), embeddings.astype("float32"), np.zeros(rows, "int32"))


def test_one_label_for_a_compiled_batch_of_unknown_size_is_nan():
    head = built(km.ArcFace(CLASSES))
    signature = [tf.TensorSpec((None, DIM), tf.float32), tf.TensorSpec((None,), tf.int32)]
    loss = tf.function(head.loss, signature)
    embeddings, labels = random_batch(7)
    assert np.isfinite(loss(embeddings, labels)).all()
    assert np.isnan(loss(embeddings, labels[:1])).all()


@pytest.mark.parametrize(
    "part", [lambda: AngularMargin(0.3), lambda: AdaCosScale(CLASSES)], ids=["rule", "scale"]
)
def test_rule_or_policy_of_another_head_is_refused(part):
    part = part()
    settings = {"margin" if isinstance(part, AngularMargin) else "scale": part}
    head = km.MarginHead(CLASSES, **settings, name="first")
    with pytest.raises(ValueError, match="belongs to the head 'first' already"):
        km.MarginHead(CLASSES, **settings)
    assert head.name == "first"


@pytest.mark.parametrize("ignore_class", [2.5, True, [1], "a", 2**32 + 3, math.nan])
def test_ignore_class_that_is_no_label_is_refused(ignore_class):
    with pytest.raises(ValueError, match="`ignore_class` must be None or a whole number"):
        km.ArcFace(CLASSES, ignore_class=ignore_class)


@pytest.mark.parametrize("labels", [np.array([1 + 2j]), np.array(["a"]), [None]])
def test_labels_that_are_no_numbers_are_refused(labels):
    with pytest.raises(ValueError, match="`labels` must be numbers"):
        built(km.ArcFace(CLASSES)).loss(np.ones((1, DIM), "float32"), labels)


def test_loss_builds_the_head():
    embeddings, labels = random_batch()
    head = km.ArcFace(CLASSES)
    assert head.loss(embeddings.astype("float32"), labels).shape == (7,)
    assert head.centers.shape == (CLASSES, DIM)


@pytest.mark.parametrize("shape", [(7, DIM, 2), (7,)])
def test_loss_of_embeddings_of_another_rank_is_refused(shape):
    with pytest.raises(ValueError, match="`embeddings` must have shape"):
        built(km.ArcFace(CLASSES)).loss(np.ones(shape, "float32"), np.zeros(7, "int32"))


def test_custom_loop_without_autograph_warnings(capfd):
    head = built(km.MarginHead(CLASSES, AngularMargin(0.3), 9.0))

    @tf.function
    def step(embeddings, labels):
        return head.loss(embeddings, labels)

    embeddings, labels = random_batch()
    step(tf.constant(embeddings, "float32"), labels)
    assert "AutoGraph" not in capfd.readouterr().err


def test_nontarget_logsumexp_of_float16_is_float32():
    x = np.eye(2, DIM, dtype="float16")
    log_b, _ = km.nontarget_logsumexp(x, np.eye(3, DIM, dtype="float16"), [0, 1], 64.0)
    assert log_b.dtype == tf.float32


def test_magface_needs_norms_above_zero():
    with pytest.raises(ValueError, match="`norm_range` must begin above 0"):
        km.MagFace(CLASSES, norm_range=(0.0, 110.0))


def test_lsoftmax_has_no_subcenters():
    with pytest.raises(ValueError, match="Received: num_subcenters=2"):
        km.LSoftmax(3, num_subcenters=2)


@pytest.mark.parametrize("seed", [2.5, -1, "a"])
def test_seed_is_a_whole_number(seed):
    for make in (km.ArcFace, km.ElasticFace):
        with pytest.raises(ValueError, match="`seed` must be"):
            make(3, seed=seed)
