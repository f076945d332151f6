"""Checks of arguments that several classes share."""

import math
from numbers import Real


def checked_count(name, value, smallest):
    """`value` as an int: a whole number of at least `smallest`.

    Raises:
        ValueError: it is none.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value != int(value):
        raise ValueError(f"`{name}` must be a whole number. Received: {name}={value!r}")
    if value < smallest:
        raise ValueError(f"`{name}` must be at least {smallest}. Received: {name}={value!r}")
    return int(value)
