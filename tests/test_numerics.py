"""Values and gradients of the safe operations, where the plain formulas break and elsewhere."""

import math

import numpy as np
import pytest
from backends import DTYPES, WIDEST, float64_only, jacobians, rounded, value_and_gradients
from keras import ops

from keras_margin import numerics

DIRECTION = np.array([3.0, -4.0, 12.0]) / 13.0
UPSTREAM = np.array([0.3, -1.0, 0.7])
NORMS = np.array([1e-34, 1e-30, 1e-3, 1.0, 1e4, 1e30, 1e35])
ABOVE_ONE = np.nextafter(np.float32(1), np.float32(2))  # 1 + 1.2e-7, as rounding makes it
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def of_rows(function, run, rows, upstream, dtype):
    """Value, and gradient of the given upstream, as NumPy arrays."""
    rows, upstream = (ops.convert_to_tensor(each, dtype) for each in (rows, upstream))
    got = run(lambda x, u: value_and_gradients(function, [x], upstream=u))(rows, upstream)
    return [ops.convert_to_numpy(each) for each in got]


def tolerance(dtype):
    return {"rtol": 1e-6, "atol": 1e-7} if dtype == "float32" else {"rtol": 1e-14, "atol": 1e-15}


# Norms


@every_dtype
def test_l2_normalize(run, dtype):
    rows, upstream = NORMS[:, None] * DIRECTION, np.tile(UPSTREAM, (len(NORMS), 1))
    unit, gradient = of_rows(numerics.l2_normalize, run, rows, upstream, dtype)
    np.testing.assert_allclose(unit, np.tile(DIRECTION, (len(NORMS), 1)), **tolerance(dtype))
    tangent = UPSTREAM - DIRECTION * (DIRECTION @ UPSTREAM)
    np.testing.assert_allclose(
        gradient * NORMS[:, None], np.tile(tangent, (len(NORMS), 1)), **tolerance(dtype)
    )


@every_dtype
def test_l2_norm(run, dtype):
    rows, upstream = NORMS[:, None] * DIRECTION, np.full(len(NORMS), 0.7)
    norms, gradient = of_rows(numerics.l2_norm, run, rows, upstream, dtype)
    np.testing.assert_allclose(norms / NORMS, np.ones(len(NORMS)), **tolerance(dtype))
    np.testing.assert_allclose(
        gradient, np.tile(0.7 * DIRECTION, (len(NORMS), 1)), **tolerance(dtype)
    )


@every_dtype
def test_inverse_norms(run, dtype):
    inverse = run(numerics.inverse_norms)(ops.convert_to_tensor(NORMS[:, None] * DIRECTION, dtype))
    np.testing.assert_allclose(inverse * NORMS, np.ones(len(NORMS)), **tolerance(dtype))


