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


def checked_seed(value):
    """`seed` as an int of at least 0, or None.

    Raises:
        ValueError: it is neither.
    """
    return None if value is None else checked_count("seed", value, smallest=0)


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
    """
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


def _is_finite(value):
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False
