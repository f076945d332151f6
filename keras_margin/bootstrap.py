"""Confidence intervals of verification rates: a bootstrap over identities.

Pairs share samples and samples share identities, so that pairs are far from independent: drawing
pairs anew would give intervals that are much too narrow. It is identities that are drawn.
"""

import warnings

import numpy as np
from sklearn.exceptions import UndefinedMetricWarning

from keras_margin.streamed_pairs import pair_blocks, scored_rows

RESAMPLES = 1000
# Scores at which the rates of a resample are compared: at most this many of each of three kinds.
LEVELS = 1024
LOOKED_AT = 1000  # samples whose pairs say where rates change
UNDEFINED_SHARE = 0.05  # with more undefined resamples an interval is undefined


class Resamples:
    """Sets in which each identity is as often as it was drawn, with replacement.

    A genuine pair of an identity that was drawn n times counts n times, a pair of two identities
    n_a n_b times. Copies of one identity make no impostor pairs.

    Args:
        labels: (samples,) identities.
        seed: of the draws, an integer or None.
    """

    def __init__(self, labels, seed):
        names, self._identities = np.unique(labels, return_inverse=True)
        self._rng = np.random.default_rng(seed)
        count = len(names)
        self._drawn = np.zeros((RESAMPLES, count))
        if count:
            self._drawn[:] = self._rng.multinomial(count, np.full(count, 1 / count), RESAMPLES)

    def means(self, samples, values):
        """The mean of values of some samples in each resample: (resamples,), NaN without any."""
        identities = self._identities[samples]
        count = self._drawn.shape[1]
        sums = self._drawn @ np.bincount(identities, values, minlength=count)
        with np.errstate(invalid="ignore"):
            return sums / (self._drawn @ np.bincount(identities, minlength=count))

    def rates(self, units, points, fars, blocks):
        """Verification rates of each resample, NaN where they are undefined.

        Args:
            units: float64 (samples, dim), rows of length 1 or 0.
            points: `OperatingPoints` of the set itself.
            fars: (far,).
            blocks: slices of rows.

        Returns:
            (1 + far, resamples): the equal error rate, and the TAR at each FAR.
        """
        if not points.genuines or not points.impostors:
            return np.full((1 + len(fars), RESAMPLES), np.nan)
        levels = self._levels(units, points)
        identities = self._identities
        genuine, impostor = np.zeros((2, RESAMPLES, len(levels) + 1))
        for rows, later, scores, above in scored_rows(units, blocks):
            places = np.searchsorted(levels, scores, side="right")  # (block, later), from 1 on
            alike = identities[rows, None] == identities[later]
            own = np.nonzero(alike & above)
            own_places, own_identities = places[own], identities[rows][own[0]]
            places[alike | ~above] = 0  # where nobody looks
            for r, times in enumerate(self._drawn):
                genuine[r] += _counted(own_places, times[own_identities], levels)
                left, right = times[identities[rows]], times[identities[later]]
                i, j = np.flatnonzero(left), np.flatnonzero(right)
                counts = np.outer(left[i], right[j])
                impostor[r] += _counted(places[np.ix_(i, j)].ravel(), counts.ravel(), levels)
        return _rates(_accepted(genuine), _accepted(impostor), fars)

    def _levels(self, units, points):
        """Scores at which a resample's pairs are accepted, rising from -inf on.

        Few enough to count the pairs between them; close where rates change: scores of some
        identities, all of them in a small set, and steps along the tail of the impostor pairs,
        which some identities do not show.
        """
        order = self._rng.permutation(self._drawn.shape[1])
        samples = np.cumsum(np.bincount(self._identities)[order])
        some = np.isin(self._identities, order[: np.searchsorted(samples, LOOKED_AT) + 1])
        pairs = list(pair_blocks(units[some], self._identities[some]))
        scores, genuine = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        kinds = [np.unique(scores[genuine]), np.unique(scores[~genuine])]
        spread = [
            kind[np.linspace(0, len(kind) - 1, LEVELS).astype(int)] for kind in kinds if len(kind)
        ]
        return np.unique(np.concatenate([[-np.inf], *spread, points.tail_edges(LEVELS)]))


def interval(name, values, confidence):
    """(low, high): what the middle of the resampled values spans; NaN with too many undefined."""
    defined = values[~np.isnan(values)]
    if len(defined) < (1 - UNDEFINED_SHARE) * len(values):
        warnings.warn(
            f"The interval of {name} is undefined, as are {len(values) - len(defined)} of "
            f"{len(values)} resamples: there are too few identities or pairs. The result is NaN.",
            UndefinedMetricWarning,
            stacklevel=4,
        )
        return (float("nan"), float("nan"))
    low, high = np.quantile(defined, [(1 - confidence) / 2, (1 + confidence) / 2])
    return (float(low), float(high))


def _counted(places, counts, levels):
    return np.bincount(places, counts, minlength=len(levels) + 1)


def _accepted(counts):
    """(resamples, levels + 1) pairs that are accepted, from none up to all of them."""
    counts[:, 0] = 0  # no pairs
    falling = counts[:, ::-1]  # from the highest level down
    accepted = np.cumsum(falling, axis=1)
    return np.concatenate([np.zeros((len(counts), 1)), accepted[:, :-1]], axis=1)


def _rates(genuine, impostor, fars):
    """EER and TAR at each FAR, from the accepted pairs at each level."""
    genuines, impostors = genuine[:, -1], impostor[:, -1]  # (resamples,) each
    undefined = (genuines == 0) | (impostors == 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        tar, far = genuine / genuines[:, None], impostor / impostors[:, None]
        smallest = 1 / impostors
    each = np.arange(len(tar))
    # FAR - FRR in whole numbers: rates that are equally far apart must tie exactly.
    gap = impostor * genuines[:, None] - (genuines[:, None] - genuine) * impostors[:, None]
    point = np.argmin(np.abs(gap), axis=1)
    found = [np.where(undefined, np.nan, (far + 1 - tar)[each, point] / 2)]
    for bound in fars:
        loosest = np.maximum(np.sum(far <= bound, axis=1) - 1, 0)
        shown = ~undefined & (bound >= smallest)
        found.append(np.where(shown, tar[each, loosest], np.nan))
    return np.array(found)
