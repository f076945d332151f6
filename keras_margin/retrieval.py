"""Retrieval: how often the nearest neighbours of an embedding share its label."""

import warnings

import numpy as np
from sklearn.exceptions import UndefinedMetricWarning

__all__ = ["map_at_r", "r_precision", "recall_at_k"]

# Cosines held at once: 32 MB of float64.
BLOCK_SIZE = 2**22


def recall_at_k(embeddings, labels, k, reference=None, reference_labels=None):
    """Share of queries with an item of their own class among the k nearest.

    Every row of `embeddings` is a query. Its neighbours are the rows of `reference`, or all the
    other rows of `embeddings` where no reference set is given, in order of falling cosine; equal
    cosines come in order of index. A query that no neighbour can answer (nothing else has its
    label) says nothing about the embedding and is left out of the mean.

        recall@k = mean over queries of [rank of the first relevant neighbour <= k]

    Cosines are summed in float64 and rounded to float32, so that equal directions tie whatever
    the order of the sum. They are held for a block of queries at a time, never for all.

    Args:
        embeddings: (queries, dim) real array. A zero vector has cosine 0 with everything.
        labels: (queries,) or (queries, 1) integers (whole floats mean the same).
        k: An integer of at least 1, or a sequence of them. A `k` beyond the number of neighbours
            means all of them.
        reference: (references, dim) real array, or None to leave each query out of the others.
        reference_labels: (references,) integers; goes with `reference`.

    Returns:
        A float for a number `k`, a float64 array (len(k),) for a sequence. NaN, with an
        `UndefinedMetricWarning`, where no query can be answered.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> import numpy as np
        >>> from keras_margin import retrieval
        >>> embeddings = np.array([[1.0, 0.0], [0.9, 0.1], [0.8, 0.3], [0.0, 1.0]])
        >>> retrieval.recall_at_k(embeddings, [0, 0, 1, 1], k=1)
        0.75
        >>> retrieval.recall_at_k(embeddings, [0, 0, 1, 1], k=[1, 3])
        array([0.75, 1.  ])

    Reference:
        Oh Song, Xiang, Jegelka, Savarese: Deep Metric Learning via Lifted Structured Feature
        Embedding. 2016, arXiv:1511.06452.
    """
    ks = _check_k(k)
    _, ranks = first_ranks(embeddings, labels, reference, reference_labels)
    if ranks.size == 0:
        warn_unanswered("recall_at_k")
        recalls = np.full(ks.shape, np.nan)
    else:
        recalls = np.mean(ranks[:, None] < ks.reshape(-1), axis=0).reshape(ks.shape)
    return recalls if ks.ndim else float(recalls)


def r_precision(embeddings, labels, reference=None, reference_labels=None):
    """Share of relevant items among the R nearest, R being how many are relevant to the query.

        R-precision = mean over queries of (relevant among the R nearest) / R

    Args:
        embeddings: as of `recall_at_k`.
        labels: as of `recall_at_k`.
        reference: as of `recall_at_k`.
        reference_labels: as of `recall_at_k`.

    Returns:
        A float; NaN, with an `UndefinedMetricWarning`, where no query can be answered.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> import numpy as np
        >>> from keras_margin import retrieval
        >>> embeddings = np.array([[1.0, 0.0], [0.9, 0.1], [0.8, 0.3], [0.0, 1.0]])
        >>> retrieval.r_precision(embeddings, [0, 0, 1, 1])
        0.75

    Reference:
        Musgrave, Belongie, Lim: A Metric Learning Reality Check. 2020, arXiv:2003.08505, section
        3.2.
    """
    sets = embeddings, labels, reference, reference_labels
    return _mean_over_queries("r_precision", sets, lambda hits: hits)


def map_at_r(embeddings, labels, reference=None, reference_labels=None):
    """Mean average precision over the R nearest, R being how many are relevant to the query.

        MAP@R = mean over queries of 1/R sum_{i <= R} [i-th is relevant] precision at i

    Args:
        embeddings: as of `recall_at_k`.
        labels: as of `recall_at_k`.
        reference: as of `recall_at_k`.
        reference_labels: as of `recall_at_k`.

    Returns:
        A float; NaN, with an `UndefinedMetricWarning`, where no query can be answered.

    Raises:
        ValueError: shapes, types or values that do not fit.

    Example:
        >>> import numpy as np
        >>> from keras_margin import retrieval
        >>> reference = np.array([[1.0, 0.0], [0.9, 0.1], [0.8, 0.3]])
        >>> retrieval.map_at_r([[1.0, 0.0]], [1], reference, [0, 1, 1])  # (1/2) / 2
        0.25

    Reference:
        Musgrave, Belongie, Lim: A Metric Learning Reality Check. 2020, arXiv:2003.08505, section
        3.2.
    """

    def precision_at_hits(hits):
        return hits * np.cumsum(hits, axis=1) / np.arange(1, hits.shape[1] + 1)

    sets = embeddings, labels, reference, reference_labels
    return _mean_over_queries("map_at_r", sets, precision_at_hits)


