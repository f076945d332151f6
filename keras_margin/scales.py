"""Scale policies: the factor s between cosines and logits, and the published formulas for it."""

import math

import keras
from keras import ops

from keras_margin.backend import read
from keras_margin.checks import (
    LARGEST_FLOAT32,
    SMALLEST_FLOAT32,
    checked_count,
    checked_number,
    is_number,
)
from keras_margin.distribution import gather_rows
from keras_margin.initializers import exact_constant
from keras_margin.numerics import angle_of, computation_dtype
from keras_margin.parts import HeadPart
from keras_margin.schedules import POSITIVE, Setting, revived

__all__ = [
    "AdaCosScale",
    "EmbeddingNormScale",
    "FixedScale",
    "LearnedScale",
    "ScalePolicy",
    "fixed_adacos_scale",
    "scale_lower_bound",
]


def fixed_adacos_scale(num_classes):
    """sqrt(2) log(C - 1): P = 1/2 at theta = pi/4 when all other classes are orthogonal.

    Args:
        num_classes: C, at least 3 (C = 2 gives scale 0, which learns nothing).

    Returns:
        float.

    Raises:
        ValueError: fewer than 3 classes.

    Example:

    >>> round(fixed_adacos_scale(1000), 3)
    9.768

    Reference:
        Zhang et al., AdaCos: Adaptively Scaling Cosine Logits for Effectively Learning Deep Face
        Representations, 2019, arXiv:1905.00292, eq. 12.
    """
    num_classes = checked_count("num_classes", num_classes, smallest=1)
    if num_classes < 3:
        raise ValueError(
            "AdaCos needs `num_classes` of at least 3: its scale sqrt(2) log(num_classes - 1) is 0 "
            "for 2 classes and nothing would be learned. Use NormFace, CosFace or ArcFace with a "
            f"fixed scale. Received: num_classes={num_classes}"
        )
    return math.sqrt(2.0) * math.log(num_classes - 1)


def scale_lower_bound(num_classes, probability):
    """The smallest scale at which the target's probability can reach `probability`.

    At it a sample on its own centre reaches `probability` when the other centres are spread evenly,
    (C - 1) / C log((C - 1) P / (1 - P)).

    Args:
        num_classes: C, at least 2.
        probability: P, between 0 and 1.

    Returns:
        float.

    Raises:
        ValueError: an argument out of range.

    Example:

    >>> round(scale_lower_bound(1000, 0.9), 2)
    9.09

    Reference:
        Wang et al., CosFace: Large Margin Cosine Loss for Deep Face Recognition, 2018,
        arXiv:1801.09414, section 3, the lower bound of s.
    """
    num_classes = checked_count("num_classes", num_classes, smallest=2)
    if not 0.0 < checked_number("probability", probability, 0.0, below=1.0):
        raise ValueError(
            f"`probability` must be between 0 and 1. Received: probability={probability!r}"
        )
    others = num_classes - 1
    return others / num_classes * math.log(others * probability / (1.0 - probability))


class ScalePolicy(HeadPart):
    """Base of the scale policies: `policy.scale_of(norms)` is the scale now in force.

    Attributes:
        moves: whether the scale changes in training; then `fit` reports it.
        needs_statistics: whether the head must call `update_state` in a training call.
        takes_gradient: whether the loss is differentiated by the scale; False saves the work.
    """

    moves = False
    needs_statistics = False
    takes_gradient = True

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scale_dtype = computation_dtype(self.compute_dtype)

    def attach(self, num_classes, step, dtype):
        """Called by the head.

        Args:
            num_classes: the head's.
            step: a callable, the head's count of training calls so far.
            dtype: of the head's maths, "float32" or "float64".
        """
        self.scale_dtype = dtype

    def current(self):
        """The scale now in force, a scalar tensor; None where it differs per sample."""
        return None

    def scale_of(self, norms):
        """The scale of each row: a scalar, or (batch,) from the embeddings' norms (batch,)."""
        return self.current()

    def update_state(self, nontarget_logsumexp, target_cosines, counted):
        """Moves the scale in a training call."""
        return None  # AutoGraph cannot read a body that is a docstring alone

    def rebase(self, old):
        """Goes on from the policy of a head for another number of classes, whose state it has."""
        return None


