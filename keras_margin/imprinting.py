"""Imprinting: centres of classes set to the mean direction of their samples, before any step."""

import warnings

import numpy as np
from keras import ops

from keras_margin.backend import is_concrete, read
from keras_margin.checks import check_rows
from keras_margin.class_changes import check_has_classes
from keras_margin.labels import class_ids, usable_rows
from keras_margin.numerics import l2_norm, l2_normalize

_ROWS_AT_ONCE = 2**14
_NO_DIRECTION = 1e-6  # a mean of float32 unit vectors that is shorter is made of rounding


def imprint(head, embeddings, labels):
    """Sets the centres of the classes that are present to their mean direction; others stay.

        w_k = length_k m_k / |m_k|          m_k = the mean of x / |x| over the samples of class k

    A cosine head's accuracy on new classes is then that of the nearest class mean, without a step.

    Lengths: where only directions count, a centre keeps its own, so that a step of the optimizer
    turns it as before. `SoftmaxHead` and `LSoftmax` compare lengths too: there it is the mean
    length of the classes that stay (of all, where none does), so that angles alone decide at first.

    With sub-centres the class' dominant one for these samples is set; the others stay as they are,
    for samples unlike the mean.

    Call it outside compiled code. The optimizer's slots stay.

    Args:
        head: a head with classes; one that is not built yet is built.
        embeddings: float (n, dim), any length, as the backbone gives them. It is read in blocks of
            rows.
        labels: as in the head's call. Ignored rows and rows that are not finite are left out.

    Raises:
        ValueError: a head without classes; labels that are no classes; shapes that do not fit;
            compiled code.
        TypeError: embeddings that are no array of numbers.

    Example:

    >>> head = keras_margin.NormFace(3, scale=10.0)
    >>> head.imprint([[1.0, 0.0], [0.0, 2.0], [0.0, -1.0]], [0, 0, 2])
    >>> logits = head(keras.ops.array([[3.0, 3.0]]))  # on the mean direction of class 0
    >>> round(float(logits[0, 0]), 4)
    10.0

    Reference:
        Qi et al., Low-Shot Learning with Imprinted Weights, 2018, arXiv:1712.07136, section 3.2.
    """
    check_has_classes(head)
    if isinstance(embeddings, (list, tuple)):
        embeddings = np.asarray(embeddings)
    ids = class_ids(labels, head.num_classes, head.ignore_class).ids
    check_rows(embeddings, ids, head.centers.shape[1] if head.built else None)
    if not is_concrete(ids):
        raise ValueError("`imprint` must be called outside of compiled code.")
    if not head.built:
        head.build(tuple(embeddings.shape))
    classes, means = _class_means(head, embeddings, labels)
    has_direction = np.linalg.norm(means, axis=1) > _NO_DIRECTION
    _warn_of(classes[~has_direction])
    classes, means = classes[has_direction], means[has_direction]
    if not len(classes):
        return
    rows = classes * head.num_subcenters
    if head.num_subcenters > 1:
        rows = rows + ops.convert_to_numpy(head.dominant_subcenters(embeddings, labels))[classes]
    means *= _lengths(head, classes, rows) / np.linalg.norm(means, axis=1, keepdims=True)
    moved = ops.convert_to_tensor(means, dtype=head.maths_dtype)
    places = ops.expand_dims(ops.convert_to_tensor(rows, dtype="int32"), 1)
    head.centers.assign(ops.scatter_update(read(head.centers), places, moved))


def _class_means(head, embeddings, labels):
    """The classes that have samples, int (k,), and the means of their unit vectors (k, dim)."""
    found = class_ids(labels, head.num_classes, head.ignore_class)
    ids = ops.convert_to_numpy(found.ids)
    counted = ops.convert_to_numpy(found.counted)
    classes, places = np.unique(ids[counted], return_inverse=True)
    place_of_row = np.zeros(len(ids), int)
    place_of_row[counted] = places
    sums, numbers = np.zeros((len(classes), head.centers.shape[1])), np.zeros(len(classes))
    for start in range(0, len(ids), _ROWS_AT_ONCE):
        block = slice(start, start + _ROWS_AT_ONCE)
        x = ops.cast(embeddings[block], head.maths_dtype)
        _, usable, x = usable_rows(head, x, found.ids[block])
        usable = ops.convert_to_numpy(usable) & counted[block]
        unit = ops.convert_to_numpy(l2_normalize(x)).astype("float64")
        np.add.at(sums, place_of_row[block][usable], unit[usable])
        np.add.at(numbers, place_of_row[block][usable], 1.0)
    return classes, sums / np.maximum(numbers, 1.0)[:, None]


def _lengths(head, classes, rows):
    """Of the new centres, (n, 1) or one for all."""
    if head.normalize_centers:
        own = ops.convert_to_numpy(l2_norm(ops.take(read(head.centers), rows, axis=0)))[:, None]
        return np.where((own > 0.0) & np.isfinite(own), own, 1.0)
    lengths = ops.convert_to_numpy(l2_norm(read(head.centers)))[: head.num_rows]
    others = np.delete(lengths.reshape(head.num_classes, -1), classes, axis=0)
    return np.mean(others if len(others) else lengths)


def _warn_of(classes):
    if len(classes):
        names = ", ".join(map(str, classes[:10])) + (", ..." if len(classes) > 10 else "")
        warnings.warn(
            "The centres of some classes stay as they were: their embeddings are not finite, or "
            f"have no mean direction. Received: classes {names}",
            stacklevel=3,
        )
