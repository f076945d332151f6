"""The angles between embeddings and class centres, recorded while a model trains."""

import keras
import numpy as np
from keras import ops

from keras_margin.checks import check_rows, checked_count
from keras_margin.encoding import checked_set, encoded, encoder_for
from keras_margin.labels import class_ids
from keras_margin.retrieval import row_blocks, unit_rows

QUANTILES = {"": 0.5, "_low": 0.1, "_high": 0.9}
BINS = 18_000  # of 0.01 degrees


class AngleRecorder(keras.callbacks.Callback):
    """Records how far embeddings are from their own and from the other class centres.

        target_angle       target_angle_low       target_angle_high        degrees
        nontarget_angle    nontarget_angle_low    nontarget_angle_high     degrees
        scale              where all samples have the same

    of given images: the median, the 10 % and the 90 % quantile, over all samples and, for
    `nontarget`, over all of their other classes (to 0.01 degrees). At the end of each epoch they go
    into `logs`, so that `History` has them; `recorder.history` has the steps between too, and the
    start. `plots.angles` draws both. Nothing is trained or moved: the images pass as in `predict`.

    The time is that of a product of all samples with all classes: for many classes take few
    samples. Memory is that of one block of it.

    Args:
        x: images or other inputs of the model, an array or nested arrays (samples, ...).
        labels: (samples,) class ids, as in training; those of the head's `ignore_class` are left
            out.
        every: steps from one record to the next; None: the start and the ends of epochs alone.
            AdaCos' scale moves fastest in the first steps.
        encoder: what maps inputs to embeddings; None: `model.encoder` of an `EmbeddingModel`.
        head: the head whose centres and scale are meant; None: `model.head`.
        batch_size: of the encoder's `predict`.

    Attributes:
        history: {"step": [...], "target_angle": [...], ...}. Make a recorder for each training.

    Raises:
        ValueError: labels that do not fit `x`, or are no classes of the head; a head without
            classes; embeddings that are not finite.

    Example:

    >>> import keras_margin
    >>> backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model = keras_margin.EmbeddingModel(backbone, keras_margin.AdaCos(4))
    >>> model.compile("sgd")
    >>> x, y = np.eye(4), np.arange(4)
    >>> recorder = AngleRecorder(x, y, every=1)
    >>> history = model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[recorder]).history
    >>> len(history["target_angle"]), recorder.history["step"]
    (3, [0, 1, 2, 3, 4, 5, 6])

    Reference:
        Zhang et al., AdaCos: Adaptively Scaling Cosine Logits for Effectively Learning Deep Face
        Representations, 2019, arXiv:1905.00292, fig. 1.
    """

    def __init__(self, x, labels, *, every=None, encoder=None, head=None, batch_size=32):
        super().__init__()
        self.x, self.labels = checked_set(x, labels)
        if not len(self.labels):
            raise ValueError("`labels` must hold at least one sample. Received: none")
        self.every = None if every is None else checked_count("every", every, smallest=1)
        self.encoder = encoder
        self.head = head
        self.batch_size = checked_count("batch_size", batch_size, smallest=1)
        self.history = {}
        self._step = self._steps_before = 0  # batches so far, and those before the epoch

    def on_train_begin(self, logs=None):
        # The optimizer's count goes on where a training is resumed. Not asked again: where it
        # gathers gradients it counts other steps than batches.
        self._step = max(self._step, int(self.model.optimizer.iterations))

    def on_epoch_begin(self, epoch, logs=None):
        self._steps_before = self._step
        if not self._steps and self._head.built:
            self._record(self._step)

    def on_train_batch_end(self, batch, logs=None):
        self._step = step = self._steps_before + batch + 1
        last = self._steps[-1] if self._steps else self._steps_before
        if self.every is not None and step // self.every > last // self.every:
            self._record(step)

    def on_epoch_end(self, epoch, logs=None):
        if self._step not in self._steps[-1:]:
            self._record(self._step)
        if logs is not None:
            logs.update({name: values[-1] for name, values in self.history.items()})
            del logs["step"]

    @property
    def _steps(self):
        return self.history.get("step", [])

    @property
    def _head(self):
        head = self.head if self.head is not None else getattr(self.model, "head", None)
        if getattr(head, "num_classes", None) is None:
            raise ValueError(
                "`head` must have class centres to measure angles to. "
                f"Received: {type(head).__name__}"
            )
        return head

    def _record(self, step):
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()  # within an epoch the variables are not the model's
        embeddings = encoded(encoder_for(self.encoder, self.model), self.x, self.batch_size)
        found = {"step": step, **angles_to_centers(self._head, embeddings, self.labels)}
        scale = self._head.current_scale
        if scale is not None:
            found["scale"] = float(scale)
        for name, value in found.items():
            self.history.setdefault(name, []).append(value)


def angles_to_centers(head, embeddings, labels):
    """Quantiles of the angles between embeddings and class centres, in degrees.

    With sub-centres a class counts with its nearest one. Nothing of size (samples, num_classes) is
    held: a histogram gathers the angles block by block.

    Args:
        head: a built head.
        embeddings: float (samples, dim), any length.
        labels: as in the head's call; ignored rows are left out.

    Returns:
        {"target_angle": median, "target_angle_low": 10 %, ..., "nontarget_angle_high": 90 %}.

    Raises:
        ValueError: labels or embeddings that do not fit; no row that counts.
    """
    found = class_ids(labels, head.num_classes, head.ignore_class)
    units = unit_rows(embeddings, "embeddings")
    check_rows(units, found.ids, head.centers.shape[1])
    counted = ops.convert_to_numpy(found.counted)
    units, ids = units[counted], ops.convert_to_numpy(found.ids)[counted]
    if not len(ids):
        raise ValueError(
            "`labels` must hold a class that counts. "
            f"Received: labels that are all ignore_class={head.ignore_class}"
        )
    subcenters = head.num_subcenters
    counts, targets = np.zeros(BINS, np.int64), np.empty(len(ids))
    for classes in row_blocks(head.num_classes, subcenters * units.shape[1]):
        own = slice(classes.start * subcenters, classes.stop * subcenters)
        centers = unit_rows(ops.convert_to_numpy(head.centers[own]), "centers")
        for rows in row_blocks(len(ids), len(centers)):
            cosines = units[rows] @ centers.T
            cosines = cosines.reshape(len(cosines), -1, subcenters).max(axis=2)
            angles = np.degrees(np.arccos(np.clip(cosines, -1.0, 1.0)))  # (rows, classes)
            counts += _histogram(angles)
            here = np.flatnonzero((ids[rows] >= classes.start) & (ids[rows] < classes.stop))
            targets[rows.start + here] = angles[here, ids[rows][here] - classes.start]
    counts -= _histogram(targets)
    summary = {}
    for end, share in QUANTILES.items():
        summary[f"target_angle{end}"] = float(np.quantile(targets, share))
        summary[f"nontarget_angle{end}"] = _quantile(counts, share)
    return summary


def _histogram(angles):
    bins = np.minimum((angles * (BINS / 180.0)).astype(np.int64), BINS - 1)
    return np.bincount(bins.ravel(), minlength=BINS)


def _quantile(counts, share):
    """The middle of the bin that holds the quantile."""
    up_to = np.cumsum(counts)
    place = np.searchsorted(up_to, share * (up_to[-1] - 1), side="right")
    return float((place + 0.5) * 180.0 / BINS)