def first_ranks(embeddings, labels, reference=None, reference_labels=None, blocks=None):
    """How many neighbours stand before the nearest relevant one.

    Args:
        embeddings, labels, reference, reference_labels: as of `recall_at_k`.
        blocks: slices of queries; None: as `row_blocks` cuts them.

    Returns:
        queries: (answered,) those that can be answered, rising.
        ranks: (answered,) from 0 on.
    """
    queries, ranks = [np.empty(0, int)], [np.empty(0, int)]
    sets = embeddings, labels, reference, reference_labels
    for answered, cosines, relevant in _answered(*sets, blocks):
        # The rank needs no sort: count what stands before the nearest relevant neighbour.
        index = np.arange(cosines.shape[1])
        first = np.argmax(np.where(relevant, cosines, -np.inf), axis=1)[:, None]  # (block, 1)
        nearest = np.take_along_axis(cosines, first, axis=1)
        ahead = (cosines > nearest) | ((cosines == nearest) & (index < first))
        queries.append(answered)
        ranks.append(ahead.sum(axis=1))
    return np.concatenate(queries), np.concatenate(ranks)


def _mean_over_queries(name, sets, value_of):
    """The mean of sum(value_of(hits)) / R over the queries that can be answered.

    `hits`: bool (queries, neighbours), whether the i-th nearest is relevant, False behind R.
    """
    values = [np.empty(0)]
    for _, cosines, relevant in _answered(*sets):
        order = np.argsort(-cosines, axis=1, kind="stable")
        number = relevant.sum(axis=1)  # R
        hits = np.take_along_axis(relevant, order, axis=1)
        hits &= np.arange(hits.shape[1]) < number[:, None]
        values.append(value_of(hits).sum(axis=1) / number)
    values = np.concatenate(values)
    if values.size == 0:
        warn_unanswered(name, stacklevel=4)
        return float("nan")
    return float(values.mean())


def _answered(embeddings, labels, reference, reference_labels, blocks=None):
    """Queries that have an answer, their cosines and relevance, (block, references) each."""
    queries = unit_rows(embeddings, "embeddings")
    labels = check_labels(labels, len(queries), "labels")
    if (reference is None) != (reference_labels is None):
        raise ValueError(
            "`reference` and `reference_labels` must be given together. Received: "
            f"reference is None: {reference is None}, "
            f"reference_labels is None: {reference_labels is None}"
        )
    leave_one_out = reference is None
    if leave_one_out:
        references, reference_labels = queries, labels
    else:
        references = unit_rows(reference, "reference")
        reference_labels = check_labels(reference_labels, len(references), "reference_labels")
        if references.shape[1] != queries.shape[1]:
            raise ValueError(
                "`reference` must have as many columns as `embeddings`. Received: "
                f"reference.shape={references.shape}, embeddings.shape={queries.shape}"
            )
    index = np.arange(len(references))
    for rows in blocks or row_blocks(len(queries), len(references)):
        cosines = (queries[rows] @ references.T).astype(np.float32)  # (block, references)
        relevant = labels[rows, None] == reference_labels
        if leave_one_out:
            itself = index[rows, None] == index
            cosines[itself] = -np.inf
            relevant[itself] = False
        answered = relevant.any(axis=1)
        if answered.any():
            yield np.arange(rows.start, rows.stop)[answered], cosines[answered], relevant[answered]


def warn_unanswered(name, stacklevel=3):
    warnings.warn(
        f"{name} is undefined: no query has a neighbour with its label. The result is NaN.",
        UndefinedMetricWarning,
        stacklevel=stacklevel,
    )


def unit_rows(embeddings, name):
    """`embeddings` checked, in float64, each row at length 1; zero rows stay zero."""
    embeddings = np.asarray(embeddings)
    if embeddings.ndim != 2 or not np.can_cast(embeddings.dtype, np.float64):
        raise ValueError(
            f"`{name}` must be a real matrix (samples, dim). "
            f"Received: {name}.shape={embeddings.shape}, {name}.dtype={embeddings.dtype}"
        )
    embeddings = embeddings.astype(np.float64)
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        row = np.argmin(finite)
        raise ValueError(
            f"`{name}` must be finite. Received: {name}[{row}] with a NaN or infinite value"
        )
    # Over the largest entry first: a square then neither overflows nor vanishes.
    largest = np.max(np.abs(embeddings), axis=1, keepdims=True, initial=0.0)
    embeddings /= np.where(largest > 0, largest, 1.0)
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings / np.where(norms > 0, norms, 1.0)


def check_labels(labels, count, name):
    """`labels` as a vector of `count` whole numbers."""
    labels = np.asarray(labels)
    if labels.shape == (count, 1):
        labels = labels[:, 0]
    if labels.shape != (count,):
        raise ValueError(
            f"`{name}` must have one entry per row, shape ({count},). "
            f"Received: {name}.shape={labels.shape}"
        )
    if labels.dtype.kind not in "iuf":
        raise ValueError(f"`{name}` must be integers. Received: {name}.dtype={labels.dtype}")
    whole = np.isfinite(labels) & (labels == np.rint(labels))
    if not whole.all():
        row = np.argmin(whole)
        raise ValueError(f"`{name}` must be integers. Received: {name}[{row}]={labels[row]}")
    return labels


def row_blocks(rows, columns, step=None):
    """Slices of `step` rows; None: as many as keep a slice times `columns` within `BLOCK_SIZE`."""
    step = step or max(1, BLOCK_SIZE // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _check_k(k):
    ks = np.asarray(k)
    if ks.ndim > 1 or ks.dtype.kind not in "iu" or np.any(ks < 1):
        raise ValueError(
            f"`k` must be an integer of at least 1, or a sequence of them. Received: k={k}"
        )
    return ks
