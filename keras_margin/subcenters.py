"""Sub-centres at work: where a class lives, which samples lie far from there, one centre again."""

import math

import numpy as np
from keras import ops

from keras_margin.backend import read
from keras_margin.checks import check_rows, is_number
from keras_margin.class_changes import check_has_centers, remade
from keras_margin.labels import class_ids, usable_rows
from keras_margin.numerics import l2_norm, l2_normalize

_ROWS_AT_ONCE = 2**14  # the centres of their classes must fit the memory


def dominant_subcenters(head, embeddings, labels):
    """The sub-centre of each class that is the best of its own for most of its samples.

    The head's own products decide: cosines, but for `SoftmaxHead`, where lengths count too.

    Args:
        head: a built head.
        embeddings: float (n, dim), of the whole training set, any length.
        labels: as in the head's call; ignored rows do not count.

    Returns:
        int32 (num_classes,), in 0..num_subcenters-1; 0 for a class without samples, and the first
        of equally frequent ones.
    """
    check_has_centers(head)
    centers = read(head.centers)[: head.num_classes * head.num_subcenters]
    if head.normalize_centers:
        centers = l2_normalize(centers)
    centers = ops.reshape(centers, (head.num_classes, head.num_subcenters, -1))

    def nearest_of(embeddings, ids):
        own = ops.take(centers, ids, axis=0)  # (rows, num_subcenters, dim)
        return ops.argmax(ops.einsum("nd,nkd->nk", head._directions(embeddings), own), axis=1)

    nearest, found, usable = _of_rows(nearest_of, head, embeddings, labels)
    nearest = ops.one_hot(nearest, head.num_subcenters)  # (n, k)
    wins = ops.where(ops.expand_dims(usable, 1), nearest, 0.0)
    wins = ops.segment_sum(wins, found.ids, num_segments=head.num_classes)  # (num_classes, k)
    return ops.cast(ops.argmax(wins, axis=1), "int32")


def outliers(head, embeddings, labels, max_angle):
    """Samples that lie further than `max_angle` from their class' dominant sub-centre.

    Sub-center ArcFace drops them, since most have a wrong label, and trains again with one centre.

    Args:
        head: as in `dominant_subcenters`.
        embeddings: as in `dominant_subcenters`.
        labels: as in `dominant_subcenters`.
        max_angle: radians, 0 to pi; the paper drops beyond 75 degrees, math.radians(75).

    Returns:
        bool (n,); False for ignored rows, True where the embedding is not finite.

    Raises:
        ValueError: `max_angle` is no angle in radians.
    """
    if not is_number(max_angle) or not 0.0 <= max_angle <= math.pi:
        raise ValueError(
            "`max_angle` must be in radians, from 0 to pi; for degrees use math.radians. "
            f"Received: max_angle={max_angle!r}"
        )
    dominant = dominant_subcenters(head, embeddings, labels)
    rows = ops.arange(head.num_classes, dtype="int32") * head.num_subcenters + dominant
    centers = l2_normalize(ops.take(read(head.centers), rows, axis=0))  # (num_classes, dim)

    def angle_of(embeddings, ids):
        # Twice the half angle: exact near 0, where arccos is not.
        unit, own = l2_normalize(embeddings), ops.take(centers, ids, axis=0)
        return 2.0 * ops.arctan2(l2_norm(unit - own), l2_norm(unit + own))

    angles, found, usable = _of_rows(angle_of, head, embeddings, labels)
    is_near = ops.logical_and(angles <= float(max_angle), usable)
    return ops.logical_and(ops.logical_not(is_near), found.counted)


def collapsed(head, dominant):
    """A new head of the same kind and settings with one centre per class: the dominant one.

    Args:
        head: a built head.
        dominant: integer (num_classes,), from `dominant_subcenters`.

    Returns:
        A built head; scale, counters and statistics go on from the old one's. Its initializer is
        the default: the old one may know the old number of centres alone.

    Raises:
        ValueError: `dominant` does not name one sub-centre for each class.
    """
    check_has_centers(head)
    dominant = ops.convert_to_numpy(dominant)
    is_one = dominant.shape == (head.num_classes,) and dominant.dtype.kind in "iu"
    if not is_one or dominant.min() < 0 or dominant.max() >= head.num_subcenters:
        raise ValueError(
            "`dominant` must name a sub-centre for each class: integers from 0 to "
            f"{head.num_subcenters - 1}, shape ({head.num_classes},). Received: "
            f"dominant.shape={dominant.shape}, dominant.dtype={dominant.dtype}"
        )
    rows = np.arange(head.num_classes) * head.num_subcenters + dominant
    return remade(head, rows, num_subcenters=1)


def _of_rows(measure, head, embeddings, labels):
    """`measure(embeddings, ids)` of every row, the `ClassIds`, and the rows that can be used.

    It goes over the rows in blocks: a training set's own centres would be a multiple of it.
    """
    if isinstance(embeddings, (list, tuple)):
        embeddings = np.asarray(embeddings)
    found = class_ids(labels, head.num_classes, head.ignore_class)
    check_rows(embeddings, found.ids, head.centers.shape[1])
    rows = embeddings.shape[0]  # None where compiled code does not know it
    starts = range(0, rows, _ROWS_AT_ONCE) if rows else ()
    blocks = [slice(start, start + _ROWS_AT_ONCE) for start in starts] or [slice(None)]
    values, finite = [], []
    for block in blocks:
        x = ops.cast(embeddings[block], head.maths_dtype)
        _, is_usable, x = usable_rows(head, x, found.ids[block])
        values.append(measure(x, found.ids[block]))
        finite.append(is_usable)
    usable = ops.concatenate(finite) & found.counted & found.valid
    return ops.concatenate(values), found, usable
