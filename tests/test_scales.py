"""Scale policies: the published formulas, AdaCos' statistics and what bounds them."""

import json
import math
import re

import keras
import numpy as np
import pytest
import reference
from backends import DTYPES, WIDEST, float64_only, rounded
from keras import ops
from keras.optimizers.schedules import PiecewiseConstantDecay, PolynomialDecay

import keras_margin as km
from keras_margin.scales import (
    AdaCosScale,
    FixedScale,
    LearnedScale,
    as_scale_policy,
    fixed_adacos_scale,
    masked_median,
)


def exactly(message):
    return f"^{re.escape(message)}$"


def built(policy, dtype="float32", step=lambda: 0):
    policy.attach(getattr(policy, "num_classes", 5), step, dtype)
    policy.build(None)
    return policy


def survivor(policy):
    """The policy after a round trip through JSON text."""
    text = json.dumps(keras.saving.serialize_keras_object(policy))
    return keras.saving.deserialize_keras_object(json.loads(text))


# AdaCos' fixed scale


@pytest.mark.parametrize(
    ("num_classes", "scale"),
    [
        (10, 3.107),
        (100, 6.498),
        (1000, 9.768),
        (10572, 13.104),
        (85742, 16.064),
        (93431, 16.186),
        (360232, 18.094),
        (10**7, 22.794),
    ],
)
def test_fixed_adacos_scale(num_classes, scale):
    assert fixed_adacos_scale(num_classes) == pytest.approx(scale, abs=5e-4)


@pytest.mark.parametrize("num_classes", [2, 1])
@pytest.mark.parametrize("made", [fixed_adacos_scale, AdaCosScale, km.AdaCos])
def test_adacos_needs_three_classes(made, num_classes):
    message = (
        "AdaCos needs `num_classes` of at least 3: its scale sqrt(2) log(num_classes - 1) is 0 "
        "for 2 classes and nothing would be learned. Use NormFace, CosFace or ArcFace with a fixed "
        f"scale. Received: num_classes={num_classes}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        made(num_classes)


# The median


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 8])
def test_masked_median(run, number):
    values = np.random.default_rng(number).normal(size=10)
    counted = np.arange(10)[::-1] < number
    counted = np.random.default_rng(1).permutation(counted)
    values[~counted] = np.resize([math.nan, math.inf, -math.inf, 0.0], 10 - number)
    median = run(masked_median)(ops.convert_to_tensor(values), ops.convert_to_tensor(counted))
    want = np.median(values[counted])
    np.testing.assert_allclose(median, want, rtol=rounded(1e-15, 1e-6))


@pytest.mark.parametrize("number", [0, 3])
def test_masked_median_of_nothing_does_not_fail(run, number):
    median = run(masked_median)(ops.zeros(number), ops.zeros(number, "bool"))
    assert median.shape == ()


# AdaCos' moving scale


def random_batch(number, num_classes=7, seed=0):
    rng = np.random.default_rng(seed)
    cosines = rng.uniform(-0.9, 0.95, (number, num_classes))
    return cosines, rng.integers(0, num_classes, number)


def update(policy, cosines, labels, ignore_class=None):
    """One training call of the policy, from cosines (batch, num_classes)."""
    cosines = np.asarray(cosines)
    rows, scale = np.arange(len(cosines)), float(policy.current())
    counted = np.asarray(labels) != ignore_class
    ids = np.where(counted, labels, 0)
    target = cosines[rows, ids]
    others = scale * cosines
    others[rows, ids] = -np.inf
    log_b = np.log(np.exp(others).sum(axis=1))
    dtype = policy.scale_dtype
    policy.update_state(
        ops.convert_to_tensor(log_b, dtype),
        ops.convert_to_tensor(target, dtype),
        ops.convert_to_tensor(counted),
    )


@pytest.mark.parametrize("number", [1, 2, 3, 8, 9])
def test_scale_after_three_calls(number):
    policy, scale = built(AdaCosScale(7), WIDEST), fixed_adacos_scale(7)
    for seed in range(3):
        cosines, labels = random_batch(number, seed=seed)
        update(policy, cosines, labels)
        scale = reference.adacos_scale(cosines, labels, scale)
        np.testing.assert_allclose(policy.current(), scale, rtol=rounded(1e-13))


def test_ignored_rows_are_no_part_of_the_statistics():
    cosines, labels = random_batch(6)
    labels[[1, 4]] = -1
    policy = built(AdaCosScale(7), WIDEST)
    update(policy, cosines, labels, ignore_class=-1)
    want = reference.adacos_scale(cosines, labels, fixed_adacos_scale(7), ignore_class=-1)
    np.testing.assert_allclose(policy.current(), want, rtol=rounded(1e-13))


