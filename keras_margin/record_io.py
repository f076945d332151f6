"""insightface's training sets: images in MXNet's RecordIO, read without mxnet.

    record  = magic (uint32), flag << 29 | length (uint32), `length` bytes, zeros up to 4 x n bytes
    content = flag (uint32), label (float32), id (uint64), id2 (uint64), `flag` labels (float32),
              encoded image

A content in which the magic number occurs is cut there into several records. All is little-endian.
"""

import os
import struct

import numpy as np

MAGIC = 0xCED7230A
_HEAD = struct.Struct("<II")
_CONTENT = struct.Struct("<IfQQ")
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)  # the flag of a record


class RecordSet:
    """The images of a training set, by position: `train.rec`, `train.idx` and `property`.

    Args:
        path: the folder that holds them.

    Attributes:
        num_classes: identities, as `property` says.
        image_shape: (height, width), as `property` says.

    Raises:
        FileNotFoundError: one of the files is not there.
        ValueError: `property`, the index or the first record is damaged, or names places behind
            the end of the file.

    Indexing gives (encoded image, label), bytes and an int.
    """

    def __init__(self, path):
        path = os.fspath(path)
        self._records = os.path.join(path, "train.rec")
        self.num_classes, self.image_shape = _read_property(os.path.join(path, "property"))
        self._size = os.path.getsize(self._records)
        offsets = _read_index(os.path.join(path, "train.idx"), self._size)
        first = min(offsets.values())
        flag, labels, image = self._content(first)
        if flag > 0 and not image:
            # The first record says where the images end: behind them is one for each identity.
            end = labels[0]
            if not 1 < end <= self._size:  # NaN too
                raise self._damaged(first, f"its images end at {end}")
            places = [offsets.get(key) for key in range(1, int(end))]
            if None in places:
                raise ValueError(
                    f"The index lacks image {places.index(None) + 1} of {len(places)}. Received: "
                    f"path={os.path.join(path, 'train.idx')!r}"
                )
        else:
            places = [offsets[key] for key in sorted(offsets)]
        self._offsets = np.array(places, np.int64)

    def __len__(self):
        return len(self._offsets)

    def __getitem__(self, position):
        offset = int(self._offsets[position])
        _, labels, image = self._content(offset)
        label = labels[0]
        if not (0 <= label < self.num_classes and label == int(label)):
            raise self._damaged(offset, f"its label {label} is none of {self.num_classes} classes")
        if not image:
            raise self._damaged(offset, "it holds no image")
        return image, int(label)

    def _content(self, offset):
        """(flag, labels, image) of the records that begin at an offset."""
        with open(self._records, "rb") as file:
            file.seek(offset)
            data = self._bytes(file)
        if len(data) < _CONTENT.size:
            raise self._damaged(offset, f"{len(data)} bytes are no content")
        flag, label, _, _ = _CONTENT.unpack_from(data)
        end = _CONTENT.size + 4 * flag
        if end > len(data):
            raise self._damaged(offset, f"it promises {flag} labels in {len(data)} bytes")
        labels = np.frombuffer(data[_CONTENT.size : end], "<f4") if flag else [label]
        return flag, labels, data[end:]

    def _bytes(self, file):
        parts = []
        while True:
            place = file.tell()
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise self._damaged(place, "the file ends in its head")
            magic, word = _HEAD.unpack(head)
            kind, length = word >> 29, word & (2**29 - 1)
            if magic != MAGIC:
                raise self._damaged(place, f"it begins with {magic:#x}, not with {MAGIC:#x}")
            if kind not in ((_MIDDLE, _LAST) if parts else (_WHOLE, _FIRST)):
                raise self._damaged(place, f"a record of kind {kind} is out of order")
            data = file.read(length)
            if len(data) < length:
                raise self._damaged(place, f"{length} bytes are promised, {len(data)} are there")
            parts.append(data)
            if kind in (_WHOLE, _LAST):
                return _HEAD.pack(MAGIC, 0)[:4].join(parts)
            file.seek(-length % 4, os.SEEK_CUR)

    def _damaged(self, offset, what):
        return ValueError(
            f"The record at byte {offset} of {self._size} is damaged or cut short: {what}. "
            f"Received: path={self._records!r}"
        )


def record_dataset(path, *, shuffle=True, seed=0):
    """A `tf.data.Dataset` of the (encoded image, label) of an insightface training set.

    Args:
        path: the folder with `train.rec`, `train.idx` and `property`.
        shuffle: whether every epoch has the images in another order, of all of them.
        seed: of the first order.

    Returns:
        A dataset of scalar strings and int32 labels, of known cardinality. Decode and batch it:
        `.map(lambda image, label: (tf.io.decode_jpeg(image, channels=3), label))`.

    Raises:
        FileNotFoundError, ValueError: as `RecordSet`; a damaged record ends the iteration with
            `tf.errors.InvalidArgumentError`, which names the file and the place.

    Example:

        images = keras_margin.datasets.record_dataset("faces_emore")
        images = images.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(128).prefetch(2)
    """
    import tensorflow as tf

    records = RecordSet(path)

    def read(position):
        try:
            image, label = records[position]
        except ValueError as error:
            return b"", np.int32(-1), str(error)
        return image, np.int32(label), ""

    def load(position):
        image, label, error = tf.numpy_function(
            read, [position], [tf.string, tf.int32, tf.string], stateful=False
        )
        # Raised here: an exception of `read` would come with its whole traceback as the message.
        check = tf.debugging.Assert(tf.equal(error, ""), [error])
        with tf.control_dependencies([check]):
            image, label = tf.identity(image), tf.identity(label)
        return tf.ensure_shape(image, ()), tf.ensure_shape(label, ())

    positions = tf.data.Dataset.range(len(records))
    if shuffle:
        positions = positions.shuffle(len(records), seed=seed)
    return positions.map(load, num_parallel_calls=tf.data.AUTOTUNE)


def _read_property(path):
    with open(path, encoding="utf-8") as file:
        words = file.read().strip().split(",")
    if len(words) != 3 or not all(word.strip().isdecimal() for word in words):
        raise ValueError(
            "`property` must hold three numbers: classes, height, width, such as 85742,112,112. "
            f"Received: path={path!r}"
        )
    classes, *shape = map(int, words)
    return classes, tuple(shape)


def _read_index(path, size):
    """{key: offset} of the lines "key offset"."""
    offsets = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            words = line.split()
            if not words:
                continue
            if len(words) != 2 or not all(word.isdecimal() for word in words):
                raise ValueError(
                    f"Line {number} of the index must hold a key and an offset. Received: "
                    f"path={path!r}"
                )
            key, offset = map(int, words)
            if offset >= size:
                raise ValueError(
                    f"Line {number} of the index names byte {offset}, and the records have {size}: "
                    f"they are cut short, or the index is of others. Received: path={path!r}"
                )
            offsets[key] = offset
    if not offsets:
        raise ValueError(f"The index is empty. Received: path={path!r}")
    return offsets
