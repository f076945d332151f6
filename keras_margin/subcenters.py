"""Sub-centres at work: where a class lives, which samples lie far from there, one centre again."""

import math

from keras import ops

from keras_margin.backend import read
from keras_margin.labels import usable_rows
from keras_margin.numerics import angle_of, l2_normalize


def dominant_subcenters(head, embeddings, labels):
    """The sub-centre of each class that is the nearest to most of its samples.

    Args:
        head: a built head.
        embeddings: float (n, dim), of the whole training set, any length.
        labels: as in the head's call; ignored rows do not count.

    Returns:
        int32 (num_classes,), in 0..num_subcenters-1; 0 for a class without samples, and the first
        of equally frequent ones.
    """
    cosines, found, usable = _own_cosines(head, embeddings, labels)
    nearest = ops.one_hot(ops.argmax(cosines, axis=1), head.num_subcenters)  # (n, k)
    wins = ops.where(ops.expand_dims(usable, 1), nearest, 0.0)
    wins = ops.segment_sum(wins, found.ids, num_segments=head.num_classes)  # (num_classes, k)
    return ops.cast(ops.argmax(wins, axis=1), "int32")


def outliers(head, embeddings, labels, max_angle):
    """Samples that lie further than `max_angle` from their class' dominant sub-centre.

    Sub-center ArcFace drops them, since most have a wrong label, and trains again with one centre.

    Args:
        head, embeddings, labels: as in `dominant_subcenters`.
        max_angle: radians, 0 to pi; the paper drops beyond 75 degrees, math.radians(75).

    Returns:
        bool (n,); False for ignored rows, True where the embedding is not finite.

    Raises:
        ValueError: `max_angle` is no angle in radians.
    """
    if not 0.0 <= max_angle <= math.pi:
        raise ValueError(
            "`max_angle` must be in radians, from 0 to pi; for degrees use math.radians. "
            f"Received: max_angle={max_angle!r}"
        )
    cosines, found, usable = _own_cosines(head, embeddings, labels)
    dominant = ops.take(dominant_subcenters(head, embeddings, labels), found.ids)  # (n,)
    cosine = ops.squeeze(ops.take_along_axis(cosines, ops.expand_dims(dominant, 1), axis=1), 1)
    is_near = ops.logical_and(angle_of(cosine) <= max_angle, usable)
    return ops.logical_and(ops.logical_not(is_near), found.counted)


def collapsed(head, dominant):
    """A new head of the same kind and settings with one centre per class: the dominant one.

    Args:
        head: a built head.
        dominant: integer (num_classes,), from `dominant_subcenters`.

    Returns:
        A built head; scale, counters and statistics go on from the old one's.

    Raises:
        ValueError: `dominant` does not name one sub-centre for each class.
    """
    dominant = ops.convert_to_numpy(dominant)
    is_one = dominant.shape == (head.num_classes,) and dominant.dtype.kind in "iu"
    if not is_one or dominant.min() < 0 or dominant.max() >= head.num_subcenters:
        raise ValueError(
            "`dominant` must name a sub-centre for each class: integers from 0 to "
            f"{head.num_subcenters - 1}, shape ({head.num_classes},). Received: "
            f"dominant.shape={dominant.shape}, dominant.dtype={dominant.dtype}"
        )
    new = type(head).from_config({**head.get_config(), "num_subcenters": 1})
    new.build((None, head.centers.shape[1]))
    grouped = ops.convert_to_numpy(head.centers).reshape(head.num_classes, head.num_subcenters, -1)
    for old_variable, new_variable in zip(head.variables, new.variables, strict=True):
        if new_variable is new.centers:
            new_variable.assign(grouped[range(head.num_classes), dominant])
        else:
            new_variable.assign(old_variable)
    return new


def _own_cosines(head, embeddings, labels):
    """Cosines with the sub-centres of the own class, (n, num_subcenters), the `ClassIds`, and the

    rows that have a class and a finite embedding.
    """
    if not head.built:
        raise ValueError(
            "The head has no centres yet: train it first. "
            f"Received: head={head.name!r}, which is not built"
        )
    embeddings = ops.cast(embeddings, head.maths_dtype)
    found, usable, embeddings = usable_rows(head, embeddings, labels)
    unit = l2_normalize(embeddings)
    centers = l2_normalize(read(head.centers))
    centers = ops.reshape(centers, (head.num_classes, head.num_subcenters, -1))
    own = ops.take(centers, found.ids, axis=0)  # (n, num_subcenters, dim)
    return ops.einsum("nd,nkd->nk", unit, own), found, usable
