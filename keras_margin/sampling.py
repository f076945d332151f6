"""Which classes take part in a step: all of them, or the sample of Partial FC.

An et al., Partial FC: Training 10 Million Identities on a Single Machine, 2021, arXiv:2010.05222:
the classes of the batch, and others drawn at random. The loss of a step is that of the softmax over
the sample, without correction; margins, scales and their statistics see the sample alone.
"""

import math
from typing import NamedTuple

from keras import ops

from keras_margin.backend import read, take_rows
from keras_margin.checks import checked_number
from keras_margin.distribution import gather_rows
from keras_margin.randomness import random_permutation


def checked_rate(sample_rate, centers_regularizer):
    """`sample_rate` as a float in (0, 1].

    Raises:
        ValueError: it is not, or a regularizer would move rows that are not in the sample.
    """
    rate = checked_number("sample_rate", sample_rate, 0.0, at_most=1.0)
    if rate == 0.0:
        raise ValueError("`sample_rate` must be greater than 0. Received: sample_rate=0")
    if rate < 1.0 and centers_regularizer is not None:
        raise ValueError(
            "With `sample_rate` below 1 the classes outside the sample must not move, and "
            "`centers_regularizer` moves them all: leave it out; the optimizer's weight_decay acts "
            f"on the sample. Received: sample_rate={rate}, "
            f"centers_regularizer={centers_regularizer!r}"
        )
    return rate


class Classes(NamedTuple):
    """The classes of a step as the pass over them needs them."""

    centers: object  # (number * num_subcenters, dim)
    labels: object  # int32 (batch,): each row's class, its place in `centers`
    number: object  # of classes: a number, or a tensor where the batch is not known yet


def all_classes(centers, ids, num_classes):
    """Every class.

    Args:
        centers: the variable.
        ids: int32 (batch,), each in range.
        num_classes: C.
    """
    return Classes(read(centers), ids, num_classes)


def sample_size(num_classes, rate, batch):
    """S = min(C, max(ceil(rate C), batch)), so that the classes of the batch always fit.

    Args:
        num_classes: C.
        rate: the share of the classes, in (0, 1].
        batch: rows of the global batch, a number or a tensor.
    """
    wanted = math.ceil(round(rate * num_classes, 6))  # 0.1 * 70 is 7.000000000000001
    if isinstance(batch, int):
        return min(num_classes, max(wanted, batch))
    return ops.minimum(num_classes, ops.maximum(wanted, batch))


def sampled_ids(ids, counted, num_classes, rate, seed, step):
    """The classes of the global batch, and others drawn without replacement by a hash.

    The same on every replica and backend, and after a resume: it depends on the labels, the seed
    and the step alone. Cost and memory follow S, not the number of classes.

    Args:
        ids: int32 (local_batch,), each in range.
        counted: bool (local_batch,); the classes of other rows need not take part.
        num_classes: C.
        rate: see `sample_size`.
        seed: whole number.
        step: training calls so far, a number or an integer scalar tensor.

    Returns:
        int32 (S,), increasing.
    """
    none = num_classes  # sorts behind every class
    positives = ops.sort(gather_rows(ops.where(counted, ids, none)))  # (global_batch,)
    size = sample_size(num_classes, rate, ops.shape(positives)[0])
    repeats = positives[1:] == positives[:-1]
    positives = ops.concatenate([positives[:1], ops.where(repeats, none, positives[1:])])
    number = ops.sum(ops.cast(positives < none, "int32"))

    # S candidates are enough: at most `number` of them are positives.
    candidates = random_permutation(seed, step, ops.arange(size, dtype="int32"), num_classes)
    positives = ops.sort(positives)
    places = ops.searchsorted(ops.append(positives, none), candidates)
    fresh = ops.take(ops.append(positives, none), places) != candidates
    fresh = fresh & (ops.cumsum(ops.cast(fresh, "int32")) <= size - number)
    drawn = ops.where(fresh, candidates, none)
    return ops.sort(ops.concatenate([positives, drawn]))[:size]


def sampled_classes(centers, ids, sample, num_subcenters):
    """The classes of a sample.

    Args:
        centers: the variable; its gradient is that of the sample's rows.
        ids: int32 (batch,).
        sample: int32 (S,), increasing, with the class of every row that counts.
        num_subcenters: rows a class.
    """
    rows = ops.expand_dims(sample * num_subcenters, 1) + ops.arange(num_subcenters, dtype="int32")
    # A row that does not count may have a class that is not there: it looks at any other.
    labels = ops.minimum(ops.searchsorted(sample, ids), ops.shape(sample)[0] - 1)
    return Classes(
        take_rows(centers, ops.reshape(rows, (-1,))),
        ops.cast(labels, "int32"),
        ops.shape(sample)[0],
    )
