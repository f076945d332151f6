"""Every guard of the package: which value breaks a formula, and what its gradient becomes there.

The maths of a head runs in float32, or in float64 under that policy, whatever the mixed-precision
policy: near cosine 1 the smallest angle that float16 can tell from 0 is 1.8 degrees, bfloat16 5.
"""

import math

import keras
from keras import ops

from keras_margin.backend import custom_gradient

# Shorter vectors count as zero. 1 / SMALLEST_NORM times a scale of 64 is finite in float32.
SMALLEST_NORM = 1e-35
_SMALLEST_NORMAL = 1.1754944e-38  # of float32: processors may take what is below for 0


def computation_dtype(dtype):
    """The dtype of a head's maths under a layer dtype: "float64" stays, others give "float32"."""
    return "float64" if dtype == "float64" else "float32"


def product_dtype(dtype):
    """The dtype of what the products with the classes multiply under a layer dtype.

    Half precision stays where it pays: the sums are float32 all the same. A cosine's error is then
    that of rounding its factors, about 2^-9 / sqrt(dim) in bfloat16.
    """
    return dtype if dtype in ("float16", "bfloat16") else computation_dtype(dtype)


def smallest_sine(dtype):
    """The bound below sin(theta) where it divides: sqrt(epsilon).

    3.5e-4 in float32, 1.5e-8 in float64. One rounding step below cosine 1 the sine is already
    about that, so the bound is in force only where the angle cannot be told from 0 or pi.
    """
    return 3.4526698e-4 if dtype == "float32" else 1.4901161193847656e-08


def _norms(x):
    """|x| over the last axis (kept), exact from 1e-35 to 1e38: squares of 1e-30 underflow to 0."""
    # `initial`: without it Keras checks at run time that x is not empty.
    largest = ops.max(ops.abs(x), axis=-1, keepdims=True, initial=0.0)
    unit = ops.where(largest >= _SMALLEST_NORMAL, largest, ops.ones_like(largest))
    # A row that holds NaN or inf stays NaN: `>=` is false for NaN, and inf / inf is NaN.
    norms = unit * ops.sqrt(ops.sum(ops.square(x / unit), axis=-1, keepdims=True))
    return norms


def l2_norm(x):
    """Euclidean norms of the last axis, with a gradient that is finite everywhere.

    `x / |x|` is the gradient; for a zero vector, where it does not exist, it is 0.

    Args:
        x: float32 or float64 tensor (..., dim).

    Returns:
        Tensor (...) of x's dtype.
    """
    return _l2_norm(x)[..., 0]


@custom_gradient
def _l2_norm(x):
    norms = _norms(x)

    def gradient(upstream):
        return upstream * (x * _reciprocal(norms))

    return norms, gradient


def _reciprocal(norms):
    """1 / |x|; 1 for a zero vector, whose direction is 0 and whose gradient a unit vector's."""
    return 1.0 / ops.where(norms < SMALLEST_NORM, ops.ones_like(norms), norms)


def inverse_norms(x):
    """1 / |x| over the last axis, not differentiated; 1 where |x| < 1e-35.

    Args:
        x: float32 or float64 tensor (rows, dim).

    Returns:
        Tensor (rows,) of x's dtype.
    """
    return _reciprocal(_norms(x))[..., 0]


@custom_gradient
def l2_normalize(x):
    """Unit vectors along the last axis, exact for every norm from 1e-35 up.

    A zero vector stays 0, so its cosine with everything is 0. Its gradient, which does not exist,
    is that of a vector of norm 1: finite, and it lets the vector leave 0 downhill.

    Args:
        x: float32 or float64 tensor (..., dim).

    Returns:
        Tensor of x's shape and dtype.
    """
    reciprocal = _reciprocal(_norms(x))
    unit = x * reciprocal

    def gradient(upstream):
        along = ops.sum(unit * upstream, axis=-1, keepdims=True)
        return (upstream - unit * along) * reciprocal

    return unit, gradient


@custom_gradient
def sine_of(cosines):
    """sin(theta) of angles given by their cosines, theta in [0, pi].

    d sin / d cos = -cos / sin is infinite at cosine +-1. There sin is bounded below by
    `smallest_sine`: large, so that the sample goes on learning, and finite. Rounding can bring a
    cosine above 1 (it does for one random vector in ten): the sine is 0 there, not NaN.

    Args:
        cosines: float32 or float64 tensor.

    Returns:
        Tensor of the same shape and dtype.
    """
    sines = ops.sqrt(ops.maximum((1.0 - cosines) * (1.0 + cosines), 0.0))
    bounded = ops.maximum(sines, smallest_sine(keras.backend.standardize_dtype(cosines.dtype)))

    def gradient(upstream):
        return upstream * (-cosines / bounded)

    return sines, gradient


def add_angle(cosines, angle):
    """cos(theta + angle) from cos(theta), without arccos.

    Args:
        cosines: tensor of cos(theta).
        angle: radians; a number or a tensor that broadcasts with `cosines`.

    Returns:
        Tensor of cosines' dtype.
    """
    angle = ops.convert_to_tensor(angle, dtype=cosines.dtype)
    return cosines * ops.cos(angle) - sine_of(cosines) * ops.sin(angle)


def unwound_cosine(cosines, multiplier, offset):
    """cos(phi) continued beyond pi so that it keeps falling, phi = multiplier * theta + offset.

        psi(phi) = (-1)^k cos(phi) - 2k,  k = floor(phi / pi)

    d psi / d cos = (-1)^k multiplier sin(phi) / sin(theta). Where the angle cannot be told from 0
    or pi, sin(multiplier theta) / sin(theta) is taken at its limit `multiplier`, and what would be
    infinite (an offset at theta = 0, a multiplier that is not whole at pi) is bounded by
    `smallest_sine`.

    Args:
        cosines: float32 or float64 tensor, cos(theta).
        multiplier, offset: tensors of cosines' dtype that broadcast with it; no gradient flows.

    Returns:
        Tensor of cosines' dtype.
    """
    dtype = keras.backend.standardize_dtype(cosines.dtype)
    multiplier, offset = ops.stop_gradient(multiplier), ops.stop_gradient(offset)

    @custom_gradient
    def unwound(cosines):
        # Angles are taken from the nearer end, 0 or pi, where arccos is exact.
        near_zero = cosines >= 0.0
        direction = 2.0 * ops.cast(near_zero, dtype) - 1.0
        angle = multiplier * ops.arccos(ops.clip(ops.abs(cosines), 0.0, 1.0))
        end = ops.where(near_zero, offset, multiplier * math.pi + offset)
        turns = ops.floor((end + direction * angle) / math.pi)
        sign = 1.0 - 2.0 * (turns - 2.0 * ops.floor(turns / 2.0))  # (-1)^k
        cosine = ops.cos(end) * ops.cos(angle) - direction * ops.sin(end) * ops.sin(angle)

        def gradient(upstream):
            sines = ops.sqrt(ops.maximum((1.0 - cosines) * (1.0 + cosines), 0.0))
            bounded = ops.maximum(sines, smallest_sine(dtype))
            ratio = ops.where(sines == bounded, ops.sin(angle) / bounded, multiplier)
            slope = ops.sin(end) * ops.cos(angle) / bounded + direction * ops.cos(end) * ratio
            return upstream * sign * multiplier * slope

        return sign * cosine - 2.0 * turns, gradient

    return unwound(cosines)


def angle_of(cosines):
    """theta in [0, pi] of cos(theta), for statistics only: no gradient flows."""
    return ops.arccos(ops.clip(ops.stop_gradient(cosines), -1.0, 1.0))
