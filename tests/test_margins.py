"""Margin rules: values, slopes and order over the whole half circle."""

import json
import math
import re

import keras
import numpy as np
import pytest
import reference
from backends import DTYPES, WIDEST, float64_only, jacobians, rounded, value_and_gradients
from keras import ops
from keras.optimizers.schedules import PolynomialDecay

from keras_margin.margins import (
    LARGEST_ANGULAR_MARGIN,
    AngularMargin,
    CombinedMargin,
    CosineMargin,
    MarginRule,
    MultiplicativeMargin,
)

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
    margined = rule(ops.convert_to_tensor(cosines))
    close = {"rtol": rounded(1e-13), "atol": rounded(1e-14, 1e-6)}
    np.testing.assert_allclose(margined, expected(rule, cosines), **close)


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
    margined = run(AngularMargin(0.5))(ops.convert_to_tensor([math.cos(theta)], "float32"))
    np.testing.assert_allclose(margined, [value], rtol=2e-6)


def test_cosine_margin(run):
    margined = run(CosineMargin(0.35))(ops.convert_to_tensor([0.8, -1.0, 1.0]))
    np.testing.assert_allclose(margined, [0.45, -1.35, 0.65], rtol=1e-6)


@every_rule
@pytest.mark.parametrize("dtype", DTYPES)
def test_never_rises_with_the_angle(rule, dtype):
    cosines = np.cos(np.linspace(0.0, math.pi, 2000)).astype(dtype)
    margined = ops.convert_to_numpy(rule(ops.convert_to_tensor(cosines)))
    assert margined.dtype == dtype
    rounding = 4 * np.finfo(dtype).eps
    assert np.diff(margined).max() <= rounding
    assert (margined <= cosines + rounding).all()


@pytest.mark.parametrize("kind", [CosineMargin, AngularMargin])
def test_no_margin_changes_nothing(kind):
    cosines = np.cos(np.linspace(0.0, math.pi, 50)).astype("float32")
    np.testing.assert_array_equal(kind(0.0)(ops.convert_to_tensor(cosines)), cosines)


def test_largest_angular_margin_is_where_the_fallback_would_jump_up():
    jump = 1.0 - math.cos(LARGEST_ANGULAR_MARGIN)
    jump -= LARGEST_ANGULAR_MARGIN * math.sin(LARGEST_ANGULAR_MARGIN)
    next_jump = 1.0 - math.cos(2.34) - 2.34 * math.sin(2.34)
    assert jump < 0 < next_jump


# Slopes


@float64_only
@every_rule
def test_gradients_are_the_numerical_ones(rule):
    theta = np.linspace(0.1, 3.0, 30)
    theta = theta[abs(theta + rule.margin - math.pi) > 1e-3]  # not across the jump of ArcFace's
    analytic, numerical = jacobians(rule, [np.cos(theta)], delta=1e-6)
    np.testing.assert_allclose(analytic[0], numerical[0], rtol=1e-6, atol=1e-7)


def test_angular_margin_has_finite_slopes_at_every_cosine_that_rounding_makes(run):
    above_one = np.nextafter(np.float32(1), np.float32(2))
    cosines = ops.convert_to_tensor([1.0, above_one, -1.0, -above_one], "float32")
    rule = AngularMargin(0.5)
    margined, slopes = run(lambda x: value_and_gradients(rule, [x]))(cosines)
    beyond = -1.0 - 0.5 * math.sin(0.5)
    np.testing.assert_allclose(margined, [math.cos(0.5)] * 2 + [beyond] * 2, rtol=1e-6)
    at_one = math.cos(0.5) + STEEP * math.sin(0.5)
    np.testing.assert_allclose(slopes, [at_one, at_one, 1.0, 1.0], rtol=1e-5)


# Multiplicative and combined margins


