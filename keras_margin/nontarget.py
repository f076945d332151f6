"""What a margin softmax needs of the classes: one pass over them, with a custom gradient.

    target_i = cos(theta_iy)
    log B_i = log sum_{k != y} exp(s cos(theta_ik))         AdaCos eq. 7
    hardest_i = max_{k != y} cos(theta_ik)

Autodiff would hold several (batch, num_classes) tensors; the custom gradient needs the cosines
only. The centres are never copied normalised: 1 / |w| is kept per class.
"""

from typing import NamedTuple

import keras
from keras import ops

from keras_margin.backend import custom_gradient, read
from keras_margin.checks import check_rows, checked_count
from keras_margin.labels import class_ids
from keras_margin.numerics import computation_dtype, inverse_norms


def nontarget_logsumexp(
    embeddings,
    centers,
    labels,
    scale=1.0,
    *,
    normalize_centers=True,
    num_subcenters=1,
):
    """log of the non-target mass, and the largest non-target cosine.

        log_b_i = log sum_{k != y_i} exp(scale * <x_i, w_k> / |w_k|)

    With sub-centres a class counts with the largest of its `num_subcenters` rows.

    Args:
        embeddings: float (batch, dim), taken as they are: normalise them first for cosines.
        centers: float (num_classes * num_subcenters, dim), the rows of a class together.
        labels: integer (batch,); a label out of range gives NaN in its row.
        scale: number, scalar tensor or (batch,).
        normalize_centers: False leaves out the division by |w_k|.
        num_subcenters: rows per class.

    Returns:
        `log_b` (batch,) and `max_cosine` (batch,). Gradients flow through `log_b` into embeddings,
        centers and scale, none through `max_cosine`.

    Example:

    >>> x, w = keras.ops.eye(2), keras.ops.eye(2)
    >>> log_b, hardest = nontarget_logsumexp(x, w, keras.ops.array([0, 1]), scale=64.0)
    >>> [float(v) for v in log_b]  # one other class, at cosine 0
    [0.0, 0.0]

    Reference:
        Zhang et al., AdaCos, 2019, arXiv:1905.00292, eq. 7.
    """
    embeddings = read(embeddings)
    dtype = computation_dtype(keras.backend.standardize_dtype(embeddings.dtype))
    embeddings, centers = ops.cast(embeddings, dtype), ops.cast(read(centers), dtype)
    if centers.shape[0] % num_subcenters:
        raise ValueError(
            "`centers` must have `num_subcenters` rows for each class. Received: "
            f"centers.shape={tuple(centers.shape)}, num_subcenters={num_subcenters}"
        )
    num_classes = checked_count(
        "the number of classes", centers.shape[0] // num_subcenters, smallest=2
    )
    found = class_ids(labels, num_classes, refuse=False)
    check_rows(embeddings, found.ids, centers.shape[1])
    statistics = class_statistics(
        embeddings,
        centers,
        found.ids,
        scale,
        normalize_centers=normalize_centers,
        num_subcenters=num_subcenters,
    )
    nan = float("nan")
    return (
        ops.where(found.valid, statistics.log_b, nan),
        ops.where(found.valid, statistics.hardest, nan),
    )


class ClassStatistics(NamedTuple):
    """One entry a row of the batch, (batch,) each. Gradients flow through all but `hardest`."""

    target: object  # the target's cosine
    log_b: object  # log of the non-target mass
    total: object  # the sum of the non-target cosines, as they enter the logits
    hardest: object  # the largest non-target cosine


class Curriculum(NamedTuple):
    """CurricularFace's rule for the other classes: c becomes c (t + c) where c > threshold."""

    thresholds: object  # (batch,)
    t: object  # scalar


