"""All pairs of a set, block by block, and exact operating points without holding the scores.

The first pass counts scores in fine bins. The bins that hold an operating point are known then, and
the second pass looks at their scores alone.
"""

from typing import NamedTuple

import numpy as np

from keras_margin.retrieval import row_blocks

BINS = 2**16  # of cosines


def scored_rows(units, blocks):
    """Cosines of blocks of rows with themselves and all later rows.

    Args:
        units: float64 (samples, dim), rows of length 1 or 0.
        blocks: slices of rows.

    Yields:
        rows, later: slices of samples, those of the block and all from its first one on.
        scores: float32 (block, later).
        above: bool (block, later), the pairs i < j, each once in all blocks together.
    """
    index = np.arange(len(units))
    for rows in blocks:
        later = slice(rows.start, len(units))  # no pair of this block lies further left
        scores = (units[rows] @ units[later].T).astype(np.float32)
        yield rows, later, scores, index[rows, None] < index[later]


def pair_blocks(units, labels, blocks=None):
    """Scores and genuine flags of the pairs i < j, row by row.

    Args:
        units, labels: of the samples, (samples, dim) and (samples,).
        blocks: slices of rows; None: as `row_blocks` cuts them.

    Yields:
        float32 (pairs,) and bool (pairs,) of a block of rows i.
    """
    blocks = row_blocks(len(units), len(units)) if blocks is None else blocks
    for rows, later, scores, above in scored_rows(units, blocks):
        yield scores[above], (labels[rows, None] == labels[later])[above]


