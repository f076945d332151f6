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


def checked_number(name, value, smallest, *, at_most=math.inf, below=math.inf):
    """`value` as a finite float, at least `smallest`, at most `at_most`, less than `below`.

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
    return float(value)


def _is_finite(value):
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
