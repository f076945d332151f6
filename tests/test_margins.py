"""Margin rules: values, slopes and order over the whole half circle."""

import json
import math
import re

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay

from keras_margin.margins import LARGEST_ANGULAR_MARGIN, AngularMargin, CosineMargin, MarginRule

MARGINS = [0.0, 0.2, 0.35, 0.5, 0.8, 1.0, 1.5, 2.0, 2.2, 2.33]
RULES = [CosineMargin(margin) for margin in MARGINS] + [AngularMargin(margin) for margin in MARGINS]
STEEP = 2.0**11.5  # the slope of the sine at cosine 1 in float32, see numerics.smallest_sine


def name_of(rule):
    return f"{type(rule).__name__}-{rule.margin}"


every_rule = pytest.mark.parametrize("rule", RULES, ids=name_of)
every_kind = pytest.mark.parametrize("kind", [CosineMargin, AngularMargin])


def exactly(message):
    return f"^{re.escape(message)}$"


def expected(rule, cosines):
    target = {CosineMargin: reference.cosface_target, AngularMargin: reference.arcface_target}
    return np.array([target[type(rule)](c, np.float64(rule.margin)) for c in cosines])


# Values


@every_rule
def test_values(rule):
    cosines = np.cos(np.linspace(0.0, math.pi, 101))
    margined = rule(tf.constant(cosines))
    np.testing.assert_allclose(margined, expected(rule, cosines), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("theta", "value"),
    [
        (1.0, math.cos(1.5)),  # 0.0707
        (0.0, math.cos(0.5)),
        (3.0, math.cos(3.0) - 0.5 * math.sin(0.5)),  # -1.2297, where cos(3.5) is -0.9365
        (math.pi, -1.0 - 0.5 * math.sin(0.5)),
    ],
)
def test_angular_margin_before_and_beyond_pi(run, theta, value):
    margined = run(AngularMargin(0.5))(tf.constant([math.cos(theta)], tf.float32))
    np.testing.assert_allclose(margined, [value], rtol=2e-6)


def test_cosine_margin(run):
    margined = run(CosineMargin(0.35))(tf.constant([0.8, -1.0, 1.0]))
    np.testing.assert_allclose(margined, [0.45, -1.35, 0.65], rtol=1e-6)


@every_rule
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_never_rises_with_the_angle(rule, dtype):
    cosines = np.cos(np.linspace(0.0, math.pi, 2000)).astype(dtype)
    margined = rule(tf.constant(cosines)).numpy()
    assert margined.dtype == dtype
    rounding = 4 * np.finfo(dtype).eps
    assert np.diff(margined).max() <= rounding
    assert (margined <= cosines + rounding).all()


@pytest.mark.parametrize("kind", [CosineMargin, AngularMargin])
def test_no_margin_changes_nothing(kind):
    cosines = np.cos(np.linspace(0.0, math.pi, 50)).astype("float32")
    np.testing.assert_array_equal(kind(0.0)(tf.constant(cosines)), cosines)


def test_largest_angular_margin_is_where_the_fallback_would_jump_up():
    jump = 1.0 - math.cos(LARGEST_ANGULAR_MARGIN)
    jump -= LARGEST_ANGULAR_MARGIN * math.sin(LARGEST_ANGULAR_MARGIN)
    next_jump = 1.0 - math.cos(2.34) - 2.34 * math.sin(2.34)
    assert jump < 0 < next_jump


# Slopes


@every_rule
def test_gradients_are_the_numerical_ones(rule):
    theta = np.linspace(0.1, 3.0, 30)
    theta = theta[abs(theta + rule.margin - math.pi) > 1e-3]  # not across the jump of ArcFace's
    cosines = tf.constant(np.cos(theta))
    analytic, numerical = tf.test.compute_gradient(rule, [cosines], delta=1e-6)
    np.testing.assert_allclose(analytic[0], numerical[0], rtol=1e-6, atol=1e-7)


def test_angular_margin_has_finite_slopes_at_every_cosine_that_rounding_makes(run):
    above_one = np.nextafter(np.float32(1), np.float32(2))
    cosines = tf.constant([1.0, above_one, -1.0, -above_one], tf.float32)
    rule = AngularMargin(0.5)

    def value_and_gradient(cosines):
        with tf.GradientTape() as tape:
            tape.watch(cosines)
            margined = rule(cosines)
        return margined, tape.gradient(margined, cosines)

    margined, slopes = run(value_and_gradient)(cosines)
    beyond = -1.0 - 0.5 * math.sin(0.5)
    np.testing.assert_allclose(margined, [math.cos(0.5)] * 2 + [beyond] * 2, rtol=1e-6)
    at_one = math.cos(0.5) + STEEP * math.sin(0.5)
    np.testing.assert_allclose(slopes, [at_one, at_one, 1.0, 1.0], rtol=1e-5)


