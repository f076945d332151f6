"""Checks of arguments that several classes share."""

import math
from numbers import Real

import numpy as np

# The maths of a head takes smaller numbers for 0, and larger ones for infinity.
SMALLEST_FLOAT32, LARGEST_FLOAT32 = 1.1754944e-38, 3.4028235e38
WITHIN_FLOAT32 = (
    lambda v: abs(v) <= LARGEST_FLOAT32,
    "at most 3.4e38 in size, the largest number of float32",
)


def checked_count(name, value, smallest):
    """`value` as an int: a whole number of at least `smallest`.

    Raises:
        ValueError: it is none.
    """
    if not _is_finite(value) or value != int(value):
        raise ValueError(f"`{name}` must be a whole number. Received: {name}={value!r}")
    if value < smallest:
        raise ValueError(f"`{name}` must be at least {smallest}. Received: {name}={value!r}")
    return int(value)


def checked_number(name, value, smallest, *, at_most=math.inf, below=math.inf):
    """`value` as a float that float32 holds, within `smallest`, `at_most` and `below`.

    Raises:
        ValueError: it is none.
    """
    if not _is_finite(value) or not smallest <= value <= at_most or value >= below:
        bounds = [f"at least {smallest:g}"] if smallest > -math.inf else []
        bounds += [f"at most {at_most:g}"] if at_most < math.inf else []
        bounds += [f"less than {below:g}"] if below < math.inf else []
        raise ValueError(
            f"`{name}` must be a finite number{', '.join(['', *bounds])}. "
            f"Received: {name}={value!r}"
        )
    is_valid, requirement = WITHIN_FLOAT32
    if not is_valid(float(value)):
        raise ValueError(f"`{name}` must be {requirement}. Received: {name}={value!r}")
    return float(value)


def checked_seed(value):
    """`seed` as an int of 32 bits, as Keras' initializers take it, or None.

    Raises:
        ValueError: it is neither.
    """
    if value is None:
        return None
    seed = checked_count("seed", value, smallest=0)
    if seed >= 2**32:
        raise ValueError(f"`seed` must be less than 2**32. Received: seed={value!r}")
    return seed


def checked_ignore_class(value):
    """`ignore_class` as an int that fits int32, or None.

    Raises:
        ValueError: it is neither.
    """
    if value is None:
        return None
    if not _is_finite(value) or value != int(value) or not -(2**31) <= value < 2**31:
        raise ValueError(
            "`ignore_class` must be None or a whole number that fits int32. "
            f"Received: ignore_class={value!r}"
        )
    return int(value)


def check_rows(embeddings, labels, dim=None):
    """Where the shapes are known: one label a row, and embeddings (batch, dim).

    Raises:
        ValueError: they do not fit.
        TypeError: embeddings that are no array of numbers.
    """
    kind = getattr(getattr(embeddings, "dtype", None), "kind", "f")  # of NumPy's dtypes
    if not hasattr(embeddings, "shape") or kind in "OSUMm":
        raise TypeError(
            "`embeddings` must be an array or a tensor of numbers (batch, dim). Received: "
            f"embeddings={embeddings!r:.200}"
        )
    shape, rows = tuple(embeddings.shape), labels.shape[0]
    if len(shape) != 2 or (dim is not None and shape[1] not in (None, dim)):
        raise ValueError(
            f"`embeddings` must have shape (batch, {dim if dim is not None else 'dim'}). "
            f"Received: embeddings.shape={shape}"
        )
    if isinstance(shape[0], int) and isinstance(rows, int) and shape[0] != rows:
        raise ValueError(
            "`labels` must have one entry for each row of `embeddings`. Received: "
            f"{rows} labels, embeddings.shape={shape}"
        )


def is_number(value):
    """Whether it is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def are_numbers(values):
    """Whether it is a sequence of real numbers."""
    if isinstance(values, np.ndarray):
        values = values.tolist()  # a number where there is no axis, lists where there are several
    return isinstance(values, (list, tuple)) and all(map(is_number, values))


def as_float(value):
    """A number as a float; infinite where it is a whole number beyond every float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_finite(value):
    return is_number(value) and math.isfinite(as_float(value))