@keras.saving.register_keras_serializable(package="keras_margin")
class FixedScale(ScalePolicy):
    """A constant, or a schedule of the head's training calls.

    Args:
        value: a positive number or a `keras.optimizers.schedules.LearningRateSchedule`.

    Raises:
        ValueError: a number that is not positive.
    """

    takes_gradient = False

    def __init__(self, value, **kwargs):
        super().__init__(**kwargs)
        self._setting = Setting(value, "scale", *POSITIVE)
        self.value = self._setting.value
        self.moves = self._setting.is_schedule

    def attach(self, num_classes, step, dtype):
        super().attach(num_classes, step, dtype)
        self._setting.follow(step)

    def current(self):
        return self._setting(self.scale_dtype)

    def get_config(self):
        return {**super().get_config(), "value": self._setting.config()}

    @classmethod
    def from_config(cls, config):
        return cls(**{**config, "value": revived(config["value"])})


@keras.saving.register_keras_serializable(package="keras_margin")
class LearnedScale(ScalePolicy):
    """A trainable scale s = exp(a), so that it stays positive.

    Args:
        initial: s at the start, a positive number.

    Raises:
        ValueError: `initial` is not positive.

    Reference:
        Ranjan et al., L2-constrained Softmax Loss for Discriminative Face Verification, 2017,
        arXiv:1703.09507, section 5, which finds that a learned scale grows too large where nothing
        holds it back: give it a weight decay.
    """

    moves = True

    def __init__(self, initial, **kwargs):
        super().__init__(**kwargs)
        if not is_number(initial):
            raise TypeError(
                "`initial` must be a number: the scale is learned from there, and follows no "
                f"schedule. Received: initial={initial!r}"
            )
        self.initial = Setting(initial, "initial", *POSITIVE).value

    def build(self, input_shape=None):
        self.log_scale = self.add_weight(
            name="log_scale",
            initializer=exact_constant(math.log(self.initial)),
            dtype=self.scale_dtype,
            autocast=False,
        )

    def current(self):
        return ops.exp(read(self.log_scale))

    def get_config(self):
        return {**super().get_config(), "initial": self.initial}


@keras.saving.register_keras_serializable(package="keras_margin")
class EmbeddingNormScale(ScalePolicy):
    """Each sample's own |x|: the logits are |x| cos(theta), as in SphereFace.

    The gradient of the loss flows into |x|.
    """

    def scale_of(self, norms):
        return norms


