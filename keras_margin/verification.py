"""Verification: are two samples of one identity? Curves and rates over scored pairs.

Scores are similarities and a pair is accepted when score >= threshold. FAR is the share of
impostor pairs that are accepted, TAR the share of genuine pairs that are, FRR = 1 - TAR.
"""

import numpy as np
from sklearn.metrics import roc_curve

from keras_margin.evaluation import evaluate
from keras_margin.identification import identify
from keras_margin.retrieval import check_labels, row_blocks, unit_rows
from keras_margin.score_checks import check_far, check_scores, warn_of_small, warn_undefined
from keras_margin.streamed_pairs import pair_blocks

__all__ = [
    "all_pairs",
    "equal_error_rate",
    "evaluate",
    "identify",
    "kfold_accuracy",
    "pair_scores",
    "tar_at_far",
    "threshold_at_far",
]


def pair_scores(embeddings, pairs):
    """Cosine similarity of each listed pair of embeddings.

    The protocol of lists such as LFW's: some pairs, named by the index of their two samples.

        score(i, j) = <x_i, x_j> / (|x_i| |x_j|)

    Args:
        embeddings: (samples, dim) real array, of any length: only directions count. A zero
            vector has cosine 0 with everything.
        pairs: (pairs, 2) integers in 0..samples-1.

    Returns:
        (pairs,) float32 in [-1, 1]. Summed in float64 and rounded, so that equal directions score
        exactly 1 and equal pairs tie.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> import numpy as np
        >>> from keras_margin import verification
        >>> embeddings = np.array([[1.0, 0.0], [3.0, 4.0], [0.0, -2.0]])
        >>> verification.pair_scores(embeddings, [(0, 1), (1, 2)])
        array([ 0.6, -0.8], dtype=float32)

    Reference:
        Huang, Ramesh, Berg, Learned-Miller: Labeled Faces in the Wild. 2007, UMass Amherst
        technical report 07-49.
    """
    units = unit_rows(embeddings, "embeddings")
    pairs = np.asarray(pairs)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise ValueError(
            "`pairs` must be integers of shape (pairs, 2). "
            f"Received: pairs.shape={pairs.shape}, pairs.dtype={pairs.dtype}"
        )
    outside = ((pairs < 0) | (pairs >= len(units))).any(axis=1)
    if outside.any():
        row = np.argmax(outside)
        raise ValueError(
            f"`pairs` must be indices in 0..{len(units) - 1}. "
            f"Received: pairs[{row}]={pairs[row].tolist()}"
        )
    scores = np.empty(len(pairs), np.float32)
    for rows in row_blocks(len(pairs), units.shape[1]):
        left, right = units[pairs[rows, 0]], units[pairs[rows, 1]]  # (block, dim)
        scores[rows] = np.einsum("pd,pd->p", left, right)
    return scores


