"""Checks of arguments that several classes share."""

import math
from numbers import Real


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


def checked_number(name, value, smallest, *, below=math.inf):
    """`value` as a float in [smallest, below).

    Raises:
        ValueError: it is none.
    """
    if not _is_finite(value) or not smallest <= value < below:
        most = f" and less than {below:g}" if below < math.inf else ""
        raise ValueError(
            f"`{name}` must be a finite number, at least {smallest:g}{most}. "
            f"Received: {name}={value!r}"
        )
    return float(value)


def _is_finite(value):
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
