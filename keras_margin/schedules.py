"""A margin or a scale as users give it: a number, a Keras schedule, or one number per class."""

import math

import keras
import numpy as np
from keras import ops

from keras_margin.checks import SMALLEST_FLOAT32, WITHIN_FLOAT32, are_numbers, as_float, is_number

LearningRateSchedule = keras.optimizers.schedules.LearningRateSchedule


# What a setting may be, and the same in words.
NOT_NEGATIVE = (lambda v: (v >= 0.0) & (v < math.inf), "finite and at least 0")
POSITIVE = (
    lambda v: (v >= SMALLEST_FLOAT32) & (v < math.inf),
    "finite and greater than 0 in float32",
)
AT_LEAST_ONE = (lambda v: (v >= 1.0) & (v <= 1e6), "from 1 to 1e6")


class Setting:
    """A value that may follow the count of training calls.

    Args:
        value: a number, a `LearningRateSchedule` (called with the number of training calls so far,
            0 in the first one), or, where `per_class`, a sequence of numbers.
        name: the argument's name, for error messages.
        is_valid: which numbers are accepted; works on NumPy arrays and on tensors, and is false for
            NaN. A schedule that leaves the range gives NaN: inside a compiled step there is no
            other way to refuse.
        requirement: the same in words.
        per_class: whether a sequence is accepted.
    """

    def __init__(self, value, name, is_valid, requirement, *, per_class=False):
        self.is_schedule = isinstance(value, LearningRateSchedule)
        self.num_values = None  # the number of classes where there is one value per class
        self._is_valid = is_valid
        self._step = lambda: 0
        self.value = value
        if is_number(value):
            self.value = as_float(value)
        elif per_class and are_numbers(value):
            self.value = [as_float(number) for number in value]
            self.num_values = len(self.value)
        elif not self.is_schedule:
            kinds = "a number, a LearningRateSchedule or a sequence with one number per class"
            if not per_class:
                kinds = "a number or a LearningRateSchedule"
            raise TypeError(f"`{name}` must be {kinds}. Received: {name}={value!r}")
        if self.is_schedule:
            return
        for accepts, words in ((is_valid, requirement), WITHIN_FLOAT32):
            if not np.all(accepts(np.asarray(self.value))):
                raise ValueError(f"`{name}` must be {words}. Received: {name}={value!r}")

    def follow(self, step):
        """Lets a schedule follow `step`, a callable that returns the count of training calls."""
        self._step = step

    def __call__(self, dtype):
        """The value now in force, a tensor of `dtype`: a scalar, or (num_values,)."""
        if not self.is_schedule:
            return ops.convert_to_tensor(self.value, dtype=dtype)
        value = ops.cast(self.value(self._step()), dtype)
        return ops.where(self._is_valid(value), value, math.nan)

    def config(self):
        """What `get_config` stores; `keras.saving.deserialize_keras_object` revives a schedule."""
        return keras.saving.serialize_keras_object(self.value) if self.is_schedule else self.value


def revived(value):
    """The object that a config stores: rules, policies and schedules come back, numbers stay."""
    return keras.saving.deserialize_keras_object(value) if isinstance(value, dict) else value


def stored(value):
    """A rule, policy or schedule serialised; numbers and sequences of them as JSON has them."""
    if isinstance(value, (int, float)) or value is None:
        return value
    if is_number(value):
        return float(value)
    if are_numbers(value):
        return [float(number) for number in value]
    return keras.saving.serialize_keras_object(value)
