"""Which classes take part in a step: all of them, or the sample of Partial FC.

An et al., Partial FC: Training 10 Million Identities on a Single Machine, 2021, arXiv:2010.05222:
the classes of the batch, and others drawn at random. The loss of a step is that of the softmax over
the sample, without correction; margins, scales and their statistics see the sample alone.
"""

import contextlib
import math
from typing import NamedTuple

from keras import ops

from keras_margin.backend import read, take_rows
from keras_margin.checks import checked_number
from keras_margin.distribution import gather_rows
from keras_margin.labels import class_ids
from keras_margin.randomness import random_permutation
from keras_margin.shards import ALONE


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
    shards: object  # `Shards` of the centres, for a pass over them


def every_class(head, found):
    """All classes of a head, for the `ClassIds` of a batch."""
    shards = head.shards.of_batch(found.ids.shape[0], head.num_classes)
    return Classes(read(head.centers), found.ids, head.num_classes, shards)


def classes_of_step(head, found):
    """The classes of a training step: a sample, where the head has a rate below 1."""
    if head.sample_rate == 1.0:
        return every_class(head, found)
    sample = _sample_of(head, found)
    # A row that does not count may have a class that is not there: it looks at any other.
    labels = ops.minimum(ops.searchsorted(sample, found.ids), ops.shape(sample)[0] - 1)
    rows = _rows_of(sample, head.num_subcenters)
    head.record_rows(rows)
    centers, number = take_rows(head.centers, rows), ops.shape(sample)[0]
    if head.shards is not ALONE:
        spare = (head.shards.padded(number) - number) * head.num_subcenters
        centers = ops.pad(centers, [(0, spare), (0, 0)])
    shards = head.shards.of_batch(found.ids.shape[0], number)
    return Classes(centers, ops.cast(labels, "int32"), number, shards)


def rows_of_step(head, labels):
    """The rows of `head.centers` that the next training call will use, int32 (n,)."""
    found = class_ids(labels, head.num_classes, head.ignore_class)
    return _rows_of(_sample_of(head, found), head.num_subcenters)


@contextlib.contextmanager
def recorded_rows(head):
    """A list that gets the rows of `head.centers` that each call inside uses, int32 (n,).

    None stands for all of them: the logits of every class were asked for.
    """
    rows = []
    head.record_rows = rows.append
    try:
        yield rows
    finally:
        del head.record_rows


def _sample_of(head, found):
    counted = found.counted & found.valid
    seed, step = head.seed or 0, head.calls_so_far()
    return sampled_ids(found.ids, counted, head.num_classes, head.sample_rate, seed, step)


def _rows_of(sample, num_subcenters):
    rows = ops.expand_dims(sample * num_subcenters, 1) + ops.arange(num_subcenters, dtype="int32")
    return ops.reshape(rows, (-1,))


def sample_size(num_classes, rate, batch):
    """S = min(C, max(ceil(rate C), batch, 2)), so that the classes of the batch always fit.

    A sample of one class would have no other class to tell it from.

    Args:
        num_classes: C.
        rate: the share of the classes, in (0, 1].
        batch: rows of the global batch, a number or a tensor.
    """
    wanted = max(2, math.ceil(round(rate * num_classes, 6)))  # 0.1 * 70 is 7.000000000000001
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
