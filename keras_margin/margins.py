"""Margin rules: the target's cosine -> the target's cosine with the margin.

A rule touches vectors of length batch only, never a (batch, num_classes) tensor. To write a new
one, subclass `MarginRule` and give it `call`; any head then takes it as `margin=`.
"""

import keras
from keras import ops

from keras_margin.numerics import add_angle, computation_dtype, unwound_cosine
from keras_margin.parts import HeadPart
from keras_margin.schedules import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, Setting, revived

__all__ = [
    "AngularMargin",
    "CombinedMargin",
    "CosineMargin",
    "MarginRule",
    "MultiplicativeMargin",
    "angular_margin",
    "combined_margin",
    "cosine_margin",
    "multiplicative_margin",
]

# Beyond it the fallback of `angular_margin` would jump upwards: cos(m) + m sin(m) = 1.
LARGEST_ANGULAR_MARGIN = 2.33

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


class MarginRule(HeadPart):
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
        super().__init__(**kwargs)
        self.maths_dtype = computation_dtype(self.compute_dtype)
        self._settings = {}
        self._step = lambda: 0

    def step(self):
        """The head's count of training calls so far; 0 without a head."""
        return self._step()

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

    def per_class(self):
        """{name: numbers} of the settings that have one number per class."""
        settings = self._settings.items()
        return {name: each.value for name, each in settings if each.num_values is not None}

    def attach(self, num_classes, step, dtype=None):
        """Called by the head.

        Args:
            num_classes: the head's.
            step: a callable, the head's count of training calls so far.
            dtype: of the head's maths, "float32" or "float64"; None: the rule's own.
        """
        self._step = step
        self.maths_dtype = dtype or self.maths_dtype
        for name, setting in self._settings.items():
            if setting.num_values not in (None, num_classes):
                raise ValueError(
                    f"A `{name}` per class must have one number for each of the num_classes="
                    f"{num_classes} classes. Received: len({name})={setting.num_values}"
                )
            setting.follow(step)

    def update_state(self, norms, counted):
        """Moves what the rule keeps, in a training call, before the margin is applied.

        Args:
            norms: (batch,), the embeddings' lengths before normalisation.
            counted: bool (batch,), the rows that take part.
        """
        return None  # AutoGraph cannot read a body that is a docstring alone

    # What pictures ask.

    def curve(self, target_cosines, norms=None, labels=None):
        """The margined cosines of a training call, without chance, and without building anything.

        A rule that draws at random gives its mean here.
        """
        return self.call(target_cosines, norms=norms, labels=labels, training=True)

    def typical_norms(self):
        """Norms at which to show a rule that reads them; () for the others."""
        return ()

    @property
    def moves(self):
        """Whether the margin changes in training."""
        return any(setting.is_schedule for setting in self._settings.values())

    @property
    def num_values(self):
        """The number of classes where there is one number per class, else None."""
        numbers = [setting.num_values for setting in self._settings.values()]
        return next((number for number in numbers if number is not None), None)

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


def multiplicative_margin(cosines, margin, annealing=0.0):
    """(lambda cos(theta) + psi(theta)) / (1 + lambda), psi as in `unwound_cosine`.

    SphereFace eq. 7 for psi(theta) = (-1)^k cos(margin theta) - 2k; the annealing is that of its
    published code: lambda = `annealing` brings the rule back towards cos(theta).
    """
    psi = unwound_cosine(cosines, margin, ops.zeros_like(margin))
    return (annealing * cosines + psi) / (1.0 + annealing)


def combined_margin(cosines, multiplicative, angular, additive):
    """psi(multiplicative theta + angular) - additive, psi as in `unwound_cosine`: ArcFace eq. 4."""
    return unwound_cosine(cosines, multiplicative, angular) - additive


