"""insightface's training sets, written here as MXNet writes them."""

import re
import struct

import numpy as np
import pytest
import tensorflow as tf

from keras_margin.datasets import RecordSet, record_dataset
from keras_margin.record_io import MAGIC

IMAGES = [bytes([n]) * (n + 5) for n in range(6)]
LABELS = [0, 0, 1, 2, 2, 2]


def record(content):
    """One content as dmlc's RecordIOWriter writes it: cut where the magic number stands aligned."""
    magic = struct.pack("<I", MAGIC)
    cuts = [i for i in range(0, len(content) - 3, 4) if content[i : i + 4] == magic]
    edges = [-4, *cuts, len(content)]
    parts = [content[a + 4 : b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    kinds = [0] if len(parts) == 1 else [1, *[2] * (len(parts) - 2), 3]
    found = b""
    for part, kind in zip(parts, kinds, strict=True):
        padding = bytes(-len(part) % 4)
        found += magic + struct.pack("<I", kind << 29 | len(part)) + part + padding
    return found


def content(labels, image, index=0):
    if len(labels) == 1:
        return struct.pack("<IfQQ", 0, labels[0], index, 0) + image
    numbers = struct.pack(f"<{len(labels)}f", *labels)
    return struct.pack("<IfQQ", len(labels), 0.0, index, 0) + numbers + image


def written(folder, images=IMAGES, labels=LABELS, several=False, with_header=True):
    """Record 0 with the ranges, the images, and one record for each identity."""
    contents = [
        content([label, 7.0] if several else [label], image)
        for image, label in zip(images, labels, strict=True)
    ]
    if with_header:
        end = len(images) + 1
        identities = [content([1.0, 2.0], b"") for _ in range(3)]
        contents = [content([end, end + 3], b""), *contents, *identities]
    data, lines = b"", []
    for key, each in enumerate(contents):
        lines.append(f"{key}\t{len(data)}\n")
        data += record(each)
    (folder / "train.rec").write_bytes(data)
    (folder / "train.idx").write_text("".join(lines))
    (folder / "property").write_text("3,112,96")
    return folder


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("with_header", [False, True])
def test_images_and_labels(tmp_path, several, with_header):
    records = RecordSet(written(tmp_path, several=several, with_header=with_header))
    assert (records.num_classes, records.image_shape) == (3, (112, 96))
    assert len(records) == 6
    assert [records[i] for i in range(6)] == list(zip(IMAGES, LABELS, strict=True))


@pytest.mark.parametrize("place", [0, 4, 8])
@pytest.mark.parametrize("times", [1, 2])
def test_an_image_that_holds_the_magic_number(tmp_path, place, times):
    """24 bytes of content come before it: it stands aligned, and is cut out."""
    image = bytes(range(1, 1 + place)) + times * struct.pack("<I", MAGIC) + b"end"
    records = RecordSet(written(tmp_path, [image], [1]))
    assert records[0] == (image, 1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_as_a_dataset(tmp_path, shuffle):
    data = record_dataset(written(tmp_path), shuffle=shuffle, seed=1)
    assert data.cardinality() == 6
    assert data.element_spec == (tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int32))
    epochs = [[(image.numpy(), int(label)) for image, label in data] for _ in range(2)]
    want = list(zip(IMAGES, LABELS, strict=True))
    assert sorted(epochs[0]) == sorted(epochs[1]) == want
    assert (epochs[0] == want) is not shuffle
    assert (epochs[0] == epochs[1]) is not shuffle


def test_a_file_cut_at_any_byte_is_named(tmp_path):
    """Either the index names a place behind the end, or the last record is found to be cut."""
    written(tmp_path, with_header=False)
    path = tmp_path / "train.rec"
    whole = path.read_bytes()
    padding = -len(IMAGES[-1]) % 4
    for size in range(len(whole) - padding):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"(byte|path=)") as caught:
            records = RecordSet(tmp_path)
            for i in range(len(records)):
                records[i]
        assert "cut short" in str(caught.value)
        assert str(tmp_path) in str(caught.value)


def test_a_damaged_record_ends_a_dataset_with_its_place(tmp_path):
    path = written(tmp_path) / "train.rec"
    whole = bytearray(path.read_bytes())
    offset = int((tmp_path / "train.idx").read_text().split()[2 * 3 + 1])
    whole[offset] ^= 1
    path.write_bytes(bytes(whole))
    data = record_dataset(tmp_path, shuffle=False)
    message = f"The record at byte {offset} of {len(whole)} is damaged or cut short: it begins with"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(data)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("property", "3,112", "must hold three numbers"),
        ("property", "many,112,112", "must hold three numbers"),
        ("train.idx", "", "The index is empty"),
        ("train.idx", "0\t0\nx\t5\n", "Line 2 of the index must hold a key and an offset"),
        ("train.idx", "0\t0\n1\t99999\n", "Line 2 of the index names byte 99999"),
        ("train.idx", "0\t0\n1\t44\n", "The index lacks image 2 of 6"),
    ],
)
def test_what_does_not_belong_is_named(tmp_path, file, text, message):
    (written(tmp_path) / file).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        RecordSet(tmp_path)


@pytest.mark.parametrize(
    ("labels", "image", "message"),
    [
        ([3.0], b"image", "its label 3.0 is none of 3 classes"),
        ([0.5], b"image", "its label 0.5 is none"),
        ([np.nan], b"image", "its label nan is none"),
        ([1.0], b"", "it holds no image"),
    ],
)
def test_a_record_of_no_use_is_named(tmp_path, labels, image, message):
    written(tmp_path)
    records = RecordSet(written(tmp_path, [IMAGES[0], image], [0, labels[0]]))
    assert records[0] == (IMAGES[0], 0)
    with pytest.raises(ValueError, match=re.escape(message)):
        records[1]


@pytest.mark.parametrize("end", [np.nan, np.inf, 3e38, 1.0, -1.0])
def test_a_first_record_that_names_no_end_of_the_images_is_refused(tmp_path, end):
    path = written(tmp_path) / "train.rec"
    data = path.read_bytes()
    start = struct.calcsize("<II") + struct.calcsize("<IfQQ")
    path.write_bytes(data[:start] + struct.pack("<f", end) + data[start + 4 :])
    with pytest.raises(ValueError, match="The record at byte 0 of .* its images end at"):
        RecordSet(tmp_path)


@pytest.mark.parametrize("file", ["train.rec", "train.idx", "property"])
def test_a_missing_file_is_named(tmp_path, file):
    (written(tmp_path) / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        RecordSet(tmp_path)