@pytest.mark.parametrize("number", [0, 3])
def test_no_row_that_counts_leaves_the_scale(run, number):
    policy = built(AdaCosScale(7))
    nan, nothing = ops.full([number], math.nan), ops.zeros(number, "bool")
    run(policy.update_state, state=policy.variables)(nan, nan, nothing)
    assert float(policy.current()) == np.float32(fixed_adacos_scale(7))


def test_median_is_that_of_the_target_angles():
    """Target angles .1 .2 .4 .6, all others pi/2: B = 2. All twelve angles would give .9803."""
    cosines = np.full((4, 3), np.cos(math.pi / 2))
    cosines[np.arange(4), [0, 1, 2, 0]] = np.cos([0.1, 0.2, 0.4, 0.6])
    policy = built(AdaCosScale(3), WIDEST)
    update(policy, cosines, [0, 1, 2, 0])
    np.testing.assert_allclose(
        policy.current(), math.log(2) / math.cos(0.3), rtol=rounded(1e-12)
    )  # .7256


def test_median_beyond_45_degrees_counts_as_45():
    policy = built(AdaCosScale(3), WIDEST)
    update(policy, np.full((4, 3), np.cos(math.pi / 2)), [0, 1, 2, 0])
    np.testing.assert_allclose(policy.current(), math.log(2) * math.sqrt(2), rtol=rounded(1e-12))


def test_mass_is_averaged_before_the_logarithm():
    policy = built(AdaCosScale(4), WIDEST)
    log_b = ops.convert_to_tensor([math.log(2.0), math.log(10.0)], WIDEST)
    policy.update_state(log_b, ops.ones(2, WIDEST), ops.ones(2, "bool"))
    np.testing.assert_allclose(policy.current(), math.log(6.0), rtol=rounded(1e-14))


def test_mass_that_would_overflow():
    policy = built(AdaCosScale(4, max_scale=1e4))
    log_b = ops.convert_to_tensor([900.0, 899.0])
    policy.update_state(log_b, ops.ones(2), ops.ones(2, "bool"))
    want = 900.0 + math.log((1.0 + math.exp(-1.0)) / 2.0)
    np.testing.assert_allclose(policy.current(), want, rtol=1e-6)


def test_collapsed_embeddings_leave_the_scale_finite_and_bounded(run):
    """All cosines .7: each call adds to s, for ever."""
    policy = built(AdaCosScale(2000))

    def step():
        log_b = math.log(1999.0) + 0.7 * policy.current()
        policy.update_state(ops.full([8], log_b), ops.full([8], 0.7), ops.ones(8, "bool"))
        return policy.current()

    step = run(step, state=policy.variables)
    scales = [float(step()) for _ in range(200)]
    assert np.diff(scales).min() >= 0
    np.testing.assert_allclose(scales[-1], 4.0 * fixed_adacos_scale(2000), rtol=1e-6)


def test_mass_below_one_leaves_the_scale_positive():
    policy = built(AdaCosScale(3, min_scale=0.25))
    policy.update_state(ops.full([4], -2.0), ops.ones(4), ops.ones(4, "bool"))
    assert float(policy.current()) == 0.25


@pytest.mark.parametrize(
    ("bounds", "start"),
    [
        ({}, fixed_adacos_scale(50)),
        ({"min_scale": 10.0}, 10.0),
        ({"max_scale": 2.0}, 2.0),
        ({"dynamic": False}, fixed_adacos_scale(50)),
    ],
)
def test_start(bounds, start):
    policy = built(AdaCosScale(50, **bounds), WIDEST)
    assert float(policy.current()) == float(np.array(start, WIDEST))


