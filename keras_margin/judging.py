"""Judges embeddings of a test set: the figures, the thresholds, and the pairs to look at."""

import os
import warnings
from typing import NamedTuple

import numpy as np

from keras_margin import verification
from keras_margin.datasets import identity_folder, read_pairs_txt, read_verification_bin
from keras_margin.retrieval import check_labels, map_at_r, r_precision, unit_rows
from keras_margin.score_checks import check_named_far
from keras_margin.streamed_pairs import OperatingPoints, pair_blocks

DRAWN = 2_000_000  # pairs of either kind in the pictures; more show no more
HARDEST = 6  # pairs of either kind to look at
CONFIDENCE = 0.95  # of the intervals


class TestSet(NamedTuple):
    """Images, and what is known of them: labels, or a list of pairs.

    Attributes:
        kind: "identity folder", "verification set" or "list of pairs".
        images: list of paths, or of the bytes of encoded images.
        labels: (images,) identities, or None.
        pairs: (pairs, 2) indices of images, or None: all of them.
        genuine: (pairs,) bool, or None.
        folds: for the accuracy of a list, or None.
    """

    __test__ = False  # not pytest's

    kind: str
    images: list
    labels: np.ndarray | None = None
    pairs: np.ndarray | None = None
    genuine: np.ndarray | None = None
    folds: int | None = None


class Judgement(NamedTuple):
    """What is said of a set.

    Attributes:
        figures: {name: float}, as `verification.evaluate` names them, and {name + "_interval":
            (low, high)} where there are some. NaN: undefined.
        thresholds: {false accept rate: cosine}. NaN: undefined.
        genuine_pairs, impostor_pairs: how many there are.
        scores, genuine: of the pairs that were drawn for pictures: all, or a random part of a kind.
        hardest: {"impostor", "genuine"}: lists of (score, i, j), the highest impostor pairs and the
            lowest genuine ones.
    """

    figures: dict
    thresholds: dict
    genuine_pairs: int
    impostor_pairs: int
    scores: np.ndarray
    genuine: np.ndarray
    hardest: dict


