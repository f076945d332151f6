"""Callbacks for `fit`."""

import hashlib
import json
import secrets
import shutil
from pathlib import Path

import keras

from keras_margin import verification
from keras_margin.angle_recorder import AngleRecorder
from keras_margin.checks import checked_count
from keras_margin.encoding import checked_set, encoded, encoder_for
from keras_margin.files import written_whole
from keras_margin.saving import description
from keras_margin.score_checks import check_named_far

__all__ = ["AngleRecorder", "AtomicBackup", "VerificationCallback"]


class VerificationCallback(keras.callbacks.Callback):
    """Judges the embeddings of other identities after each epoch, and writes into `logs`.

    The training loss says nothing about identities that are not in the training set. This scores
    every pair of a labelled set by cosine, see `verification.evaluate`:

        val_eer    val_tar_at_far_1e-2, one for each `far`    val_rank1

    List it before the callbacks that follow these numbers, and give them a `mode`: Keras cannot
    know that a low `val_eer` is good.

    Args:
        x: images or other inputs of the model, an array or nested arrays (samples, ...).
        labels: (samples,) identities, whole numbers; they need not be training classes.
        far: false accept rates, a number or a sequence.
        encoder: what maps inputs to embeddings; None: `model.encoder` of an `EmbeddingModel`.
        batch_size: of the encoder's `predict`.
        every: epochs from one judgement to the next.

    Raises:
        ValueError, TypeError: labels that do not fit `x`, `far` out of range.

    Example:

    >>> import numpy as np
    >>> import keras_margin
    >>> backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model = keras_margin.EmbeddingModel(backbone, keras_margin.ArcFace(4))
    >>> model.compile("sgd")
    >>> others, people = np.eye(4)[[0, 0, 1, 1]], np.array([7, 7, 9, 9])
    >>> judge = VerificationCallback(others, people, far=0.25)
    >>> stop = keras.callbacks.EarlyStopping("val_eer", mode="min", patience=3)
    >>> x, y = np.eye(4), np.arange(4)
    >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=[judge, stop]).history
    >>> sorted(history)
    ['accuracy', 'loss', 'val_eer', 'val_rank1', 'val_tar_at_far_2.5e-1']
    >>> history["val_eer"]  # equal inputs have equal embeddings
    [0.0, 0.0]
    """

    def __init__(self, x, labels, far=(1e-1, 1e-2, 1e-3), *, encoder=None, batch_size=32, every=1):
        super().__init__()
        self.x, self.labels = checked_set(x, labels)
        if len(self.labels) < 2:
            raise ValueError(
                f"Two samples make a pair: `labels` must have more. Received: {len(self.labels)}"
            )
        self.far = check_named_far(far)
        self.encoder = encoder
        self.batch_size = checked_count("batch_size", batch_size, smallest=1)
        self.every = checked_count("every", every, smallest=1)

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self.every == 0 and logs is not None:
            encoder = encoder_for(self.encoder, self.model)
            embeddings = encoded(encoder, self.x, self.batch_size)
            found = verification.evaluate(embeddings, self.labels, self.far)
            logs["val_eer"] = found["eer"]
            for far in self.far:
                logs[f"val_tar_at_far_{_power_of_ten(far)}"] = found[f"tar@far={far:g}"]
            logs["val_rank1"] = found["rank1"]


def _power_of_ten(number):
    """0.01 as 1e-2."""
    factor, exponent = f"{number:e}".split("e")
    return f"{float(factor):g}e{int(exponent)}"