def all_pairs(embeddings, labels):
    """Cosine similarity of every pair of embeddings, and whether it is genuine.

    The densest protocol: each unordered pair i < j once, row by row: (0, 1), (0, 2), ... (1, 2),
    ... as `numpy.triu_indices(samples, 1)` orders them. There are samples (samples - 1) / 2 of
    them, five bytes each.

        genuine(i, j) = [label_i == label_j]

    Args:
        embeddings: (samples, dim) real array. A zero vector has cosine 0 with everything.
        labels: (samples,) or (samples, 1) integers (whole floats mean the same).

    Returns:
        `scores`, float32 (pairs,), rounded from float64 as in `pair_scores`, and `genuine`, bool
        (pairs,).

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> import numpy as np
        >>> from keras_margin import verification
        >>> embeddings = np.array([[1.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
        >>> verification.all_pairs(embeddings, [7, 7, 2])
        (array([0.6, 0. , 0.8], dtype=float32), array([ True, False, False]))

    Reference:
        Kemelmacher-Shlizerman, Seitz, Miller, Brossard: The MegaFace Benchmark. 2016,
        arXiv:1512.00596 (there: every probe with every other face).
    """
    units = unit_rows(embeddings, "embeddings")
    labels = check_labels(labels, len(units), "labels")
    scores = np.empty(len(units) * (len(units) - 1) // 2, np.float32)
    genuine = np.empty(scores.shape, bool)
    filled = 0
    for some_scores, some_genuine in pair_blocks(units, labels):
        into = slice(filled, filled + len(some_scores))
        scores[into], genuine[into] = some_scores, some_genuine
        filled = into.stop
    return scores, genuine


def tar_at_far(scores, genuine, far):
    """True accept rate at a bound on the false accept rate.

    The largest TAR that a threshold reaches while FAR stays within the bound. A point of the
    curve, not interpolated: tied scores pass or fail together, and accepting nothing (TAR 0) is
    the point left when every other breaks the bound.

        TAR@FAR = max { TAR(t) : FAR(t) <= far }

    Args:
        scores: (pairs,) real array, the larger the more alike.
        genuine: (pairs,) bool, or 0 and 1: is the pair of one identity?
        far: A number in [0, 1], or a sequence of them.

    Returns:
        A float for a number `far`, a float64 array (len(far),) for a sequence. NaN, with an
        `UndefinedMetricWarning`, without genuine pairs, and at each `far` too small for the
        impostor pairs there are (far * impostors < 1): no threshold can show such a rate.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> from keras_margin import verification
        >>> scores = [0.9, 0.8, 0.7, 0.4, 0.6, 0.3, 0.2, 0.1]
        >>> genuine = [1, 1, 1, 1, 0, 0, 0, 0]
        >>> verification.tar_at_far(scores, genuine, 0.25)
        1.0
        >>> verification.tar_at_far(scores, genuine, [0.25, 0.5])
        array([1., 1.])

    Reference:
        Grother, Ngan, Hanaoka: Face Recognition Vendor Test, part 1: Verification. NIST, ongoing
        report (there: FNMR = 1 - TAR at FMR = FAR).
    """
    return _operating_points(scores, genuine, far)[0]


def threshold_at_far(scores, genuine, far):
    """The smallest threshold at a bound on the false accept rate.

    Thresholds are the scores themselves, so that the answer is a point that was measured: at it,
    `scores >= threshold` has FAR within the bound, and the TAR of `tar_at_far`. Between two
    scores the rates do not change. Where even the largest score breaks the bound, the answer is
    the next float above it in the dtype of `scores`, which accepts nothing.

        threshold = min { t in scores : FAR(t) <= far }

    Args:
        scores: (pairs,) real array, the larger the more alike.
        genuine: (pairs,) bool, or 0 and 1: is the pair of one identity?
        far: A number in [0, 1], or a sequence of them.

    Returns:
        A float for a number `far`, a float64 array (len(far),) for a sequence. NaN, with an
        `UndefinedMetricWarning`, where `tar_at_far` is.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> from keras_margin import verification
        >>> scores = [0.9, 0.8, 0.7, 0.4, 0.6, 0.3, 0.2, 0.1]
        >>> genuine = [1, 1, 1, 1, 0, 0, 0, 0]
        >>> verification.threshold_at_far(scores, genuine, [0.25, 0.5, 1.0])
        array([0.4, 0.3, 0.1])

    Reference:
        See `tar_at_far`.
    """
    return _operating_points(scores, genuine, far)[1]


def equal_error_rate(scores, genuine):
    """Error rate at the threshold where false accepts and false rejects are equally likely.

    With finitely many pairs the two rates rarely meet, so it is their mean at the score where they
    come closest; of two scores equally close, the larger.

        EER = (FAR(t) + FRR(t)) / 2,   t = argmin over scores of |FAR(t) - FRR(t)|

    Args:
        scores: (pairs,) real array, the larger the more alike.
        genuine: (pairs,) bool, or 0 and 1: is the pair of one identity?

    Returns:
        A float in [0, 1]. NaN, with an `UndefinedMetricWarning`, without genuine or impostor pairs.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> from keras_margin import verification
        >>> scores = [0.9, 0.8, 0.7, 0.4, 0.6, 0.3, 0.2, 0.1]
        >>> genuine = [1, 1, 1, 1, 0, 0, 0, 0]
        >>> verification.equal_error_rate(scores, genuine)
        0.25

    Reference:
        ISO/IEC 19795-1:2021, Biometric performance testing and reporting.
    """
    scores, genuine = check_scores(scores, genuine)
    genuines = np.count_nonzero(genuine)
    impostors = genuine.size - genuines
    if not genuines or not impostors:
        warn_undefined("equal_error_rate", genuines, impostors)
        return float("nan")
    fars, tars, _ = roc_points(scores, genuine)
    # Whole numbers: rates that are equally far apart must tie exactly.
    accepts = np.rint(fars * impostors).astype(np.int64)
    rejects = genuines - np.rint(tars * genuines).astype(np.int64)
    point = np.argmin(np.abs(accepts * genuines - rejects * impostors))
    return float((accepts[point] / impostors + rejects[point] / genuines) / 2)


def kfold_accuracy(scores, genuine, folds=10):
    """Accuracy of accepting and rejecting, with the threshold of the other folds.

    The protocol of LFW and of insightface's verification sets: the pairs are cut into folds in the
    order of the list, without mixing, and each fold is judged at the threshold that is best on the
    others; of equally good ones at the strictest, half way down to the next score.

        accuracy = (accepted genuine + rejected impostor pairs) / pairs

    Args:
        scores: (pairs,) real similarities, in the order of the list.
        genuine: (pairs,) booleans, or 0 and 1.
        folds: an integer from 2 to the number of pairs.

    Returns:
        mean and standard deviation (of the folds, divided by their number) of the accuracy, floats;
        NaN, with an `UndefinedMetricWarning`, without genuine or impostor pairs.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> from keras_margin import verification
        >>> verification.kfold_accuracy([0.9, 0.1, 0.8, 0.3, 0.2, 0.7], [1, 0, 1, 0, 1, 0], folds=3)
        (0.6666666666666666, 0.4714045207910317)

    Reference:
        Huang, Ramesh, Berg, Learned-Miller: Labeled Faces in the Wild. 2007, UMass Amherst
        technical report 07-49.
    """
    scores, genuine = check_scores(scores, genuine)
    if isinstance(folds, bool) or not isinstance(folds, (int, np.integer)):
        raise TypeError(f"`folds` must be an integer. Received: folds={folds!r}")
    if not 2 <= folds <= len(scores):
        raise ValueError(
            f"`folds` must be from 2 to the number of pairs, {len(scores)}. Received: folds={folds}"
        )
    genuines = int(np.count_nonzero(genuine))
    if genuines in (0, len(scores)):
        warn_undefined("kfold_accuracy", genuines, len(scores) - genuines)
        return float("nan"), float("nan")
    accuracies = []
    for fold in np.array_split(np.arange(len(scores)), folds):
        others = np.ones(len(scores), bool)
        others[fold] = False
        threshold = _best_threshold(scores[others].astype(np.float64), genuine[others])
        accuracies.append(np.mean((scores[fold] >= threshold) == genuine[fold]))
    return float(np.mean(accuracies)), float(np.std(accuracies))


def _best_threshold(scores, genuine):
    """Where most pairs are right; half way between two scores, so that neither is on it."""
    values, places = np.unique(scores, return_inverse=True)
    # What one more accepted score gains, from the highest down; accepting nothing gains 0.
    gains = np.bincount(places, np.where(genuine, 1, -1), len(values))[::-1]
    accepted = int(np.argmax(np.append(0, np.cumsum(gains))))  # how many different scores
    bounds = np.concatenate([[np.inf], values[::-1], [-np.inf]])
    return (bounds[accepted] + bounds[accepted + 1]) / 2


def roc_points(scores, genuine):
    """FAR, TAR and threshold of every operating point, from the strictest to the loosest."""
    # The points that scikit-learn drops by default are operating points too.
    return roc_curve(genuine, scores.astype(np.float64), drop_intermediate=False)


def _operating_points(scores, genuine, far):
    """TAR and threshold of the loosest operating point within each `far`."""
    scores, genuine = check_scores(scores, genuine)
    bounds = check_far(far)
    tar, threshold = np.full((2, *bounds.shape), np.nan)
    genuines = np.count_nonzero(genuine)
    impostors = genuine.size - genuines
    if not genuines or not impostors:
        warn_undefined("An operating point", genuines, impostors, stacklevel=4)
    else:
        fars, tars, thresholds = roc_points(scores, genuine)
        # The curve starts at an infinite threshold; the next float accepts as little. In the dtype
        # of the scores, where a finer float would be rounded back to the score.
        thresholds[0] = np.nextafter(scores.max(), scores.dtype.type(np.inf))
        # 1 / impostors, like the rates of the curve, is rounded once; far * impostors twice.
        shown = bounds >= 1 / impostors
        point = np.searchsorted(fars, bounds, side="right") - 1
        tar = np.where(shown, tars[point], np.nan)
        threshold = np.where(shown, thresholds[point], np.nan)
        warn_of_small(bounds[~shown], impostors, stacklevel=4)
    return (tar, threshold) if bounds.ndim else (float(tar), float(threshold))
