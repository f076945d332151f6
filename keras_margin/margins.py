"""Margin rules: the target's cosine -> the target's cosine with the margin.

A rule touches vectors of length batch only, never a (batch, num_classes) tensor. To write a new
one, subclass `MarginRule` and give it `call`; any head then takes it as `margin=`.
"""

import math

import keras
from keras import ops

from keras_margin.numerics import add_angle
from keras_margin.schedules import Setting, revived

# Beyond it the fallback of `angular_margin` would jump upwards: cos(m) + m sin(m) = 1.
LARGEST_ANGULAR_MARGIN = 2.33

# What a margin may be, and the same in words.
NOT_NEGATIVE = (lambda m: (m >= 0.0) & (m < math.inf), "finite and at least 0")
ANGLE_WITH_FALLBACK = (
    lambda m: (m >= 0.0) & (m <= LARGEST_ANGULAR_MARGIN),
    f"from 0 to {LARGEST_ANGULAR_MARGIN} radians",
)


def cosine_margin(cosines, margin):
    """cos(theta) - margin. CosFace eq. 4, AM-Softmax eq. 6."""
    return cosines - margin


def angular_margin(cosines, margin):
    """cos(theta + margin); cos(theta) - margin sin(margin) where theta + margin > pi.

    ArcFace eq. 3, with the fallback of its published code. Without it the cosine would rise again
    beyond pi - margin and pull the worst samples the wrong way. At pi - margin the value falls from
    -1 to -cos(margin) - margin sin(margin).
    """
    in_range = cosines > -ops.cos(margin)  # theta < pi - margin
    return ops.where(in_range, add_angle(cosines, margin), cosines - margin * ops.sin(margin))


class MarginRule(keras.layers.Layer):
    """Base of the margin rules: a small Keras layer that maps target cosines to margined ones.

    A subclass declares its numbers with `add_setting`, so that each may be a schedule and is
    saved, and reads them in `call` with `setting`.

    Call arguments:
        target_cosines: float32 or float64 (batch,), cos(theta) between a sample and its own class.
        norms: (batch,), the embeddings' lengths before normalisation, for rules that use them.
        labels: int32 (batch,), for rules with a margin per class.
        training: the head asks for a margin in training only.

    Returns:
        (batch,) of target_cosines' dtype, non-increasing in theta on [0, pi].
    """

    def __init__(self, **kwargs):
        # Cosines stay in the head's precision whatever the mixed-precision policy.
        super().__init__(autocast=False, **kwargs)
        self._settings = {}

    def add_setting(self, name, value, is_valid, requirement, *, per_class=False):
        """Declares a constructor argument that is a number or a schedule, see `Setting`.

        Returns:
            The value as it is kept, to be an attribute of the rule.
        """
        self._settings[name] = Setting(value, name, is_valid, requirement, per_class=per_class)
        return self._settings[name].value

    def setting(self, name, dtype, labels=None):
        """The value now in force: a scalar, or (batch,) where there is one number per class."""
        setting = self._settings[name]
        value = setting(dtype)
        if setting.num_values is None:
            return value
        if labels is None:
            raise ValueError(
                f"{type(self).__name__} with one {name} per class needs `labels`. "
                "Received: labels=None"
            )
        return ops.take(value, labels, axis=0)

    def attach(self, num_classes, step):
        """Called by the head: its number of classes, and `step()`, its count of training calls."""
        for name, setting in self._settings.items():
            if setting.num_values not in (None, num_classes):
                raise ValueError(
                    f"A `{name}` per class must have one number for each of the num_classes="
                    f"{num_classes} classes. Received: len({name})={setting.num_values}"
                )
            setting.follow(step)

    def compute_output_shape(self, target_cosines_shape):
        return target_cosines_shape

    def get_config(self):
        own = {name: setting.config() for name, setting in self._settings.items()}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config):
        return cls(**{name: revived(value) for name, value in config.items()})


@keras.saving.register_keras_serializable(package="keras_margin")
class CosineMargin(MarginRule):
    """cos(theta) - margin: the same distance in cosine at every angle.

    Args:
        margin: at least 0; the papers use 0.35. A number, a
            `keras.optimizers.schedules.LearningRateSchedule` of the head's training calls
            (warm-up), or a sequence with one margin per class.

    Raises:
        ValueError: a negative or non-finite margin.

    Example:

    >>> round(float(CosineMargin(0.35)(keras.ops.array([0.8]))[0]), 4)
    0.45

    Reference:
        Wang et al., CosFace: Large Margin Cosine Loss for Deep Face Recognition, 2018,
        arXiv:1801.09414, eq. 4. Wang et al., Additive Margin Softmax for Face Verification, 2018,
        arXiv:1801.05599, eq. 6.
    """

    def __init__(self, margin, **kwargs):
        super().__init__(**kwargs)
        self.margin = self.add_setting("margin", margin, *NOT_NEGATIVE, per_class=True)

    def call(self, target_cosines, norms=None, labels=None, training=None):
        margin = self.setting("margin", target_cosines.dtype, labels)
        return cosine_margin(target_cosines, margin)


@keras.saving.register_keras_serializable(package="keras_margin")
class AngularMargin(MarginRule):
    """cos(theta + margin): the same distance on the sphere at every angle.

    Beyond theta + margin = pi it is cos(theta) - margin sin(margin), see `angular_margin`.

    Args:
        margin: radians, 0 to 2.33; the paper uses 0.5 (28.6 degrees). A number, a schedule of the
            head's training calls, or a sequence with one margin per class.

    Raises:
        ValueError: a margin outside [0, 2.33], for which the rule would not be monotone.

    Example:

    >>> round(float(AngularMargin(0.5)(keras.ops.cos(keras.ops.array([1.0])))[0]), 4)  # cos(1.5)
    0.0707

    Reference:
        Deng et al., ArcFace: Additive Angular Margin Loss for Deep Face Recognition, 2019,
        arXiv:1801.07698, eq. 3.
    """

    def __init__(self, margin, **kwargs):
        super().__init__(**kwargs)
        self.margin = self.add_setting("margin", margin, *ANGLE_WITH_FALLBACK, per_class=True)

    def call(self, target_cosines, norms=None, labels=None, training=None):
        margin = self.setting("margin", target_cosines.dtype, labels)
        return angular_margin(target_cosines, margin)
