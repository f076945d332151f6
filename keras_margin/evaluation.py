"""Verification and identification figures of a labelled set, from all its pairs."""

import numpy as np

from keras_margin.bootstrap import Resamples, interval
from keras_margin.checks import checked_count, checked_seed, is_number
from keras_margin.progress import Progress
from keras_margin.retrieval import check_labels, first_ranks, row_blocks, unit_rows, warn_unanswered
from keras_margin.score_checks import check_named_far, warn_of_small, warn_undefined
from keras_margin.streamed_pairs import OperatingPoints, pair_blocks


def evaluate(
    embeddings,
    labels,
    far=(1e-1, 1e-2, 1e-3),
    *,
    block_size=None,
    confidence=None,
    seed=None,
    verbose=0,
):
    """Verification and identification figures of a labelled set, in one dictionary.

    Every pair of the set is scored by cosine, and every sample is looked up among the others, block
    by block: memory does not grow with the pairs, and the numbers are those of the functions of
    arrays on `all_pairs`, ties included.

        eer = equal_error_rate,  tar@far=F = tar_at_far,  rank1 = recall_at_k with k = 1

    With `confidence`, an interval for each: a thousand sets of as many identities, drawn from these
    with replacement, are judged in place of this one, and the interval spans the middle of what
    comes out. A pair of two identities counts as often as both were drawn; of rank 1 the samples
    that are looked up are drawn, those that they are looked up among stay. It says how far the
    numbers would move with other people of the same kind; few people (under about thirty) make it
    too narrow, and an error that never occurred has the interval (0, 0). On 10^8 pairs it takes
    minutes.

    Args:
        embeddings: (samples, dim) real array.
        labels: (samples,) or (samples, 1) integers (whole floats mean the same).
        far: A number in [0, 1], or a sequence of them. The default runs from a rate that a few
            classes can show to the loosest one that face benchmarks quote.
        block_size: Samples whose cosines with all others are held at once; None: as many as make
            32 MB.
        confidence: Of the intervals, as 0.95; None: no intervals.
        seed: Of the draws of identities, an integer; None: other ones each time.
        verbose: 0 is silent, 1 shows a progress bar.

    Returns:
        dict of Python numbers: `eer`; `tar@far=0.1` and so on, one for each `far`, written as
        `f"{far:g}"`; `rank1`; `genuine_pairs` and `impostor_pairs`, the counts behind them; with
        `confidence` also `eer_interval` and so on, a pair (low, high) each. What is undefined is
        NaN, with an `UndefinedMetricWarning`.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> import numpy as np
        >>> from keras_margin import verification
        >>> embeddings = np.array([[1.0, 0.0], [0.9, 0.1], [0.1, 0.9], [0.0, 1.0]])
        >>> verification.evaluate(embeddings, [0, 0, 1, 1], far=0.25)
        {'eer': 0.0, 'tar@far=0.25': 1.0, 'rank1': 1.0, 'genuine_pairs': 2, 'impostor_pairs': 4}

    Reference:
        See `tar_at_far`, `equal_error_rate` and `keras_margin.retrieval.recall_at_k`. Intervals:
        Fogliato, Patil, Perona: Confidence Intervals for Error Rates in 1:1 Matching Tasks. 2024,
        arXiv:2306.01198 (there: vertex bootstrap).
    """
    fars = check_named_far(far)
    units = unit_rows(embeddings, "embeddings")
    labels = check_labels(labels, len(units), "labels")
    if block_size is not None:
        block_size = checked_count("block_size", block_size, smallest=1)
    if confidence is not None and not (is_number(confidence) and 0 < confidence < 1):
        raise ValueError(
            f"`confidence` must be a number between 0 and 1. Received: confidence={confidence!r}"
        )
    seed = checked_seed(seed)
    blocks = row_blocks(len(units), len(units), block_size)

    progress = Progress(3, len(units), verbose)
    points = OperatingPoints(lambda: pair_blocks(units, labels, progress(blocks)))
    report = _verification(points, fars)
    queries, ranks = first_ranks(embeddings, labels, blocks=progress(blocks))
    if not len(ranks):
        warn_unanswered("rank1")
    report["rank1"] = float(np.mean(ranks == 0)) if len(ranks) else float("nan")
    progress.end()
    counts = {"genuine_pairs": points.genuines, "impostor_pairs": points.impostors}
    if confidence is None:
        return {**report, **counts}
    progress = Progress(1, len(units), verbose)
    resamples = Resamples(labels, seed)
    resampled = [
        *resamples.rates(units, points, fars, progress(blocks)),
        resamples.means(queries, ranks == 0),
    ]
    intervals = {
        f"{name}_interval": interval(name, values, confidence)
        for name, values in zip(report, resampled, strict=True)
    }
    return {**report, **intervals, **counts}


def _verification(points, fars):
    """EER and the TAR at each FAR: {name: float}."""
    eer, tars = float("nan"), np.full(len(fars), np.nan)
    if not points.genuines or not points.impostors:
        warn_undefined("evaluate", points.genuines, points.impostors, stacklevel=4)
    else:
        shown = fars >= 1 / points.impostors
        points.look_closer(fars[shown])
        tars[shown] = points.accepts(fars[shown]) / points.genuines
        warn_of_small(fars[~shown], points.impostors, stacklevel=4)
        accepts, rejects = points.equal_error()
        eer = (accepts / points.impostors + rejects / points.genuines) / 2
    named = {f"tar@far={far:g}": float(tar) for far, tar in zip(fars, tars, strict=True)}
    return {"eer": eer, **named}