@keras.saving.register_keras_serializable(package="keras_margin")
class AdaCosScale(ScalePolicy):
    """AdaCos' scale: it starts at sqrt(2) log(C - 1) and, if dynamic, follows the training.

    Each training call sets, from the statistics of the whole global batch (all replicas),

        B_avg = mean_i sum_{k != y_i} exp(s cos(theta_ik))     with the s of the call before, eq. 13
        s = log(B_avg) / cos(min(pi/4, median_i theta_iy_i))                                  eq. 15

    The logits of the same call use the new s. No gradient flows through s, and it stays as it is in
    `evaluate` and `predict`. log(B_avg) comes from logsumexp: B itself overflows when the
    embeddings collapse.

    Args:
        num_classes: C, at least 3.
        dynamic: False keeps sqrt(2) log(C - 1).
        min_scale: lower bound of s; a few classes with negative cosines would bring it below 0.
        max_scale: upper bound of s; None: 4 sqrt(2) log(C - 1). Collapsed embeddings would bring it
            to infinity.

    Raises:
        ValueError: fewer than 3 classes; bounds that are not 0 < min_scale <= max_scale.

    Reference:
        Zhang et al., AdaCos: Adaptively Scaling Cosine Logits for Effectively Learning Deep Face
        Representations, 2019, arXiv:1905.00292, eq. 12 to 15.
    """

    takes_gradient = False

    def __init__(self, num_classes, dynamic=True, *, min_scale=0.1, max_scale=None, **kwargs):
        super().__init__(**kwargs)
        self.num_classes = checked_count("num_classes", num_classes, smallest=1)
        if not isinstance(dynamic, bool):
            raise ValueError(f"`dynamic` must be True or False. Received: dynamic={dynamic!r}")
        self.dynamic = dynamic
        self.initial_scale = fixed_adacos_scale(num_classes)
        largest = 4.0 * self.initial_scale if max_scale is None else max_scale
        has_numbers = is_number(min_scale) and is_number(largest)
        if not has_numbers or not SMALLEST_FLOAT32 <= min_scale <= largest <= LARGEST_FLOAT32:
            raise ValueError(
                "The bounds of AdaCos' scale must satisfy 0 < `min_scale` <= `max_scale`, in "
                f"float32. Received: min_scale={min_scale}, max_scale={largest}"
            )
        self.min_scale, self.largest_scale = float(min_scale), float(largest)
        self.max_scale = None if max_scale is None else self.largest_scale
        self.moves = self.needs_statistics = self.dynamic

    def build(self, input_shape=None):
        # autocast=False: float16 would read a scale of 16.06 as 16.062 inside a mixed scope.
        # All replicas compute the same value, so the first one's is the scale of the global batch.
        self.scale = self.add_weight(
            name="scale",
            initializer=exact_constant(self._start),
            dtype=self.scale_dtype,
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",
        )

    def attach(self, num_classes, step, dtype):
        super().attach(num_classes, step, dtype)
        if num_classes != self.num_classes:
            raise ValueError(
                "AdaCosScale must have the head's number of classes. Received: "
                f"AdaCosScale num_classes={self.num_classes}, head num_classes={num_classes}"
            )

    def update_state(self, nontarget_logsumexp, target_cosines, counted):
        """Moves s.

        Args:
            nontarget_logsumexp: (batch,), log B_i with the s of the call before.
            target_cosines: (batch,), without margin.
            counted: bool (batch,), the rows that take part.
        """
        counted = ops.cast(counted, target_cosines.dtype)
        rows = ops.stack([nontarget_logsumexp, angle_of(target_cosines), counted], axis=1)
        log_b, angles, counted = ops.unstack(gather_rows(rows), 3, axis=1)  # (global_batch,) each
        number = ops.sum(counted)
        counted = counted > 0

        # eq. 13: log of the mean of B_i over the rows that count.
        log_b = _with_one_more(ops.where(counted, log_b, -math.inf), -math.inf)
        log_b_avg = ops.logsumexp(log_b) - ops.log(number)
        # eq. 15
        median = masked_median(angles, counted)
        scale = log_b_avg / ops.cos(ops.minimum(math.pi / 4, median))
        scale = ops.clip(scale, self.min_scale, self.largest_scale)
        self.scale.assign(ops.where(number > 0, scale, self.current()))

    def current(self):
        return read(self.scale)

    @property
    def _start(self):
        return min(max(self.initial_scale, self.min_scale), self.largest_scale)

    def rebase(self, old):
        """The scale keeps its ratio to sqrt(2) log(C - 1), as the default bounds do."""
        if not self.dynamic:
            return self.scale.assign(self._start)
        scale = old.current() * (self.initial_scale / old.initial_scale)
        self.scale.assign(ops.clip(scale, self.min_scale, self.largest_scale))

    def get_config(self):
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "dynamic": self.dynamic,
            "min_scale": self.min_scale,
            "max_scale": self.max_scale,
        }


def masked_median(values, counted):
    """The median of the values that count, the mean of the middle two for an even number.

    Args:
        values: (n,).
        counted: bool (n,).

    Returns:
        A scalar; meaningless where nothing counts.
    """
    number = ops.sum(ops.cast(counted, "int32"))
    values = ops.sort(_with_one_more(ops.where(counted, values, math.inf), math.inf))
    lower = ops.take(values, ops.maximum(number - 1, 0) // 2)
    upper = ops.take(values, number // 2)
    return (lower + upper) / 2


def _with_one_more(values, value):
    """`values` and one neutral element, so that an empty batch has something to look at."""
    return ops.concatenate([values, ops.full((1,), value, dtype=values.dtype)])


def as_scale_policy(scale):
    """A number or a schedule -> `FixedScale`; a policy stays itself."""
    return scale if isinstance(scale, ScalePolicy) else FixedScale(scale)