@keras.saving.register_keras_serializable(package="keras_margin")
class MultiplicativeMargin(MarginRule):
    """psi(theta) = (-1)^k cos(margin theta) - 2k: the angle counts `margin` times.

    k = floor(margin theta / pi) keeps psi falling on [0, pi]; without it the value would rise again
    beyond pi / margin. A hard rule: training starts near cos(theta) and anneals towards psi,

        (lambda cos(theta) + psi(theta)) / (1 + lambda)
        lambda = max(lambda_min, lambda_base * (1 + lambda_gamma * it) ** -lambda_power)

    with `it` the head's training calls, 1 in the first one; the count is saved with the model.

    Args:
        margin: how many times the angle counts, any real number from 1; the paper uses 4. A number
            or a schedule of the head's training calls.
        lambda_base: at least 0, as the other three, whose defaults are those of SphereFace's
            published training. 0: a constant lambda_min.
        lambda_gamma: how fast lambda falls.
        lambda_power: how it falls; 1: as 1 / it.
        lambda_min: where it ends; 0: at psi alone.

    Raises:
        ValueError: a margin under 1, or a negative annealing argument.

    Example:

    >>> rule = MultiplicativeMargin(2.0, lambda_base=0.0, lambda_min=0.0)
    >>> round(float(rule(keras.ops.array([0.5]))[0]), 4)  # theta = pi/3: cos(2 pi/3)
    -0.5

    Reference:
        Liu et al., SphereFace: Deep Hypersphere Embedding for Face Recognition, 2017,
        arXiv:1704.08063, eq. 7.
    """

    def __init__(
        self,
        margin,
        *,
        lambda_base=1000.0,
        lambda_gamma=0.12,
        lambda_power=1.0,
        lambda_min=5.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.margin = self.add_setting("margin", margin, *AT_LEAST_ONE)
        annealing = {
            "lambda_base": lambda_base,
            "lambda_gamma": lambda_gamma,
            "lambda_power": lambda_power,
            "lambda_min": lambda_min,
        }
        for name, value in annealing.items():
            setattr(self, name, self.add_setting(name, value, *NOT_NEGATIVE))

    @property
    def moves(self):
        return super().moves or self.lambda_base > self.lambda_min

    def annealing(self, dtype):
        """lambda of the training call that comes next, or is now under way."""
        base, gamma, power, smallest = (
            self.setting(f"lambda_{name}", dtype) for name in ("base", "gamma", "power", "min")
        )
        it = ops.cast(self.step() + 1, dtype)
        return ops.maximum(smallest, base * (1.0 + gamma * it) ** -power)

    def call(self, target_cosines, norms=None, labels=None, training=None):
        dtype = target_cosines.dtype
        margin = self.setting("margin", dtype)
        return multiplicative_margin(target_cosines, margin, self.annealing(dtype))


@keras.saving.register_keras_serializable(package="keras_margin")
class CombinedMargin(MarginRule):
    """cos(m1 theta + m2) - m3: all three margins at once.

    Beyond phi = m1 theta + m2 = pi it goes on falling as (-1)^k cos(phi) - 2k - m3, k = floor(phi /
    pi); with m2 alone it is `AngularMargin`, with its fallback.

    Args:
        multiplicative: m1, greater than 0. (1.0, 0.3, 0.2) and (0.9, 0.4, 0.15) are the paper's.
        angular: m2, radians, at least 0; at most 2.33 where it is alone.
        additive: m3, at least 0. Each is a number or a schedule of the head's training calls.

    Raises:
        ValueError: a margin outside its range.

    Example:

    >>> rule = CombinedMargin(1.0, 0.3, 0.2)
    >>> round(float(rule(keras.ops.array([0.5]))[0]), 4)  # cos(pi/3 + 0.3) - 0.2
    0.0217

    Reference:
        Deng et al., ArcFace: Additive Angular Margin Loss for Deep Face Recognition, 2019,
        arXiv:1801.07698, eq. 4.
    """

    def __init__(self, multiplicative=1.0, angular=0.0, additive=0.0, **kwargs):
        super().__init__(**kwargs)
        self.multiplicative = self.add_setting("multiplicative", multiplicative, *POSITIVE)
        self.additive = self.add_setting("additive", additive, *NOT_NEGATIVE)
        self.only_angular = self.multiplicative == 1.0 and self.additive == 0.0
        angle = ANGLE_WITH_FALLBACK if self.only_angular else NOT_NEGATIVE
        self.angular = self.add_setting("angular", angular, *angle)

    def call(self, target_cosines, norms=None, labels=None, training=None):
        dtype = target_cosines.dtype
        angular = self.setting("angular", dtype)
        if self.only_angular:
            return angular_margin(target_cosines, angular)
        multiplicative = self.setting("multiplicative", dtype)
        additive = self.setting("additive", dtype)
        return combined_margin(target_cosines, multiplicative, angular, additive)


def checked_rule(margin):
    """`margin` of MarginHead: a rule or None.

    Raises:
        TypeError: it is neither.
    """
    if margin is None or isinstance(margin, MarginRule):
        return margin
    raise TypeError(
        "`margin` of MarginHead must be a rule, such as keras_margin.margins.AngularMargin(0.5), "
        f"or None. Received: margin={margin!r}"
    )