@pytest.mark.parametrize(
    "bounds",
    [
        (0.0, 10.0),
        (-1.0, 10.0),
        (5.0, 4.0),
        (0.1, math.inf),
        (math.nan, 10.0),
        (0.1, math.nan),
        (1e-50, 10.0),
        (0.1, 1e39),
        (True, 10.0),
        ("0.1", 10.0),
    ],
)
def test_bounds(bounds):
    smallest, largest = bounds
    message = (
        "The bounds of AdaCos' scale must satisfy 0 < `min_scale` <= `max_scale`, in float32. "
        f"Received: min_scale={smallest}, max_scale={largest}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        AdaCosScale(10, min_scale=smallest, max_scale=largest)


def test_adacos_scale_has_the_classes_of_its_head():
    message = (
        "AdaCosScale must have the head's number of classes. Received: AdaCosScale num_classes=7, "
        "head num_classes=8"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        km.MarginHead(8, scale=AdaCosScale(7))


@pytest.mark.parametrize("dynamic", [True, False])
def test_whether_the_scale_moves(dynamic):
    policy = AdaCosScale(7, dynamic)
    assert policy.moves is dynamic
    assert policy.needs_statistics is dynamic


@pytest.mark.parametrize(
    ("policy_dtype", "dtype"),
    [("float32", "float32"), ("mixed_float16", "float32"), ("mixed_bfloat16", "float32")],
)
def test_scale_variable(policy_dtype, dtype):
    head = km.AdaCos(7, dtype=policy_dtype)
    head.build((None, 4))
    (scale,) = head.scale_policy.variables
    assert scale.dtype == dtype
    assert not scale.trainable
    assert scale.aggregation == "only_first_replica"
    assert scale in head.non_trainable_variables


@float64_only
def test_scale_in_float64_is_exact():
    head = km.AdaCos(7, dtype="float64")
    head.build((None, 4))
    assert float(head.current_scale) == fixed_adacos_scale(7)


def test_adacos_scale_config_round_trip():
    policy = AdaCosScale(9, dynamic=False, min_scale=0.5, max_scale=3.0, name="mine")
    again = survivor(policy)
    assert type(again) is AdaCosScale
    assert again.get_config() == policy.get_config()
    assert (again.num_classes, again.dynamic) == (9, False)
    assert (again.min_scale, again.max_scale, again.name) == (0.5, 3.0, "mine")


# Fixed scales and schedules


@pytest.mark.parametrize("dtype", DTYPES)
def test_fixed_scale(dtype):
    policy = built(FixedScale(0.1), dtype)
    assert not policy.moves
    assert not policy.needs_statistics
    assert keras.backend.standardize_dtype(policy.current().dtype) == dtype
    assert float(policy.current()) == float(np.array(0.1, dtype))
    assert float(policy.scale_of(ops.ones(3))) == float(policy.current())


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, 1e-50])
def test_fixed_scale_out_of_range(value):
    message = f"`scale` must be finite and greater than 0 in float32. Received: scale={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        FixedScale(value)


@pytest.mark.parametrize("value", [True, "auto", None, [30.0, 64.0]], ids=str)
@pytest.mark.parametrize("made", [FixedScale, as_scale_policy, lambda s: km.NormFace(3, scale=s)])
def test_scale_of_another_kind(made, value):
    message = f"`scale` must be a number or a LearningRateSchedule. Received: scale={value!r}"
    with pytest.raises(TypeError, match=exactly(message)):
        made(value)


def test_fixed_scale_config_round_trip():
    policy = FixedScale(30.0, name="mine")
    again = survivor(policy)
    assert again.value == 30.0
    assert again.get_config() == policy.get_config()


def test_scheduled_scale_config_round_trip():
    again = survivor(FixedScale(PolynomialDecay(16.0, 6, end_learning_rate=64.0, power=1.0)))
    again = built(again, step=lambda: 3)
    assert again.moves
    np.testing.assert_allclose(again.current(), 40.0, rtol=1e-6)


@pytest.mark.parametrize("initial", [PolynomialDecay(16.0, 6), "9", None, True])
def test_learned_scale_starts_at_a_number(initial):
    message = (
        "`initial` must be a number: the scale is learned from there, and follows no schedule. "
        f"Received: initial={initial!r}"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        LearnedScale(initial)


def test_as_scale_policy():
    policy = AdaCosScale(5)
    assert as_scale_policy(policy) is policy
    assert as_scale_policy(16).value == 16.0
    schedule = PiecewiseConstantDecay([2], [16.0, 64.0])
    assert as_scale_policy(schedule).value is schedule


class TracedDense(keras.layers.Dense):
    """Counts how often Python runs it: once a trace."""

    traces = 0

    def call(self, inputs):
        self.traces += 1
        return super().call(inputs)


def test_scheduled_scale_follows_the_training_calls_of_fit_without_retracing():
    layer = TracedDense(3)
    schedule = PolynomialDecay(16.0, 6, end_learning_rate=64.0, power=1.0)
    model = km.EmbeddingModel(
        keras.Sequential([keras.Input((4,)), layer]), km.NormFace(5, scale=schedule)
    )
    model.compile(keras.optimizers.SGD(0.01))
    x, y = np.random.default_rng(0).normal(size=(6, 4)), np.arange(6) % 5
    first = model.fit(x, y, batch_size=3, verbose=0).history["scale"]
    traces = layer.traces
    later = model.fit(x, y, batch_size=3, epochs=3, verbose=0).history["scale"]
    assert layer.traces == traces
    # The last call of each epoch follows 1, 3, 5, 7 others.
    np.testing.assert_allclose(first + later, [24.0, 40.0, 56.0, 64.0], rtol=1e-6)