# One margin per class


@every_kind
def test_one_margin_per_class(kind, run):
    margins, labels = [0.1, 0.5, 0.9, 0.0], [2, 0, 1, 3, 2]
    cosines = np.array([0.5, -0.2, 0.9, 0.3, -0.95])
    margined = run(kind(margins))(tf.constant(cosines), labels=tf.constant(labels))
    want = [expected(kind(margins[y]), [c])[0] for c, y in zip(cosines, labels, strict=True)]
    np.testing.assert_allclose(margined, want, rtol=1e-13)


@every_kind
def test_one_margin_per_class_needs_labels(kind):
    message = f"{kind.__name__} with one margin per class needs `labels`."
    with pytest.raises(ValueError, match=re.escape(message)):
        kind([0.1, 0.2])(tf.constant([0.5]))


@every_kind
@pytest.mark.parametrize("margin", [[0.1, 0.2], [0.1, 0.2, 0.3, 0.4]])
def test_one_margin_per_class_means_as_many_as_classes(kind, margin):
    message = (
        "A `margin` per class must have one number for each of the num_classes=3 classes. "
        f"Received: len(margin)={len(margin)}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        kind(margin).attach(3, lambda: 0)


# Schedules


def test_margin_follows_the_steps_it_is_attached_to(run):
    step = tf.Variable(0)
    rule = CosineMargin(PolynomialDecay(0.0, 5, end_learning_rate=0.5, power=1.0))
    rule.attach(3, lambda: step)
    margined = run(lambda: rule(tf.constant([0.8])))
    np.testing.assert_allclose(margined(), [0.8], rtol=1e-6)
    step.assign(3)
    np.testing.assert_allclose(margined(), [0.5], rtol=1e-6)
    step.assign(9)
    np.testing.assert_allclose(margined(), [0.3], rtol=1e-6)


def test_schedule_beyond_the_largest_margin_gives_nan():
    rule = AngularMargin(PolynomialDecay(0.0, 5, end_learning_rate=5.0, power=1.0))
    rule.attach(3, lambda: 3)
    assert np.isnan(rule(tf.constant([0.8]))).all()


# Configuration


def survivor(rule):
    """The rule after a round trip through JSON text."""
    text = json.dumps(keras.saving.serialize_keras_object(rule))
    return keras.saving.deserialize_keras_object(json.loads(text))


@every_kind
@pytest.mark.parametrize("margin", [0.25, [0.1, 0.7, 0.3]])
def test_config_round_trip(kind, margin):
    rule = kind(margin, name="mine")
    again = survivor(rule)
    assert type(again) is kind
    assert again.name == "mine"
    assert again.margin == margin
    assert again.get_config() == rule.get_config()


@every_kind
def test_config_round_trip_of_a_schedule(kind):
    again = survivor(kind(PolynomialDecay(0.0, 5, end_learning_rate=0.5, power=1.0)))
    again.attach(3, lambda: 3)
    want = expected(kind(0.3), [0.8])
    np.testing.assert_allclose(again(tf.constant([0.8])), want, rtol=1e-6)


@every_kind
def test_cosines_keep_their_precision_under_mixed_precision(kind):
    rule = kind(0.0, dtype="mixed_float16")
    cosines = np.float32([0.12345679, -0.98765433])
    np.testing.assert_array_equal(rule(tf.constant(cosines)), cosines)


@every_kind
def test_output_shape(kind):
    assert kind(0.5).compute_output_shape((None,)) == (None,)


def test_own_rule_takes_norms_labels_and_training():
    class NormMargin(MarginRule):
        def call(self, target_cosines, norms=None, labels=None, training=None):
            return target_cosines - 0.01 * norms

    margined = NormMargin()(tf.constant([0.5, 0.5]), norms=tf.constant([10.0, 20.0]), training=True)
    np.testing.assert_allclose(margined, [0.4, 0.3], rtol=1e-6)


# Refused


@pytest.mark.parametrize("margin", [-0.1, math.nan, math.inf, [0.1, -0.2]], ids=str)
def test_cosine_margins_out_of_range(margin):
    message = f"`margin` must be finite and at least 0. Received: margin={margin!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        CosineMargin(margin)


@pytest.mark.parametrize("margin", [-0.1, 2.34, 28.6, math.nan, math.inf, [0.5, 2.34]], ids=str)
def test_angular_margins_out_of_range(margin):
    message = f"`margin` must be from 0 to 2.33 radians. Received: margin={margin!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        AngularMargin(margin)


@every_kind
@pytest.mark.parametrize("margin", [True, "0.5", None], ids=str)
def test_margins_of_another_kind(kind, margin):
    message = (
        "`margin` must be a number, a LearningRateSchedule or a sequence with one number per "
        f"class. Received: margin={margin!r}"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        kind(margin)