def class_statistics(
    embeddings,
    centers,
    labels,
    scale,
    *,
    normalize_centers=True,
    num_subcenters=1,
    curriculum=None,
):
    """`nontarget_logsumexp`, and what else the same pass can say.

    Args:
        embeddings, centers: of one dtype.
        labels: int32 (batch,), each in range.
        scale, normalize_centers, num_subcenters: as in `nontarget_logsumexp`.
        curriculum: a `Curriculum` for the non-target cosines, or None.

    Returns:
        `ClassStatistics`.
    """
    num_classes = centers.shape[0] // num_subcenters
    scale = ops.convert_to_tensor(scale, dtype=embeddings.dtype)
    scale = ops.broadcast_to(scale, ops.shape(embeddings)[:1])  # (batch,)

    @custom_gradient
    def statistics(embeddings, centers, scale):
        if normalize_centers:
            inverse = inverse_norms(centers)  # (rows,)
        else:
            inverse = ops.ones_like(centers[:, 0])
        rows = ops.matmul(embeddings, ops.transpose(centers)) * inverse  # (batch, rows)
        cosines, winners = _best_subcenters(rows, num_subcenters)  # (batch, num_classes)
        is_target = ops.expand_dims(labels, 1) == ops.arange(num_classes, dtype=labels.dtype)
        others, slopes = harden(cosines, curriculum)
        target = ops.sum(ops.where(is_target, cosines, 0.0), axis=1)
        total = ops.sum(ops.where(is_target, 0.0, others), axis=1)
        hardest = _max(ops.where(is_target, -float("inf"), cosines), axis=1)
        logits = ops.where(is_target, -float("inf"), others * ops.expand_dims(scale, 1))
        log_b = ops.logsumexp(logits, axis=1)

        def gradient(of_target, of_log_b, of_total, _):
            # d log_b / d logit_k = exp(logit_k - log_b), the share of class k in the mass.
            shares = ops.exp(logits - ops.expand_dims(log_b, 1))  # 0 for the target
            of_others = shares * ops.expand_dims(of_log_b * scale, 1)
            of_others = (of_others + ops.expand_dims(of_total, 1)) * slopes
            of_cosines = ops.where(is_target, ops.expand_dims(of_target, 1), of_others)
            of_scale = of_log_b * ops.sum(shares * others, axis=1)
            of_rows = of_cosines if winners is None else _to_rows(of_cosines, winners)
            of_embeddings = ops.matmul(of_rows * inverse, centers)
            of_centers = ops.matmul(ops.transpose(of_rows), embeddings)
            if normalize_centers:
                # d cos / d w = (x - cos w / |w|) / |w|
                along = ops.sum(of_rows * rows, axis=0)  # (rows,)
                of_centers -= centers * ops.expand_dims(along * inverse, 1)
                of_centers *= ops.expand_dims(inverse, 1)
            return of_embeddings, of_centers, of_scale

        return (target, log_b, total, hardest), gradient

    return ClassStatistics(*statistics(embeddings, centers, scale))


def harden(cosines, curriculum):
    """The cosines of the other classes as they enter the logits, and d of them / d cosine.

    Args:
        cosines: (batch, num_classes).
        curriculum: a `Curriculum`; None leaves them as they are.

    Returns:
        Two tensors (batch, num_classes); the second is the number 1.0 without a curriculum.
    """
    if curriculum is None:
        return cosines, 1.0
    is_hard = cosines > ops.expand_dims(curriculum.thresholds, 1)
    hardened = ops.where(is_hard, cosines * (curriculum.t + cosines), cosines)
    return hardened, ops.where(is_hard, curriculum.t + 2.0 * cosines, ops.ones_like(cosines))


def target_cosines(embeddings, centers, labels, *, normalize_centers=True, num_subcenters=1):
    """The target's cosine (batch,) alone, for statistics that must come before the pass.

    No gradient flows.
    """
    rows = ops.expand_dims(labels * num_subcenters, 1) + ops.arange(num_subcenters, dtype="int32")
    own = ops.stop_gradient(ops.take(centers, rows, axis=0))  # (batch, num_subcenters, dim)
    cosines = ops.einsum("bd,bkd->bk", ops.stop_gradient(embeddings), own)
    if normalize_centers:
        cosines = cosines * inverse_norms(own)
    return _max(cosines, axis=1)


def _best_subcenters(rows, num_subcenters):
    """The largest cosine of each class, and which row has it (None where a class has one row)."""
    if num_subcenters == 1:
        return rows, None
    grouped = ops.reshape(rows, (-1, rows.shape[1] // num_subcenters, num_subcenters))
    winners = ops.one_hot(ops.argmax(grouped, axis=2), num_subcenters, dtype=rows.dtype)
    return _max(grouped, axis=2), winners  # (batch, num_classes), (batch, num_classes, k)


def _max(cosines, axis):
    # `initial`: without it Keras checks at run time that there is something to compare.
    return ops.max(cosines, axis=axis, initial=-float("inf"))


def _to_rows(of_cosines, winners):
    """The gradient of a class goes to the row that won."""
    of_rows = ops.expand_dims(of_cosines, 2) * winners
    return ops.reshape(of_rows, (-1, winners.shape[1] * winners.shape[2]))
