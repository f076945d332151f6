"""Margin rules with a margin for each sample: from the embedding's norm, or drawn at random."""

import math

import keras
from keras import ops

from keras_margin.backend import read
from keras_margin.checks import are_numbers, as_float, checked_count, checked_number
from keras_margin.distribution import gather_rows, global_row_indices, global_sum
from keras_margin.initializers import exact_constant
from keras_margin.margins import ANGLE_WITH_FALLBACK, MarginRule, angular_margin, cosine_margin
from keras_margin.numerics import sine_of
from keras_margin.randomness import random_normal
from keras_margin.schedules import NOT_NEGATIVE

ADAFACE_START = (20.0, 100.0)  # mu and sigma before the first training call (published code)
ADAFACE_ANGLE = 1e-3  # AdaFace keeps angles this far from 0 and pi (published code)


class NormMargin(MarginRule):
    """Base of the rules that read the embedding's norm, within limits.

    Attributes:
        norm_limits: (low, high); norms outside count as the nearer limit.
        clipped_share: variable, the share of the last training call's rows outside the limits. A
            head warns once where it is above 1/2: then the norms say nothing.
    """

    norm_limits = (0.0, math.inf)

    def build(self, target_cosines_shape=None):
        self.clipped_share = self._add_statistic("clipped_share", 0.0)

    def _add_statistic(self, name, start):
        return self.add_weight(
            name=name,
            initializer=exact_constant(start),
            dtype=self.maths_dtype,
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",  # computed from the global batch on each of them
        )

    def typical_norms(self):
        """The ends of the limits."""
        return self.norm_limits

    def update_state(self, norms, counted):
        low, high = self.norm_limits
        clipped = counted & ((norms < low) | (norms > high))
        sums = ops.stack([ops.sum(ops.cast(rows, norms.dtype)) for rows in (clipped, counted)])
        clipped, number = ops.unstack(global_sum(sums), 2)
        share = clipped / ops.maximum(number, 1.0)
        self.clipped_share.assign(ops.where(number > 0, share, read(self.clipped_share)))

    def _clipped(self, norms):
        if norms is None:
            raise ValueError(f"{type(self).__name__} needs `norms`. Received: norms=None")
        return ops.clip(norms, *self.norm_limits)


@keras.saving.register_keras_serializable(package="keras_margin")
class AdaFaceMargin(NormMargin):
    """An angular and a cosine margin that move against each other with the image's quality.

    The embedding's norm n stands for the quality. With mu and sigma its running mean and standard
    deviation,

        g = clip(h (n - mu) / sigma, -1, 1)
        cos(theta - margin g) - margin (1 + g)

    g is held constant in the gradient, the angle is kept within 1e-3 of [0, pi]. mu and sigma
    follow the norms of the global batch in training calls, before use, starting at 20 and 100.

    Args:
        margin: at least 0; the paper uses 0.4. A number or a schedule.
        h: how far the margin moves per standard deviation; the paper uses 0.333. A negative h turns
            the relation round.
        momentum: weight of the new batch in mu and sigma.

    Reference:
        Kim et al., AdaFace: Quality Adaptive Margin for Face Recognition, 2022, arXiv:2204.00964,
        eq. 11 and section 3.
    """

    norm_limits = (1e-3, 100.0)  # of the published code

    def __init__(self, margin=0.4, *, h=0.333, momentum=0.01, **kwargs):
        super().__init__(**kwargs)
        self.margin = self.add_setting("margin", margin, *NOT_NEGATIVE)
        self.h = checked_number("h", h, -math.inf)
        self.momentum = checked_number("momentum", momentum, 0.0, at_most=1.0)

    def build(self, target_cosines_shape=None):
        super().build(target_cosines_shape)
        mu, sigma = ADAFACE_START
        self.mu = self._add_statistic("mu", mu)
        self.sigma = self._add_statistic("sigma", sigma)

    def _statistics(self):
        """mu and sigma now in force."""
        return (read(self.mu), read(self.sigma)) if self.built else ADAFACE_START

    def typical_norms(self):
        """A standard deviation below the mean, the mean, and one above, within the limits."""
        mu, sigma = map(float, self._statistics())
        low, high = self.norm_limits
        return tuple(min(max(norm, low), high) for norm in (mu - sigma, mu, mu + sigma))

    def update_state(self, norms, counted):
        super().update_state(norms, counted)
        rows = ops.stack([self._clipped(norms), ops.cast(counted, norms.dtype)], axis=1)
        norms, counted = ops.unstack(gather_rows(rows), 2, axis=1)  # (global_batch,) each
        number = ops.sum(counted)
        norms = ops.where(counted > 0, norms, 0.0)
        mean = ops.sum(norms) / ops.maximum(number, 1.0)
        squares = ops.sum(ops.where(counted > 0, ops.square(norms - mean), 0.0))
        # The sample standard deviation; 0 for a single row, where the formula has 0 / 0.
        deviation = ops.sqrt(squares / ops.maximum(number - 1.0, 1.0))
        for variable, value in ((self.mu, mean), (self.sigma, deviation)):
            moved = self.momentum * value + (1.0 - self.momentum) * read(variable)
            variable.assign(ops.where(number > 0, moved, read(variable)))

    def call(self, target_cosines, norms=None, labels=None, training=None):
        norms = ops.stop_gradient(self._clipped(norms))
        margin = self.setting("margin", target_cosines.dtype)
        mu, sigma = self._statistics()
        quality = (norms - mu) / (sigma + 1e-3)
        quality = ops.clip(self.h * quality, -1.0, 1.0)  # g

        # theta - margin g, kept in [1e-3, pi - 1e-3]: outside, the cosine of the end.
        angle = -margin * quality
        # The published code also keeps the cosine itself away from +-1.
        moved = target_cosines * ops.cos(angle) - sine_of(target_cosines) * ops.sin(angle)
        theta = ops.arccos(ops.clip(ops.stop_gradient(target_cosines), -1.0, 1.0)) + angle
        top, bottom = math.cos(ADAFACE_ANGLE), -math.cos(ADAFACE_ANGLE)
        moved = ops.where(theta < ADAFACE_ANGLE, top, moved)
        moved = ops.where(theta > math.pi - ADAFACE_ANGLE, bottom, moved)
        return moved - margin * (1.0 + quality)

    def get_config(self):
        return {**super().get_config(), "h": self.h, "momentum": self.momentum}