def read_test_set(path, pairs=None, folds=None):
    """Reads a set to judge an encoder on.

    Args:
        path: insightface's `.bin` file, or a folder that has a folder for each identity.
        pairs: a list in the form of LFW's `pairs.txt` of images in the folder; None: all pairs.
        folds: for the accuracy of a list; None: as many as the list names, or 10.

    Returns:
        `TestSet`.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file has another form; `pairs` or `folds` where they have no meaning.

    Example:

    >>> import pathlib, tempfile
    >>> from keras_margin.judging import read_test_set
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for file in ("Ann/1.jpg", "Ann/2.jpg", "Bo/1.jpg"):
    ...         image = pathlib.Path(folder, file)
    ...         image.parent.mkdir(exist_ok=True)
    ...         image.touch()
    ...     found = read_test_set(folder)
    >>> found.kind, found.labels.tolist()
    ('identity folder', [0, 0, 1])
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"There is no such file or folder. Received: path={path!r}")
    if os.path.isdir(path) and pairs is None:
        if folds is not None:
            raise ValueError(
                "`folds` is for lists of pairs, a .bin file or `pairs`; of an identity folder all "
                f"pairs are judged. Received: folds={folds!r}"
            )
        paths, labels, _ = identity_folder(path)
        return TestSet("identity folder", paths, labels=labels)
    if os.path.isdir(path):
        listed = read_pairs_txt(pairs, path)
        kind, images = "list of pairs", listed.paths
        default = listed.folds if listed.folds > 1 else 10
    elif pairs is None:
        listed = read_verification_bin(path)
        kind, images, default = "verification set", listed.images, 10
    else:
        raise ValueError(
            "`pairs` names images in a folder; a .bin file has its own pairs. Received: "
            f"path={path!r}, pairs={os.fspath(pairs)!r}"
        )
    folds = default if folds is None else folds
    if not 2 <= folds <= len(listed.pairs):
        raise ValueError(
            f"`folds` must be from 2 to the number of pairs, {len(listed.pairs)}. "
            f"Received: folds={folds}"
        )
    return TestSet(kind, images, pairs=listed.pairs, genuine=listed.genuine, folds=folds)


def judge(embeddings, test_set, far=(1e-1, 1e-2, 1e-3), *, intervals=True, seed=0, verbose=0):
    """All figures of a set: of a list of pairs as it is published, of identities with rankings.

    A list: `verification.kfold_accuracy` as `accuracy` and `accuracy_std`, `eer` and `tar@far=F`.
    Identities: all of `verification.evaluate`, with intervals of 95 %, `retrieval.r_precision` and
    `retrieval.map_at_r`.

    Args:
        embeddings: (images, dim), in the order of `test_set.images`.
        test_set: `TestSet`.
        far: false accept rates.
        intervals: whether identities get them; on 10^8 pairs they take most of the time.
        seed: of what is drawn at random.
        verbose: 0 is silent, 1 shows how far it is, 2 says so at the end.

    Returns:
        `Judgement`. What is undefined is NaN, with an `UndefinedMetricWarning`. Embeddings that
        are nothing but zeros are warned of.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:

    >>> import numpy as np
    >>> from keras_margin.judging import TestSet, judge
    >>> embeddings = np.array([[1.0, 0.0], [0.9, 0.1], [0.1, 0.9], [0.0, 1.0]])
    >>> pairs = np.array([[0, 1], [0, 2], [2, 3], [1, 3]])
    >>> genuine = np.array([True, False, True, False])
    >>> test_set = TestSet("list of pairs", list("abcd"), pairs=pairs, genuine=genuine, folds=2)
    >>> judged = judge(embeddings, test_set, far=0.5)
    >>> judged.figures
    {'accuracy': 1.0, 'accuracy_std': 0.0, 'eer': 0.0, 'tar@far=0.5': 1.0}
    """
    fars = check_named_far(far)
    if test_set.labels is None:
        figures, thresholds, blocks = _of_list(embeddings, test_set, fars)
        genuines = int(np.count_nonzero(test_set.genuine))
        impostors = len(test_set.genuine) - genuines
        pairs_at = test_set.pairs.__getitem__
    else:
        figures, thresholds, blocks = _of_identities(
            embeddings, test_set.labels, fars, intervals, seed, verbose
        )
        genuines, impostors = figures.pop("genuine_pairs"), figures.pop("impostor_pairs")

        def pairs_at(places):
            return pairs_in_order(places, len(embeddings))

    _warn_of_zeros(embeddings)
    drawn, found = _looked_at(blocks(), genuines, impostors, np.random.default_rng(seed))
    hardest = {
        kind: [(float(score), *map(int, pair)) for score, pair in zip(scores, pairs, strict=True)]
        for kind, (scores, places) in found.items()
        for pairs in [pairs_at(places)]
    }
    named = dict(zip(fars.tolist(), thresholds.tolist(), strict=True))
    return Judgement(figures, named, genuines, impostors, *drawn, hardest)


def _warn_of_zeros(embeddings):
    zeros = np.count_nonzero(~np.any(embeddings, axis=1))
    if zeros:
        warnings.warn(
            f"{zeros} of {len(embeddings)} embeddings are nothing but zeros: their cosine with "
            "everything counts as 0. Does the encoder work, on these pixels?",
            stacklevel=3,
        )


def pairs_in_order(places, samples):
    """(i, j) at some places of the order of `verification.all_pairs`: (places, 2)."""
    starts = np.append(0, np.cumsum(np.arange(samples - 1, 0, -1)))  # of the pairs (i, i + 1)
    first = np.searchsorted(starts, places, side="right") - 1
    return np.stack([first, places - starts[first] + first + 1], axis=-1)


def _of_list(embeddings, test_set, fars):
    genuine = test_set.genuine
    scores = verification.pair_scores(embeddings, test_set.pairs)
    mean, deviation = verification.kfold_accuracy(scores, genuine, test_set.folds)
    tars = verification.tar_at_far(scores, genuine, fars)
    figures = {
        "accuracy": mean,
        "accuracy_std": deviation,
        "eer": verification.equal_error_rate(scores, genuine),
        **{f"tar@far={far:g}": float(tar) for far, tar in zip(fars, tars, strict=True)},
    }
    thresholds = verification.threshold_at_far(scores, genuine, fars)
    return figures, thresholds, lambda: [(scores, genuine)]


def _of_identities(embeddings, labels, fars, intervals, seed, verbose):
    units = unit_rows(embeddings, "embeddings")
    labels = check_labels(labels, len(units), "labels")
    _, each = np.unique(labels, return_counts=True)
    has_both = len(each) > 1 and each.max() > 1  # kinds of pairs: no interval without
    figures = verification.evaluate(
        *(embeddings, labels, fars),
        confidence=CONFIDENCE if intervals and has_both else None,
        seed=seed,
        verbose=verbose,
    )
    figures["r_precision"] = r_precision(embeddings, labels)
    figures["map_at_r"] = map_at_r(embeddings, labels)

    def blocks():
        return pair_blocks(units, labels)

    thresholds = np.full(len(fars), np.nan)
    if has_both:
        shown = fars >= 1 / figures["impostor_pairs"]
        thresholds[shown] = OperatingPoints(blocks).thresholds(fars[shown])
    return figures, thresholds, blocks


def _looked_at(blocks, genuines, impostors, rng):
    """One pass over all pairs: those for the pictures, and the hardest.

    Returns:
        (scores, genuine) of the drawn pairs, and {"impostor", "genuine"}: (scores, places) of the
        hardest, in the order of the pairs where they tie.
    """
    counts = {"impostor": impostors, "genuine": genuines}
    drawn = {kind: [np.zeros(0, np.float32)] for kind in counts}
    hardest = {kind: (np.zeros(0, np.float32), np.zeros(0, np.int64)) for kind in counts}
    passed = 0
    for scores, is_genuine in blocks:
        for kind, rows in (("impostor", ~is_genuine), ("genuine", is_genuine)):
            places = np.flatnonzero(rows)
            own = scores[places]
            sign = -1 if kind == "impostor" else 1  # the highest impostors, the lowest genuine
            best = _lowest(sign * own)
            known, known_places = hardest[kind]
            both = np.append(known, own[best])
            both_places = np.append(known_places, passed + places[best])
            order = np.argsort(sign * both, kind="stable")[:HARDEST]
            hardest[kind] = both[order], both_places[order]
            if counts[kind] > DRAWN:
                own = own[rng.random(len(own)) < DRAWN / counts[kind]]
            drawn[kind].append(own)
        passed += len(scores)
    parts = [np.concatenate(drawn[kind]) for kind in ("genuine", "impostor")]
    genuine = np.arange(len(parts[0]) + len(parts[1])) < len(parts[0])
    return (np.concatenate(parts), genuine), hardest


def _lowest(scores):
    """Where the lowest `HARDEST` scores are, and all that tie with the last of them, in order."""
    if len(scores) <= HARDEST:
        return np.arange(len(scores))
    return np.flatnonzero(scores <= np.partition(scores, HARDEST - 1)[HARDEST - 1])
