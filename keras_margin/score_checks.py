"""What comes in to verification, checked: scored pairs and false accept rates."""

import warnings

import numpy as np
from sklearn.exceptions import UndefinedMetricWarning


def check_scores(scores, genuine):
    """`scores` as floats and `genuine` as booleans, two vectors of one length."""
    scores, genuine = np.asarray(scores), np.asarray(genuine)
    if scores.ndim != 1 or scores.shape != genuine.shape:
        raise ValueError(
            "`scores` and `genuine` must be vectors of one length. "
            f"Received: scores.shape={scores.shape}, genuine.shape={genuine.shape}"
        )
    if not np.can_cast(scores.dtype, np.float64):
        raise ValueError(f"`scores` must be real numbers. Received: scores.dtype={scores.dtype}")
    if scores.dtype.kind in "biu":
        scores = scores.astype(np.float64)
    finite = np.isfinite(scores)
    if not finite.all():
        row = np.argmin(finite)
        raise ValueError(f"`scores` must be finite. Received: scores[{row}]={scores[row]}")
    if genuine.dtype.kind not in "biuf":
        raise ValueError(
            f"`genuine` must be boolean, or 0 and 1. Received: genuine.dtype={genuine.dtype}"
        )
    binary = (genuine == 0) | (genuine == 1)
    if not binary.all():
        row = np.argmin(binary)
        raise ValueError(
            f"`genuine` must be boolean, or 0 and 1. Received: genuine[{row}]={genuine[row]}"
        )
    return scores, genuine.astype(bool)


def check_far(far):
    bounds = np.asarray(far)
    if bounds.ndim > 1 or bounds.dtype.kind not in "iuf":
        raise ValueError(f"`far` must be a number or a sequence of numbers. Received: far={far!r}")
    if not np.all((bounds >= 0) & (bounds <= 1)):
        raise ValueError(f"`far` must be in [0, 1]. Received: far={far!r}")
    return bounds.astype(np.float64)


def check_named_far(far):
    """`far` as a vector of rates that a report can tell apart, written as `f"{far:g}"`."""
    fars = np.atleast_1d(check_far(far))
    if len({f"{bound:g}" for bound in fars}) < len(fars):
        raise ValueError(
            "`far` must hold rates that differ in their first six digits, which name them. "
            f"Received: far={far!r}"
        )
    return fars


def warn_of_small(fars, impostors, stacklevel=3):
    if len(fars):
        warnings.warn(
            f"far={fars.tolist()} is below 1 / {impostors} impostor pairs. The result is NaN.",
            UndefinedMetricWarning,
            stacklevel=stacklevel,
        )


def warn_undefined(what, genuines, impostors, stacklevel=3):
    warnings.warn(
        f"{what} is undefined with {genuines} genuine and {impostors} impostor pairs. "
        "The result is NaN.",
        UndefinedMetricWarning,
        stacklevel=stacklevel,
    )