MULTIPLICATIVE = [1.0, 1.35, 1.5, 2.0, 2.9, 4.0, 7.3, 50.0]
ANNEALINGS = {
    "psi alone": {"lambda_base": 0.0, "lambda_min": 0.0},
    "lambda 5": {"lambda_base": 0.0},
    "defaults": {},
}
COMBINED = [
    (1.5, 0.0, 0.0),  # SphereFace's
    (1.0, 0.5, 0.0),  # ArcFace's
    (1.0, 0.0, 0.35),  # CosFace's
    (1.0, 0.3, 0.2),
    (0.9, 0.4, 0.15),
    (0.1, 0.0, 0.0),
    (0.5, 3.0, 0.1),
    (1.0, 4.0, 0.1),  # beyond 2.33: with an additive margin it goes on falling as psi does
    (3.3, 7.7, 1.1),
    (1.0, 2.33, 0.0),
]
every_annealing = pytest.mark.parametrize("annealing", ANNEALINGS.values(), ids=ANNEALINGS.keys())
every_multiplier = pytest.mark.parametrize("margin", MULTIPLICATIVE)
every_combination = pytest.mark.parametrize("terms", COMBINED, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_annealing
@every_multiplier
def test_values_of_multiplicative_margins(margin, annealing):
    """The first call: lambda is 1000 / 1.12 by default."""
    weight = {0: 1000 / 1.12, 1: 5.0, 2: 0.0}[len(annealing)]
    cosines = np.cos(np.linspace(0.0, math.pi, 101))
    want = [
        reference.annealed_target(c, reference.sphereface_target(c, margin), weight)
        for c in cosines
    ]
    got = MultiplicativeMargin(margin, **annealing, dtype=WIDEST)(ops.convert_to_tensor(cosines))
    atol = rounded(1e-12, 1e-6) * margin**2
    np.testing.assert_allclose(got, want, rtol=rounded(1e-10), atol=atol)


def test_psi_of_margin_4_falls_by_2_each_quarter_of_pi(run):
    rule = MultiplicativeMargin(4.0, lambda_base=0.0, lambda_min=0.0)
    got = run(rule)(ops.convert_to_tensor(np.cos(np.linspace(0.0, math.pi, 5)), "float32"))
    np.testing.assert_allclose(got, [1.0, -1.0, -3.0, -5.0, -7.0], rtol=1e-5)


@every_combination
def test_values_of_combined_margins(terms):
    cosines = np.cos(np.linspace(0.0, math.pi, 101))
    want = [reference.combined_target(c, *terms) for c in cosines]
    got = CombinedMargin(*terms, dtype=WIDEST)(ops.convert_to_tensor(cosines))
    np.testing.assert_allclose(got, want, rtol=rounded(1e-10), atol=rounded(1e-12))


@pytest.mark.parametrize("terms", [(1.0, 0.3, 0.2), (0.9, 0.4, 0.15)])
def test_all_three_terms_count(run, terms):
    """At theta = pi/3; (1, .3, .2): 0.0217."""
    got = run(CombinedMargin(*terms))(ops.convert_to_tensor([0.5]))
    want = math.cos(terms[0] * math.pi / 3 + terms[1]) - terms[2]
    np.testing.assert_allclose(got, [want], rtol=1e-5)


def assert_never_rises(values, dtype):
    assert values.dtype == dtype
    assert np.isfinite(values).all()
    assert np.diff(values).max() <= 8 * np.finfo(dtype).eps * max(1.0, np.abs(values).max())


@every_dtype
@every_annealing
@every_multiplier
def test_multiplicative_margins_never_rise_with_the_angle(margin, annealing, dtype):
    cosines = np.cos(np.linspace(0.0, math.pi, 2000)).astype(dtype)
    rule = MultiplicativeMargin(margin, **annealing)
    assert_never_rises(ops.convert_to_numpy(rule(ops.convert_to_tensor(cosines))), dtype)


@every_dtype
@every_combination
def test_combined_margins_never_rise_with_the_angle(terms, dtype):
    cosines = np.cos(np.linspace(0.0, math.pi, 2000)).astype(dtype)
    rule = CombinedMargin(*terms)
    assert_never_rises(ops.convert_to_numpy(rule(ops.convert_to_tensor(cosines))), dtype)


@pytest.mark.parametrize(
    "rule",
    [
        *(CosineMargin(margin) for margin in MARGINS),
        *(AngularMargin(margin) for margin in MARGINS),
        *(MultiplicativeMargin(margin) for margin in MULTIPLICATIVE),
        CombinedMargin(1.0, 0.3, 0.2),
        CombinedMargin(0.9, 0.4, 0.15),
    ],
    ids=lambda rule: f"{type(rule).__name__}-{next(iter(rule.get_config().values()))}",
)
def test_falls_strictly_from_0_to_pi(rule):
    cosines = np.cos(np.linspace(0.0, math.pi, 2000))
    margined = ops.convert_to_numpy(rule(ops.convert_to_tensor(cosines)))
    assert np.diff(margined).max() < 0.0


@float64_only
@every_combination
def test_gradients_of_combined_margins_are_the_numerical_ones(terms):
    theta = np.linspace(0.1, 3.0, 9)
    if terms[::2] == (1.0, 0.0):
        theta = theta[abs(theta + terms[1] - math.pi) > 1e-3]  # not across ArcFace's jump
    rule = CombinedMargin(*terms)
    analytic, numerical = jacobians(rule, [np.cos(theta)], delta=1e-6)
    np.testing.assert_allclose(analytic[0], numerical[0], rtol=1e-5, atol=1e-6)


@float64_only
@every_multiplier
def test_gradients_of_multiplicative_margins_are_the_numerical_ones(margin):
    rule = MultiplicativeMargin(margin, lambda_base=0.0, lambda_min=1.0)
    cosines = np.cos(np.linspace(0.1, 3.0, 9))
    analytic, numerical = jacobians(rule, [cosines], delta=1e-7)
    np.testing.assert_allclose(analytic[0], numerical[0], rtol=1e-4, atol=1e-5 * margin**2)


@pytest.mark.parametrize(
    "rule",
    [MultiplicativeMargin(4.0, lambda_base=0.0), CombinedMargin(1.3, 0.3, 0.2)],
    ids=["multiplicative", "combined"],
)
def test_unwound_slopes_are_finite_at_every_cosine_that_rounding_makes(run, rule):
    above_one = np.nextafter(np.float32(1), np.float32(2))
    cosines = ops.convert_to_tensor([1.0, above_one, -1.0, -above_one, 0.0], "float32")
    got = run(lambda x: value_and_gradients(rule, [x]))(cosines)
    assert all(np.isfinite(value).all() for value in got)


def test_annealing_follows_the_steps_it_is_attached_to(run):
    step = keras.Variable(0, trainable=False, dtype="int32")
    rule = MultiplicativeMargin(4.0, lambda_base=1500.0, lambda_gamma=0.1, lambda_min=5.0)
    rule.attach(3, lambda: step)
    now = run(lambda: rule.annealing("float32"), state=[step])
    for calls, value in [(0, 1500 / 1.1), (9, 750.0), (2988, 1500 / 299.9), (2989, 5.0)]:
        step.assign(calls)
        np.testing.assert_allclose(now(), value, rtol=1e-6)


@pytest.mark.parametrize("power", [1.0, 35.0, 0.5])
def test_annealing_with_a_power(power):
    """L-Softmax on MNIST: 999.1 first, 421 at call 1000, 0.41 at 10 000."""
    rule = MultiplicativeMargin(4.0, lambda_gamma=2.5e-5, lambda_power=power, lambda_min=0.0)
    for it in (1, 1000, 10000):
        rule.attach(3, lambda it=it: it - 1)
        want = 1000.0 * (1.0 + 2.5e-5 * it) ** -power
        np.testing.assert_allclose(rule.annealing(WIDEST), want, rtol=rounded(1e-12))


# One margin per class


@every_kind
def test_one_margin_per_class(kind, run):
    margins, labels = [0.1, 0.5, 0.9, 0.0], [2, 0, 1, 3, 2]
    cosines = np.array([0.5, -0.2, 0.9, 0.3, -0.95])
    margined = run(kind(margins))(
        ops.convert_to_tensor(cosines), labels=ops.convert_to_tensor(labels)
    )
    want = [expected(kind(margins[y]), [c])[0] for c, y in zip(cosines, labels, strict=True)]
    np.testing.assert_allclose(margined, want, rtol=rounded(1e-13))


@every_kind
def test_one_margin_per_class_needs_labels(kind):
    message = f"{kind.__name__} with one margin per class needs `labels`."
    with pytest.raises(ValueError, match=re.escape(message)):
        kind([0.1, 0.2])(ops.convert_to_tensor([0.5]))


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
    step = keras.Variable(0, trainable=False, dtype="int32")
    rule = CosineMargin(PolynomialDecay(0.0, 5, end_learning_rate=0.5, power=1.0))
    rule.attach(3, lambda: step)
    margined = run(lambda: rule(ops.convert_to_tensor([0.8])), state=[step])
    np.testing.assert_allclose(margined(), [0.8], rtol=1e-6)
    step.assign(3)
    np.testing.assert_allclose(margined(), [0.5], rtol=1e-6)
    step.assign(9)
    np.testing.assert_allclose(margined(), [0.3], rtol=1e-6)


def test_schedule_beyond_the_largest_margin_gives_nan():
    rule = AngularMargin(PolynomialDecay(0.0, 5, end_learning_rate=5.0, power=1.0))
    rule.attach(3, lambda: 3)
    assert np.isnan(rule(ops.convert_to_tensor([0.8]))).all()


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
    np.testing.assert_allclose(again(ops.convert_to_tensor([0.8])), want, rtol=1e-6)


@every_kind
def test_cosines_keep_their_precision_under_mixed_precision(kind):
    rule = kind(0.0, dtype="mixed_float16")
    cosines = np.float32([0.12345679, -0.98765433])
    np.testing.assert_array_equal(rule(ops.convert_to_tensor(cosines)), cosines)


@every_kind
def test_output_shape(kind):
    assert kind(0.5).compute_output_shape((None,)) == (None,)


def test_own_rule_takes_norms_labels_and_training():
    class NormMargin(MarginRule):
        def call(self, target_cosines, norms=None, labels=None, training=None):
            return target_cosines - 0.01 * norms

    margined = NormMargin()(
        ops.convert_to_tensor([0.5, 0.5]), norms=ops.convert_to_tensor([10.0, 20.0]), training=True
    )
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


@pytest.mark.parametrize("margin", [0.99, 0.0, -2.0, math.nan, math.inf])
def test_multiplicative_margins_out_of_range(margin):
    message = f"`margin` must be from 1 to 1e6. Received: margin={margin!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        MultiplicativeMargin(margin)


@pytest.mark.parametrize("name", ["lambda_base", "lambda_gamma", "lambda_power", "lambda_min"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_annealing_out_of_range(name, value):
    message = f"`{name}` must be finite and at least 0. Received: {name}={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        MultiplicativeMargin(4.0, **{name: value})


@pytest.mark.parametrize(
    ("settings", "name", "requirement"),
    [
        ({"multiplicative": 0.0}, "multiplicative", "finite and greater than 0 in float32"),
        ({"multiplicative": -1.0}, "multiplicative", "finite and greater than 0 in float32"),
        ({"multiplicative": math.nan}, "multiplicative", "finite and greater than 0 in float32"),
        ({"angular": 2.34}, "angular", "from 0 to 2.33 radians"),
        ({"angular": -0.1}, "angular", "from 0 to 2.33 radians"),
        ({"angular": -0.1, "additive": 0.1}, "angular", "finite and at least 0"),
        ({"angular": math.inf, "multiplicative": 1.5}, "angular", "finite and at least 0"),
        ({"additive": -0.1}, "additive", "finite and at least 0"),
    ],
)
def test_combined_margins_out_of_range(settings, name, requirement):
    message = f"`{name}` must be {requirement}. Received: {name}={settings[name]!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        CombinedMargin(**settings)


@pytest.mark.parametrize("make", [MultiplicativeMargin, CombinedMargin])
def test_one_margin_per_class_is_of_the_cosine_and_angular_rules(make):
    with pytest.raises(TypeError, match="must be a number or a LearningRateSchedule"):
        make([1.0, 2.0])
