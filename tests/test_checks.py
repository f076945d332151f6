"""Checks of arguments: what passes, and the whole message where something does not."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest

from keras_margin.checks import (
    check_rows,
    checked_count,
    checked_ignore_class,
    checked_number,
    checked_seed,
)


def exactly(message):
    return f"^{re.escape(message)}$"


NO_NUMBERS = [True, np.True_, "3", None, [3], 3j, math.nan, math.inf, -math.inf]


# Counts


@pytest.mark.parametrize("value", [3, 3.0, np.int8(3), np.uint64(3), np.float32(3), Fraction(3)])
def test_count(value):
    count = checked_count("num_classes", value, smallest=3)
    assert count == 3
    assert type(count) is int


@pytest.mark.parametrize("value", [2.5, -0.5, *NO_NUMBERS], ids=str)
def test_count_that_is_no_whole_number(value):
    message = f"`size` must be a whole number. Received: size={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        checked_count("size", value, smallest=0)


@pytest.mark.parametrize(("value", "smallest"), [(1, 2), (0, 1), (-7, 0), (1.0, 2)])
def test_count_that_is_too_small(value, smallest):
    message = f"`size` must be at least {smallest}. Received: size={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        checked_count("size", value, smallest)


# Numbers


@pytest.mark.parametrize("value", [0, 0.25, 1, np.float32(0.5), np.int64(1), Fraction(1, 4)])
def test_number(value):
    number = checked_number("momentum", value, 0.0, at_most=1.0)
    assert number == float(value)
    assert type(number) is float


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
def test_what_is_no_finite_number(value):
    message = f"`h` must be a finite number. Received: h={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        checked_number("h", value, -math.inf)


@pytest.mark.parametrize(
    ("bounds", "value", "words"),
    [
        ({"smallest": 0.0}, -1e-9, "at least 0"),
        ({"smallest": 1.0}, 0.5, "at least 1"),
        ({"smallest": 0.0, "at_most": 1.0}, 1.5, "at least 0, at most 1"),
        ({"smallest": 0.0, "at_most": 1.0}, -0.5, "at least 0, at most 1"),
        ({"smallest": 0.0, "below": 1.0}, 1.0, "at least 0, less than 1"),
        ({"smallest": -math.inf, "below": 0.5}, 0.5, "less than 0.5"),
    ],
)
def test_number_out_of_bounds(bounds, value, words):
    message = f"`x` must be a finite number, {words}. Received: x={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        checked_number("x", value, **bounds)


def test_bounds_belong_to_the_range_but_for_below():
    assert checked_number("x", 0.0, 0.0, at_most=1.0) == 0.0
    assert checked_number("x", 1.0, 0.0, at_most=1.0) == 1.0
    assert checked_number("x", math.nextafter(1.0, 0.0), 0.0, below=1.0) < 1.0


@pytest.mark.parametrize("value", [1e39, -1e39, 10**39, 1e308])
def test_number_beyond_float32(value):
    message = (
        f"`x` must be at most 3.4e38 in size, the largest number of float32. Received: x={value!r}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        checked_number("x", value, -math.inf)


def test_largest_number_of_float32():
    largest = float(np.finfo("float32").max)
    assert checked_number("x", largest, 0.0) == largest


# Seeds


@pytest.mark.parametrize("value", [0, 3.0, np.int64(3), 2**32 - 1])
def test_seed(value):
    seed = checked_seed(value)
    assert seed == value
    assert type(seed) is int
    assert checked_seed(None) is None


@pytest.mark.parametrize("value", [2**32, 2**70])
def test_seed_of_more_than_32_bits(value):
    message = f"`seed` must be less than 2**32. Received: seed={value!r}"
    with pytest.raises(ValueError, match=exactly(message)):
        checked_seed(value)


# The ignored class


def test_no_ignored_class():
    assert checked_ignore_class(None) is None


@pytest.mark.parametrize("value", [-1, 255, 0, -1.0, np.int64(-1), 2**31 - 1, -(2**31)])
def test_ignored_class(value):
    found = checked_ignore_class(value)
    assert found == value
    assert type(found) is int


@pytest.mark.parametrize("value", [0.5, 2**31, -(2**31) - 1, *NO_NUMBERS[:3], [3], math.nan])
def test_ignored_class_that_is_no_label(value):
    message = (
        "`ignore_class` must be None or a whole number that fits int32. "
        f"Received: ignore_class={value!r}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        checked_ignore_class(value)


# Rows


@pytest.mark.parametrize("dim", [None, 4])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_that_fit(rows, dim):
    check_rows(np.zeros((rows, 4)), np.zeros(rows), dim)


@pytest.mark.parametrize(
    ("shape", "dim", "wanted"),
    [
        ((4,), None, "dim"),
        ((4, 3, 2), None, "dim"),
        ((), 3, "3"),
        ((4, 3, 2), 3, "3"),
        ((4, 2), 3, "3"),
    ],
)
def test_embeddings_of_another_shape(shape, dim, wanted):
    message = f"`embeddings` must have shape (batch, {wanted}). Received: embeddings.shape={shape}"
    with pytest.raises(ValueError, match=exactly(message)):
        check_rows(np.zeros(shape), np.zeros(4), dim)


@pytest.mark.parametrize("labels", [0, 1, 3, 5])
def test_another_number_of_labels(labels):
    message = (
        "`labels` must have one entry for each row of `embeddings`. Received: "
        f"{labels} labels, embeddings.shape=(4, 2)"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        check_rows(np.zeros((4, 2)), np.zeros(labels))


class Unknown:
    """A tensor of a compiled function: only its shape is known, in part."""

    def __init__(self, *shape):
        self.shape = shape


@pytest.mark.parametrize("embeddings", [None, [[1.0]], np.array([["a"]]), np.array([[None]])])
def test_embeddings_that_are_no_array_of_numbers(embeddings):
    with pytest.raises(TypeError, match="`embeddings` must be an array or a tensor of numbers"):
        check_rows(embeddings, np.zeros(1, int))


@pytest.mark.parametrize(
    ("embeddings", "labels"),
    [((None, 2), (4,)), ((4, 2), (None,)), ((None, None), (None,))],
)
def test_sizes_that_are_not_known_yet_pass(embeddings, labels):
    check_rows(Unknown(*embeddings), Unknown(*labels), 2)
