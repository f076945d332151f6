"""A number, a schedule or one number per class, as `Setting` takes and stores them."""

import json
import math
import re
from fractions import Fraction

import keras
import numpy as np
import pytest
from backends import DTYPES, WIDEST
from keras.optimizers.schedules import PiecewiseConstantDecay, PolynomialDecay

from keras_margin.schedules import NOT_NEGATIVE, POSITIVE, Setting, revived, stored


def exactly(message):
    return f"^{re.escape(message)}$"


def setting_of(value, **kwargs):
    return Setting(value, "margin", lambda m: (m >= 0.0) & (m <= 1.0), "from 0 to 1", **kwargs)


def warm_up():
    """0 at step 0, a tenth more each step, 0.5 from step 5 on."""
    return PolynomialDecay(0.0, decay_steps=5, end_learning_rate=0.5, power=1.0)


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.25), np.int64(1), np.array([0.5])[0]])
def test_number(value):
    setting = setting_of(value)
    assert not setting.is_schedule
    assert setting.num_values is None
    assert type(setting.value) is float
    assert setting.value == setting.config() == float(value)
    assert float(setting("float32")) == float(value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_number_in_each_dtype_is_not_rounded_twice(dtype):
    value = setting_of(0.35)(dtype)
    assert keras.backend.standardize_dtype(value.dtype) == dtype
    assert float(value) == float(np.array(0.35, dtype))


@pytest.mark.parametrize("values", [[0.1, 0.2, 0.7], (0.1, 0.2, 0.7), np.array([0.1, 0.2, 0.7])])
def test_one_number_per_class(values):
    setting = setting_of(values, per_class=True)
    assert setting.num_values == 3
    assert setting.value == setting.config() == [0.1, 0.2, 0.7]
    np.testing.assert_array_equal(setting(WIDEST), np.array([0.1, 0.2, 0.7], WIDEST))


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, math.inf])
def test_numbers_out_of_range(value):
    message = f"`margin` must be from 0 to 1. Received: margin={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        setting_of(value)


@pytest.mark.parametrize("value", [[0.1, -0.1], [0.1, math.nan]])
def test_a_number_per_class_out_of_range(value):
    message = f"`margin` must be from 0 to 1. Received: margin={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        setting_of(value, per_class=True)


@pytest.mark.parametrize(
    "value",
    [
        True,
        "0.5",
        None,
        {0: 0.5},
        lambda step: 0.5,
        ["a", "b"],
        [None, 0.1],
        [[0.1, 0.2], [0.3]],
        [[0.1, 0.2]],
        [True, False],
        np.array([True, False]),
        np.array([[0.1, 0.2]]),
        np.array(0.1),
    ],
)
def test_other_kinds(value):
    message = (
        "`margin` must be a number, a LearningRateSchedule or a sequence with one number per "
        f"class. Received: margin={value!r}"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        setting_of(value, per_class=True)


@pytest.mark.parametrize("value", [1e39, [0.1, 1e39]])
def test_numbers_beyond_float32(value):
    message = (
        "`margin` must be at most 3.4e38 in size, the largest number of float32. "
        f"Received: margin={value!r}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        Setting(value, "margin", *NOT_NEGATIVE, per_class=True)


def test_whole_number_beyond_every_float():
    with pytest.raises(ValueError, match="`margin` must be finite and at least 0"):
        Setting(10**400, "margin", *NOT_NEGATIVE)


def test_what_float32_takes_for_zero_is_not_positive():
    message = "`scale` must be finite and greater than 0 in float32. Received: scale=1e-50"
    with pytest.raises(ValueError, match=exactly(message)):
        Setting(1e-50, "scale", *POSITIVE)


def test_sequences_where_there_is_one_value_for_all():
    message = "`margin` must be a number or a LearningRateSchedule. Received: margin=[0.1, 0.2]"
    with pytest.raises(TypeError, match=exactly(message)):
        setting_of([0.1, 0.2])


def test_schedule_sees_step_0_until_it_follows_a_counter():
    setting = setting_of(warm_up())
    assert setting.is_schedule
    assert float(setting("float32")) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_schedule_follows_the_counter_without_retracing(run, dtype):
    step = keras.Variable(0, trainable=False, dtype="int32")
    setting = setting_of(warm_up())
    setting.follow(lambda: step)
    traces = []

    def value():
        traces.append(step)
        return setting(dtype)

    now, values = run(value, state=[step]), []
    for _ in range(7):
        values.append(now())
        step.assign_add(1)
    assert keras.backend.standardize_dtype(values[0].dtype) == dtype
    np.testing.assert_allclose(values, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5], rtol=1e-6)
    assert len(traces) in (1, 7)  # 7 where it runs eagerly


@pytest.mark.parametrize("value", [-0.5, 1.5])
def test_schedule_that_leaves_the_range_gives_nan(run, value):
    step = keras.Variable(0, trainable=False, dtype="int32")
    setting = setting_of(PiecewiseConstantDecay([2], [0.5, value]))
    setting.follow(lambda: step)
    value_now = run(lambda: setting("float32"), state=[step])
    assert float(value_now()) == 0.5
    step.assign(3)
    assert math.isnan(value_now())


def test_config_of_a_schedule_survives_json():
    config = json.loads(json.dumps(setting_of(warm_up()).config()))
    setting = setting_of(revived(config))
    setting.follow(lambda: 3)
    assert isinstance(setting.value, PolynomialDecay)
    np.testing.assert_allclose(setting("float32"), 0.3, rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (0.5, 0.5),
        (4, 4),
        (None, None),
        (Fraction(1, 4), 0.25),
        ((0.1, 0.2), [0.1, 0.2]),
        ([Fraction(1, 4), np.float32(0.5)], [0.25, 0.5]),
        (np.array([0.1, 0.2]), [0.1, 0.2]),
    ],
)
def test_stored_numbers_survive_json(value, want):
    assert json.loads(json.dumps(stored(value))) == want


@pytest.mark.parametrize("value", [0.5, [0.1, 0.2], None])
def test_revived_leaves_numbers_alone(value):
    assert revived(value) is value