class OperatingPoints:
    """Accepted pairs at every score, of all pairs of a labelled set.

    Args:
        blocks: a function that gives the blocks of `pair_blocks`, anew at each call.

    Attributes:
        genuines, impostors: how many pairs there are.
    """

    def __init__(self, blocks):
        self._blocks = blocks
        every, genuine = np.zeros((2, BINS), np.int64)
        for scores, is_genuine in blocks():
            bins = _bin_of(scores)
            every += np.bincount(bins, minlength=BINS)
            genuine += np.bincount(bins[is_genuine], minlength=BINS)
        # From the highest bin down: the pairs above each bin, and all of them.
        self._genuine_above = np.append(0, np.cumsum(genuine[::-1]))
        self._impostor_above = np.append(0, np.cumsum((every - genuine)[::-1]))
        self.genuines, self.impostors = int(genuine.sum()), int(every.sum() - genuine.sum())
        self._points = {}  # {bin, counted from the top: its `_Points`}

    def look_closer(self, far):
        """The second pass, for all that `accepts(far)` and `equal_error` ask: one for both."""
        self._refine([*self._bins_with_bounds(far), self._bin_of_equal_error()])

    def accepts(self, far):
        """Accepted genuine pairs at the loosest score whose FAR is within each bound.

        Args:
            far: (n,), each at least 1 / impostors.

        Returns:
            int64 (n,).
        """
        found = [self.genuines if p is None else p.genuines[i] for p, i in self._within(far)]
        return np.array(found, np.int64)

    def thresholds(self, far):
        """The smallest score whose FAR is within each bound, as `verification.threshold_at_far`.

        Args:
            far: (n,), each at least 1 / impostors.

        Returns:
            float64 (n,). Where even the highest score breaks the bound, the next float32 above it.
        """
        pairs_above = self._genuine_above + self._impostor_above
        found = []
        for points, within in self._within(far):
            if points is not None and within > 0:
                found.append(points.scores[within - 1])
                continue
            # Nothing of this bin is accepted: the lowest score above it is the threshold.
            above = pairs_above[-1] if points is None else points.genuines[0] + points.impostors[0]
            if above == 0:
                found.append(np.nextafter(points.scores[0], np.float32(np.inf)))
                continue
            place = int(np.searchsorted(pairs_above, above)) - 1
            self._refine([place])
            found.append(self._points[place].scores[-1])
        return np.array(found, np.float64)

    def _within(self, far):
        """The bin where each bound is reached, and how many of its scores are accepted.

        (None, None) where all pairs are.
        """
        most = [_largest_count(bound, self.impostors) for bound in far]
        # The next impostor pair, which must not be accepted, is the bound. None: all may be.
        bins = [self._bin_with_impostor(count) for count in most]
        self._refine(self._bins_with_bounds(far))
        for count, place in zip(most, bins, strict=True):
            if place is None:
                yield None, None
            else:
                points = self._points[place]
                yield points, np.searchsorted(points.impostors, count, side="right") - 1

    def equal_error(self):
        """(accepted impostor pairs, rejected genuine pairs) where their rates are closest."""
        place = self._bin_of_equal_error()
        self._refine([place])
        points = self._points[place]
        best = np.argmin(np.abs(self._gap(points.impostors, points.genuines)))
        return int(points.impostors[best]), self.genuines - int(points.genuines[best])

    def tail_edges(self, count):
        """Scores of bins between which the accepted impostor pairs grow by equal factors."""
        wanted = np.geomspace(1, self.impostors, count)
        places = np.unique(np.searchsorted(self._impostor_above[1:], wanted))
        return (BINS - 1 - places) / (BINS / 2) - 1

    def _bins_with_bounds(self, far):
        """The bins of the impostor pairs that must not be accepted; none where all may be."""
        bins = [self._bin_with_impostor(_largest_count(bound, self.impostors)) for bound in far]
        return [place for place in bins if place is not None]

    def _bin_of_equal_error(self):
        # FAR - FRR grows from one score to the next: the closest are those around its zero.
        gaps = self._gap(self._impostor_above, self._genuine_above)
        return max(int(np.searchsorted(gaps, 0)) - 1, 0)

    def _gap(self, impostors, genuines):
        """(FAR - FRR) x all pairs of both kinds, in whole numbers."""
        # Python's integers: 10^8 x 10^10 pairs are beyond 64 bits.
        accepts, rejects = impostors.astype(object), self.genuines - genuines.astype(object)
        return accepts * self.genuines - rejects * self.impostors

    def _bin_with_impostor(self, count):
        """The bin of the impostor pair after the first `count`, from the top."""
        if count >= self.impostors:
            return None
        return int(np.searchsorted(self._impostor_above, count, side="right")) - 1

    def _refine(self, places):
        """Looks at the scores of some bins: the second pass."""
        missing = sorted(set(places) - self._points.keys())
        if not missing:
            return
        wanted = np.zeros(BINS, bool)
        wanted[BINS - 1 - np.array(missing)] = True
        kept = np.zeros((0, 3))  # score, genuine and impostor pairs that have it
        for scores, is_genuine in self._blocks():
            inside = wanted[_bin_of(scores)]
            kept = _merged(kept, scores[inside], is_genuine[inside])
        bins = _bin_of(kept[:, 0].astype(np.float32))
        for place in missing:
            own = kept[bins == BINS - 1 - place][::-1]  # from the highest score down
            self._points[place] = _Points(
                own[:, 0].astype(np.float32),
                np.cumsum(np.append(self._genuine_above[place], own[:, 1].astype(np.int64))),
                np.cumsum(np.append(self._impostor_above[place], own[:, 2].astype(np.int64))),
            )


class _Points(NamedTuple):
    """The scores of a bin from the highest down, and accepted pairs above it and after each."""

    scores: np.ndarray
    genuines: np.ndarray
    impostors: np.ndarray


def _bin_of(scores):
    """Of float32 scores; a higher score never has a lower bin."""
    places = ((scores + np.float32(1.0)) * np.float32(BINS / 2)).astype(np.int32)
    return np.clip(places, 0, BINS - 1)  # rounding brings cosines above 1


def _merged(kept, scores, is_genuine):
    """`kept` with more scores, each different one once."""
    both = np.concatenate([kept[:, 0], scores])
    genuine = np.concatenate([kept[:, 1], is_genuine])
    impostor = np.concatenate([kept[:, 2], ~is_genuine])
    values, places = np.unique(both, return_inverse=True)
    counts = [np.bincount(places, weights, len(values)) for weights in (genuine, impostor)]
    return np.stack([values, *counts], axis=1)


def _largest_count(bound, impostors):
    """The most pairs whose share of all impostor pairs, as a float, is within the bound."""
    count = min(int(bound * impostors) + 1, impostors)
    while count / impostors > bound:
        count -= 1
    return count