@keras.saving.register_keras_serializable(package="keras_margin")
class MagFaceMargin(NormMargin):
    """An angular margin that grows with the embedding's norm a.

        m(a) = l_m + (u_m - l_m) (clip(a, l_a, u_a) - l_a) / (u_a - l_a)
        cos(theta + m(a)), with `angular_margin`'s fallback

    The gradient of m(a) flows into the norm.

    Args:
        norm_range: (l_a, u_a), the norms over which the margin grows, in [1e-15, 1e15].
        margin_range: (l_m, u_m), radians, in [0, 2.33].

    Raises:
        ValueError: ranges that are not increasing, or out of bounds.

    Reference:
        Meng et al., MagFace: A Universal Representation for Face Recognition and Quality
        Assessment, 2021, arXiv:2103.06627, section 3 and its published code.
    """

    def __init__(self, norm_range=(10.0, 110.0), margin_range=(0.45, 0.8), **kwargs):
        super().__init__(**kwargs)
        self.norm_range = self.norm_limits = _range("norm_range", norm_range)
        if not 1e-15 <= self.norm_range[0] < self.norm_range[1] <= 1e15:
            raise ValueError(
                "`norm_range` must begin above 0 and lie between 1e-15 and 1e15: MagFace divides "
                f"by the norm and by its square. Received: norm_range={norm_range!r}"
            )
        self.margin_range = _range("margin_range", margin_range)
        is_valid, requirement = ANGLE_WITH_FALLBACK
        if not all(is_valid(margin) for margin in self.margin_range):
            raise ValueError(
                f"`margin_range` must be {requirement}. Received: margin_range={margin_range!r}"
            )

    def call(self, target_cosines, norms=None, labels=None, training=None):
        (low, high), (least, most) = self.norm_range, self.margin_range
        margins = least + (most - least) / (high - low) * (self._clipped(norms) - low)
        return angular_margin(target_cosines, margins)

    def get_config(self):
        return {
            **super().get_config(),
            "norm_range": self.norm_range,
            "margin_range": self.margin_range,
        }


@keras.saving.register_keras_serializable(package="keras_margin")
class ElasticMargin(MarginRule):
    """A margin drawn for each sample and call from a normal distribution.

    The draw depends on (seed, training call, place in the global batch) alone: the same on every
    backend and replica, and after a resume. Draws are kept in the range where the rule is monotone.

    Args:
        margin: the mean; the paper uses 0.5 radians for "angular" and 0.35 for "cosine". A number
            or a schedule.
        std: the standard deviation; the paper uses 0.05.
        kind: "angular" or "cosine".
        seed: of the draws.

    Raises:
        ValueError: an argument out of range.

    Reference:
        Boutros et al., ElasticFace: Elastic Margin Loss for Deep Face Recognition, 2022,
        arXiv:2109.09416, eq. 6 and 7.
    """

    def __init__(self, margin=0.5, *, std=0.05, kind="angular", seed=0, **kwargs):
        super().__init__(**kwargs)
        if kind not in ("angular", "cosine"):
            raise ValueError(f'`kind` must be "angular" or "cosine". Received: kind={kind!r}')
        allowed = ANGLE_WITH_FALLBACK if kind == "angular" else NOT_NEGATIVE
        self.margin = self.add_setting("margin", margin, *allowed)
        self.std = checked_number("std", std, 0.0)
        self.kind = kind
        self.seed = checked_count("seed", seed, smallest=0)

    def call(self, target_cosines, norms=None, labels=None, training=None):
        dtype = target_cosines.dtype
        rows = global_row_indices(target_cosines)
        draws = random_normal(self.seed, self.step(), rows, dtype)
        return self._with(self.setting("margin", dtype) + self.std * draws, target_cosines)

    def curve(self, target_cosines, norms=None, labels=None):
        return self._with(self.setting("margin", target_cosines.dtype), target_cosines)

    def _with(self, margins, target_cosines):
        if self.kind == "cosine":
            return cosine_margin(target_cosines, ops.maximum(margins, 0.0))
        return angular_margin(target_cosines, ops.clip(margins, 0.0, 2.33))

    def get_config(self):
        return {**super().get_config(), "std": self.std, "kind": self.kind, "seed": self.seed}


def _range(name, values):
    is_pair = are_numbers(values) and len(values) == 2
    low, high = map(as_float, values) if is_pair else (math.nan, math.nan)
    if not 0.0 <= low < high < math.inf:
        raise ValueError(
            f"`{name}` must be (low, high) with 0 <= low < high. Received: {name}={values!r}"
        )
    return low, high
