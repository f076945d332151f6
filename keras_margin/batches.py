"""Batches of P classes x K images, for losses that compare the images of a batch."""

import keras
import numpy as np

from keras_margin.checks import checked_count


def balanced_batches(labels, classes_per_batch, images_per_class, seed=0):
    """Batches that hold the same number of images of each of their classes.

    A triplet needs two images of one class, and a batch drawn at random from thousands of
    identities hardly ever has them. Here each batch has P different classes with K images each. A
    class comes up again after all the others have, and so do the images of a class; a class of
    fewer than K images repeats them. An epoch has n // (P K) batches, at least one, and its order
    depends on (seed, epoch) alone.

    Args:
        labels: integer (n,), the class of each image; any integers.
        classes_per_batch: P, at least 1 and at most the number of classes.
        images_per_class: K, at least 1.
        seed: whole number >= 0.

    Returns:
        `BalancedBatches`; iterate over it for index arrays, or call `gather` or `dataset`.

    Raises:
        ValueError: labels that are not (n,) integers; more classes a batch than there are.

    Example:

    >>> import numpy as np
    >>> labels = np.array([7, 7, 7, 8, 8, 9, 9, 9])
    >>> batches = balanced_batches(labels, classes_per_batch=2, images_per_class=2, seed=0)
    >>> [labels[rows].tolist() for rows in batches]
    [[9, 9, 7, 7], [8, 8, 9, 9]]

    Reference:
        Hermans et al., In Defense of the Triplet Loss for Person Re-Identification, 2017,
        arXiv:1703.07737, section 2.
    """
    return BalancedBatches(labels, classes_per_batch, images_per_class, seed)


class BalancedBatches:
    """What `balanced_batches` returns: each iteration over it is one epoch of index arrays (P K,).

    Attributes:
        epoch: the number of the next epoch, from 0; set it to go on after a resume.
    """

    @property
    def epoch(self):
        return self._epoch

    @epoch.setter
    def epoch(self, epoch):
        self._epoch = checked_count("epoch", epoch, smallest=0)

    def __init__(self, labels, classes_per_batch, images_per_class, seed=0):
        labels = np.asarray(labels)
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
            raise ValueError(
                "`labels` must be whole numbers, one an image. "
                f"Received: labels.shape={labels.shape}, labels.dtype={labels.dtype}"
            )
        self.classes_per_batch = checked_count("classes_per_batch", classes_per_batch, smallest=1)
        self.images_per_class = checked_count("images_per_class", images_per_class, smallest=1)
        self.seed = checked_count("seed", seed, smallest=0)
        self.epoch = 0
        self.size = len(labels)
        _, ids, counts = np.unique(labels, return_inverse=True, return_counts=True)
        self._images = np.split(np.argsort(ids, kind="stable"), np.cumsum(counts)[:-1])
        if len(counts) < self.classes_per_batch:
            raise ValueError(
                "`classes_per_batch` must be at most the number of different labels. Received: "
                f"classes_per_batch={classes_per_batch}, {len(counts)} different labels"
            )

    def __len__(self):
        return max(1, self.size // (self.classes_per_batch * self.images_per_class))

    def __iter__(self):
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._batches_of(epoch)

    def _batches_of(self, epoch):
        random = np.random.default_rng([self.seed, epoch])
        classes, images = _Rounds(random, np.arange(len(self._images))), {}
        for _ in range(len(self)):
            rows = []
            for k in classes.take(self.classes_per_batch):
                if k not in images:
                    images[k] = _Rounds(random, self._images[k])
                rows.append(images[k].take(self.images_per_class))
            yield np.concatenate(rows)

    def gather(self, *arrays):
        """The batches of arrays, for `fit` on any backend.

        Args:
            *arrays: x, y and, if wanted, sample weights; x may be a dict or list of arrays. Each
                has n rows.

        Returns:
            `keras.utils.PyDataset`, a new order each epoch. `fit` shuffles the batches of an epoch
            once more: `shuffle=False` keeps what `seed` decides.

        Raises:
            ValueError: arrays of another length than the labels.
        """
        return _Gathered(self, arrays)

    def dataset(self):
        """The batches as a `tf.data.Dataset` of int64 indices (P K,), a new order each iteration.

        Go on with `.map(...)`, for example to read the files of these indices:
        `batches.dataset().map(lambda rows: (load(tf.gather(paths, rows)), tf.gather(y, rows)))`.
        """
        import tensorflow as tf

        rows = self.classes_per_batch * self.images_per_class
        batches = tf.data.Dataset.from_generator(
            lambda: iter(self), output_signature=tf.TensorSpec((rows,), tf.int64)
        )
        return batches.apply(tf.data.experimental.assert_cardinality(len(self)))


class _Rounds:
    """Deals out `items` round after round, each round in a random order of its own."""

    def __init__(self, random, items):
        self._random = random
        self._items = items
        self._left = items[:0]

    def take(self, number):
        """`number` items, all different where there are as many."""
        taken = self._left[:number]
        self._left = self._left[number:]
        while len(taken) < number:
            fresh = self._random.permutation(self._items)
            if len(self._items) >= number:
                # Those that are in hand already come last in the new round.
                in_hand = np.isin(fresh, taken)
                fresh = np.concatenate([fresh[~in_hand], fresh[in_hand]])
            missing = number - len(taken)
            taken = np.concatenate([taken, fresh[:missing]])
            self._left = fresh[missing:]
        return taken


class _Gathered(keras.utils.PyDataset):
    def __init__(self, batches, arrays):
        super().__init__()
        for array in keras.tree.flatten(arrays):
            if not hasattr(array, "shape") or array.shape[:1] != (batches.size,):
                raise ValueError(
                    f"Each array must have {batches.size} rows, one a label. Received: "
                    f"{type(array).__name__} of shape {getattr(array, 'shape', None)}"
                )
        self._batches = batches
        # Rows are taken by their place: pandas would take them by its index.
        self._arrays = keras.tree.map_structure(np.asarray, arrays)
        self._order = self._read = None

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        if self._order is None:
            self._order, self._read = list(self._batches), set()
        self._read.add(index)
        rows = self._order[index]
        parts = keras.tree.map_structure(lambda array: array[rows], self._arrays)
        return parts[0] if len(parts) == 1 else parts

    def on_epoch_end(self):
        # Keras calls this before the first epoch too, when it has looked at one batch.
        if self._read and len(self._read) == len(self):
            self._order = None