def test_norms_from_the_smallest_up_are_exact_however_spread_over_the_coordinates(run):
    norm = 2.0 * numerics.SMALLEST_NORM
    row = np.full(512, norm / math.sqrt(512))
    norms, gradient = of_rows(numerics.l2_norm, run, [row], [1.0], "float32")
    np.testing.assert_allclose(norms / norm, [1.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [row / norm], rtol=1e-6)


@every_dtype
def test_zero_vector_stays_zero_and_has_the_gradient_of_a_unit_vector(run, dtype):
    rows, upstream = [np.zeros(3), DIRECTION], [UPSTREAM, UPSTREAM]
    unit, gradient = of_rows(numerics.l2_normalize, run, rows, upstream, dtype)
    np.testing.assert_allclose(unit, rows, **tolerance(dtype))
    np.testing.assert_allclose(gradient[0], UPSTREAM, **tolerance(dtype))

    norms, gradient = of_rows(numerics.l2_norm, run, rows, [0.7, 0.7], dtype)
    np.testing.assert_allclose(norms, [0.0, 1.0], **tolerance(dtype))
    np.testing.assert_allclose(gradient, [np.zeros(3), 0.7 * DIRECTION], **tolerance(dtype))

    inverse = run(numerics.inverse_norms)(ops.convert_to_tensor(rows, dtype))
    np.testing.assert_allclose(inverse, [1.0, 1.0], **tolerance(dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_row_that_is_not_finite_stays_so_and_leaves_the_others_alone(run, value):
    rows, upstream = [[1.0, value, 2.0], 5.0 * DIRECTION], [UPSTREAM, UPSTREAM]
    unit, gradient = of_rows(numerics.l2_normalize, run, rows, upstream, "float32")
    tangent = UPSTREAM - DIRECTION * (DIRECTION @ UPSTREAM)
    assert np.isnan(unit[0]).any()
    np.testing.assert_allclose(unit[1], DIRECTION, **tolerance("float32"))
    np.testing.assert_allclose(gradient[1] * 5.0, tangent, **tolerance("float32"))

    norms, _ = of_rows(numerics.l2_norm, run, rows, [1.0, 1.0], "float32")
    assert not np.isfinite(norms[0])
    np.testing.assert_allclose(norms[1], 5.0, **tolerance("float32"))


@float64_only
@pytest.mark.parametrize("function", [numerics.l2_normalize, numerics.l2_norm])
def test_gradients_of_norms_are_the_numerical_ones(function):
    rows = np.random.default_rng(0).normal(size=(3, 4))
    analytic, numerical = jacobians(function, [rows], delta=1e-5)
    np.testing.assert_allclose(analytic[0], numerical[0], rtol=1e-8, atol=1e-9)


# Angles


def test_sine_of(run):
    cosines = [0.6, -0.28, 0.0, BELOW_ONE, 1.0, -1.0, ABOVE_ONE, -ABOVE_ONE]
    sines, gradient = of_rows(numerics.sine_of, run, cosines, np.ones(8), "float32")
    steep = 2.0**11.5  # 1 / sqrt(2 epsilon), epsilon = 2^-24, from one rounding step below 1
    np.testing.assert_allclose(sines, [0.8, 0.96, 1.0, 1 / steep, 0, 0, 0, 0], rtol=1e-6)
    slopes = [-0.75, 0.28 / 0.96, 0.0, -steep, -steep, steep, -steep, steep]
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6)


@float64_only
def test_sine_of_in_float64_is_bounded_where_float64_cannot_tell_the_angle_from_0(run):
    cosines = [1.0, 1.0 - 2.0**-53]
    sines, gradient = of_rows(numerics.sine_of, run, cosines, [1.0, 1.0], "float64")
    np.testing.assert_allclose(sines, [0.0, 2.0**-26], rtol=1e-14)
    np.testing.assert_allclose(gradient, [-(2.0**26), -(2.0**26)], rtol=1e-14)


def test_sine_of_is_exact_close_to_one(run):
    cosines = 1.0 - np.float32(2.0) ** -np.arange(1, 25, dtype="float32")
    sines, _ = of_rows(numerics.sine_of, run, cosines, np.ones(24), "float32")
    np.testing.assert_allclose(sines, np.sqrt(1.0 - cosines.astype("float64") ** 2), rtol=3e-7)


@every_dtype
def test_add_angle(run, dtype):
    theta, angle = np.linspace(0.1, 3.0, 30), 0.5
    values, gradient = of_rows(
        lambda cosines: numerics.add_angle(cosines, angle), run, np.cos(theta), np.ones(30), dtype
    )
    close = {"atol": 1e-6} if dtype == "float32" else {"atol": 1e-14}
    np.testing.assert_allclose(values, np.cos(theta + angle), **close)
    slopes = np.sin(theta + angle) / np.sin(theta)
    np.testing.assert_allclose(gradient, slopes, rtol=2e-5 if dtype == "float32" else 1e-12)


def test_add_angle_takes_an_angle_a_row_and_differentiates_by_it():
    theta, angles = np.array([0.3, 1.0, 2.0]), np.array([0.1, 0.5, 0.9])
    cosines = ops.convert_to_tensor(np.cos(theta), WIDEST)
    values, gradient = value_and_gradients(lambda a: numerics.add_angle(cosines, a), [angles])
    np.testing.assert_allclose(values, np.cos(theta + angles), rtol=rounded(1e-13, 2e-6))
    np.testing.assert_allclose(gradient, -np.sin(theta + angles), rtol=rounded(1e-13, 2e-6))


def test_add_angle_is_finite_at_every_cosine_that_rounding_makes(run):
    cosines = [1.0, -1.0, ABOVE_ONE, -ABOVE_ONE]
    values, gradient = of_rows(
        lambda cosines: numerics.add_angle(cosines, 0.5), run, cosines, np.ones(4), "float32"
    )
    signs = np.array([1.0, -1.0, 1.0, -1.0])
    np.testing.assert_allclose(values, signs * math.cos(0.5), rtol=1e-6)
    slopes = math.cos(0.5) + signs * math.sin(0.5) * 2.0**11.5
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6)


def test_add_angle_of_no_angle_changes_nothing(run):
    cosines = np.float32([1.0, 0.3, -1.0])
    values, gradient = of_rows(
        lambda cosines: numerics.add_angle(cosines, 0.0), run, cosines, np.ones(3), "float32"
    )
    np.testing.assert_array_equal(values, cosines)
    np.testing.assert_array_equal(gradient, np.ones(3))


def test_angle_of(run):
    cosines = [1.0, ABOVE_ONE, 0.5, 0.0, -1.0, -ABOVE_ONE]
    angles = run(numerics.angle_of)(ops.convert_to_tensor(cosines, "float32"))
    np.testing.assert_allclose(
        angles, [0.0, 0.0, math.pi / 3, math.pi / 2, math.pi, math.pi], rtol=1e-6
    )


def test_angle_of_has_no_gradient():
    _, gradient = value_and_gradients(numerics.angle_of, [[0.5]])
    np.testing.assert_array_equal(gradient, [0.0])


# Dtypes


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [
        ("float64", "float64"),
        ("float32", "float32"),
        ("float16", "float32"),
        ("bfloat16", "float32"),
    ],
)
def test_computation_dtype(dtype, computed):
    assert numerics.computation_dtype(dtype) == computed
