"""Batches of one size, for what refuses partial ones."""

import keras
import numpy as np

from keras_margin.checks import checked_count, checked_ignore_class


def pad_last_batch(dataset, batch_size, ignore_class):
    """Batches of one size: a shorter one is filled with rows that do not count.

    For what refuses partial batches, as `fit` and `evaluate` under `keras.distribution` do. A row
    of padding is a copy of the batch's first row with the label `ignore_class` and weight 0, so a
    head of the same `ignore_class` gives the loss and the gradients of the rows that are there.

    Args:
        dataset: a `tf.data.Dataset`, a `keras.utils.PyDataset` or a list of batches, each (x, y) or
            (x, y, sample_weight); x an array or nested, y ids (rows,) or (rows, 1).
        batch_size: rows of every batch.
        ignore_class: of the head.

    Returns:
        A `tf.data.Dataset` for one, else a `keras.utils.PyDataset`.

    Raises:
        TypeError: another kind of data, or batches of another form.
        ValueError: a batch of no rows or of more than `batch_size`; labels that are no ids.

    Example:

    >>> batches = [(np.array([[1.0], [2.0]]), np.array([3, 4])), (np.array([[5.0]]), np.array([6]))]
    >>> padded = pad_last_batch(batches, batch_size=2, ignore_class=-1)
    >>> padded[1][1].tolist()
    [6, -1]
    """
    batch_size = checked_count("batch_size", batch_size, smallest=1)
    ignore_class = checked_ignore_class(ignore_class)
    if ignore_class is None:
        raise ValueError(
            "`ignore_class` must be a whole number, that of the head: rows of padding are labelled "
            "with it. Received: ignore_class=None"
        )
    if hasattr(dataset, "element_spec"):
        return _padded_dataset(dataset, batch_size, ignore_class)
    if isinstance(dataset, (keras.utils.PyDataset, list, tuple)):
        return _Padded(dataset, batch_size, ignore_class)
    raise TypeError(
        "`dataset` must be a tf.data.Dataset, a keras.utils.PyDataset or a list of batches. "
        f"Received: dataset of type {type(dataset).__name__}"
    )


class _Padded(keras.utils.PyDataset):
    def __init__(self, batches, batch_size, ignore_class):
        super().__init__()
        self._batches = batches
        self._batch_size = batch_size
        self._ignore_class = ignore_class

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        batch = self._batches[index]
        _check_form(batch)
        x, y, *weights = keras.tree.map_structure(np.asarray, tuple(batch))
        _check_labels(y, self._ignore_class)
        rows = len(y)
        if any(len(part) != rows for part in (*keras.tree.flatten(x), *weights)):
            raise ValueError(
                f"All parts of a batch must have its rows. Received: {rows} labels in batch "
                f"{index}, beside another number of rows"
            )
        if not 0 < rows <= self._batch_size:
            raise ValueError(
                f"A batch must have from 1 to {self._batch_size} rows. Received: {rows} rows in "
                f"batch {index}"
            )
        missing = self._batch_size - rows

        def with_copies(array):
            return np.concatenate([array, np.repeat(array[:1], missing, axis=0)])

        y = np.concatenate([y, np.full_like(y, self._ignore_class, shape=(missing, *y.shape[1:]))])
        weights = [np.concatenate([w, np.zeros((missing, *w.shape[1:]), w.dtype)]) for w in weights]
        return (keras.tree.map_structure(with_copies, x), y, *weights)

    def on_epoch_end(self):
        if isinstance(self._batches, keras.utils.PyDataset):
            self._batches.on_epoch_end()


def _padded_dataset(dataset, batch_size, ignore_class):
    import tensorflow as tf

    _check_form(dataset.element_spec)
    _check_labels(dataset.element_spec[1], ignore_class)

    def pad(x, y, *weights):
        rows = tf.shape(y)[0]
        in_range = tf.logical_and(rows > 0, rows <= batch_size)
        message = f"A batch must have from 1 to {batch_size} rows."
        with tf.control_dependencies([tf.debugging.Assert(in_range, [message, rows])]):
            missing = tf.maximum(batch_size - rows, 0)

        def of_one_size(tensor, padding):
            whole = tf.concat([tensor, padding], axis=0)
            return tf.ensure_shape(whole, (batch_size, *tensor.shape[1:]))

        def with_copies(tensor):
            return of_one_size(tensor, tf.repeat(tensor[:1], missing, axis=0))

        labels = tf.ones_like(y[:1]) * tf.cast(ignore_class, y.dtype)
        y = of_one_size(y, tf.repeat(labels, missing, axis=0))
        weights = [
            of_one_size(w, tf.repeat(tf.zeros_like(w[:1]), missing, axis=0)) for w in weights
        ]
        return (tf.nest.map_structure(with_copies, x), y, *weights)

    return dataset.map(pad, num_parallel_calls=tf.data.AUTOTUNE)


def _check_form(batch):
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        raise TypeError(
            "A batch must be (x, y) or (x, y, sample_weight), a tuple. Received: "
            f"{type(batch).__name__} of {len(batch) if hasattr(batch, '__len__') else 1} parts"
        )


def _check_labels(y, ignore_class):
    if len(y.shape) not in (1, 2) or (len(y.shape) == 2 and y.shape[1] != 1):
        raise ValueError(
            "Labels must be ids, (rows,) or (rows, 1): a one-hot row cannot be ignored. Received: "
            f"y.shape={tuple(y.shape)}"
        )
    kind = str(getattr(y.dtype, "name", y.dtype))
    if kind.startswith(("uint", "bool")):
        raise ValueError(
            f"Labels of dtype {kind} cannot hold a class to ignore: cast them to int32. Received: "
            f"y.dtype={kind}"
        )
    if kind.startswith("int") and not np.iinfo(kind).min <= ignore_class <= np.iinfo(kind).max:
        raise ValueError(
            f"Labels of dtype {kind} cannot hold ignore_class={ignore_class}: cast them to int32. "
            f"Received: y.dtype={kind}"
        )