class AtomicBackup(keras.callbacks.Callback):
    """Backs up the training after each epoch, and goes on from there when it is started again.

    As `keras.callbacks.BackupAndRestore`, but a process that is killed at any moment, inside saving
    too, leaves a whole backup: weights, optimizer and counters have a file of their own, and one
    small file, which is replaced last, says which weights and which epoch belong together, with a
    checksum. A completed epoch is never lost; steps of an epoch that was not completed are made
    again.

    The run ends with the weights, AdaCos' scale, schedules and sampled classes of one that was
    never killed, bit for bit, where the data of an epoch depends only on (seed, epoch): see
    `next_epoch`. Not restored: the state of other callbacks (the patience of EarlyStopping), of
    Python's and NumPy's generators, and the history of the epochs before.

    List it last, so that what other callbacks change at the end of an epoch (a learning rate) is
    in the backup.

    Args:
        directory: of the backup; of this run alone.
        delete_at_end: remove it when `fit` has ended. False keeps it, so that nothing is lost until
            you have saved the model; the same `fit` again then finds all epochs done.

    Raises:
        ValueError: in `fit`, a backup that is damaged, or of another model or optimizer; the
            message names it, and the model stays as it was.

    Example:

    >>> import tempfile
    >>> import numpy as np
    >>> import keras_margin
    >>> def train(epochs, folder):
    ...     backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    ...     model = keras_margin.EmbeddingModel(backbone, keras_margin.ArcFace(4))
    ...     model.compile("sgd")
    ...     backup = keras_margin.callbacks.AtomicBackup(folder)
    ...     x, y = np.eye(4, dtype="float32"), np.arange(4)
    ...     fitted = model.fit(x, y, epochs=epochs, shuffle=False, verbose=0, callbacks=[backup])
    ...     return fitted.epoch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(train(2, folder), train(5, folder))
    [0, 1] [2, 3, 4]
    """

    def __init__(self, directory, *, delete_at_end=False):
        super().__init__()
        self.directory = Path(directory)
        self.delete_at_end = delete_at_end

    @property
    def next_epoch(self):
        """The epoch that `fit` will begin with: 0 without a backup.

        For data that is prepared epoch by epoch: `batches.epoch = backup.next_epoch`.
        """
        record = self._read_record()
        return 0 if record is None else record["epoch"]

    def on_train_begin(self, logs=None):
        if self.directory.exists() and not self.directory.is_dir():
            raise NotADirectoryError(
                f"`directory` must be a folder. Received: directory={str(self.directory)!r}"
            )
        record = self._read_record()
        self._remove_leftovers(record)
        if record is None:
            return
        weights = self.directory / record["weights"]
        if not weights.is_file():
            raise ValueError(self._damaged(f"{weights} is missing"))
        if _sha256(weights) != record["sha256"]:
            raise ValueError(self._damaged(f"{weights} was cut short or garbled"))
        if not self.model.built:
            raise ValueError(
                "The model must be built before its backup can be restored: call it on a batch."
            )
        self._compare(record["model"])
        try:
            self.model.load_weights(weights)
        except ValueError as error:
            raise ValueError(self._damaged(f"it is of another model ({error})")) from error
        self.model._initial_epoch = record["epoch"]

    def on_epoch_end(self, epoch, logs=None):
        name = f"epoch-{epoch + 1}-{secrets.token_hex(4)}.weights.h5"
        with written_whole(self.directory / name) as temporary:
            self.model.save_weights(temporary)
        record = {
            "epoch": epoch + 1,
            "weights": name,
            "sha256": _sha256(self.directory / name),
            "model": description(self.model),
        }
        with written_whole(self._record) as temporary:
            temporary.write_text(json.dumps(record))
        self._remove_leftovers(record)

    def on_train_end(self, logs=None):
        if self.delete_at_end:
            self._record.unlink(missing_ok=True)
            self._remove_leftovers(None)

    @property
    def _record(self):
        return self.directory / "backup.json"

    def _read_record(self):
        """{"epoch", "weights", "sha256", "model"} of the last backup, or None."""
        if not self._record.exists():
            return None
        try:
            record = json.loads(self._record.read_text())
            return {
                "epoch": int(record["epoch"]),
                "weights": str(record["weights"]),
                "sha256": str(record["sha256"]),
                "model": dict(record.get("model", {})),  # none in those of version 0.1
            }
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ValueError(self._damaged(f"{self._record} cannot be read")) from error

    def _compare(self, there):
        """Refuses a backup of another model or optimizer before a weight is read.

        Keras would only warn of an optimizer's variables that do not fit, and leave them out.
        """
        here = description(self.model)
        for name, found in there.items():
            if here.get(name, found) != found:
                what = f"it is of another model: {name} {here[name]} here and {found} there"
                raise ValueError(self._damaged(what))

    def _remove_leftovers(self, record):
        """Weights of earlier backups and what killed processes have left."""
        kept = {record["weights"]} if record else set()
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if path.name.startswith((".epoch-", ".backup.json.")) and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.match("epoch-*.weights.h5") and path.name not in kept:
                path.unlink(missing_ok=True)

    def _damaged(self, what):
        return (
            f"The backup cannot be restored: {what}. Delete the folder to start anew, or restore "
            f"its files. Received: directory={str(self.directory)!r}"
        )


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
