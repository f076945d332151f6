"""Every form of labels that users give, and every one that is refused."""

import math
import re

import numpy as np
import pytest
from backends import ON_JAX, tensorflow_only
from conftest import RUNS
from keras import ops

from keras_margin.labels import class_ids

IDS = [2, 0, 4, 1]
ONE_HOT = np.eye(5)[IDS]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]

COMPILED = [name for name in RUNS if name != "eager"]
compiled = pytest.mark.parametrize("run", COMPILED, indirect=True)


def exactly(message):
    return f"^{re.escape(message)}$"


def labels_of(values, dtype):
    """A tensor; an array where the dtype is one that JAX has not."""
    values = np.array(values)
    return values.astype(dtype) if ON_JAX and "64" in dtype else ops.cast(values, dtype)


def assert_ids(found, ids, counted=None, valid=None):
    assert found.ids.dtype == "int32"
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(
        found.counted, np.full(len(ids), True) if counted is None else counted
    )
    np.testing.assert_array_equal(found.valid, np.full(len(ids), True) if valid is None else valid)


# Accepted


@pytest.mark.parametrize("shape", [(4,), (4, 1)], ids=["row", "column"])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_ids(run, dtype, shape):
    labels = ops.reshape(labels_of(IDS, dtype), shape)
    assert_ids(run(lambda labels: class_ids(labels, 5))(labels), IDS)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", *FLOATS])
def test_one_hot(run, dtype):
    labels = labels_of(ONE_HOT, dtype)
    assert_ids(run(lambda labels: class_ids(labels, 5))(labels), IDS)


@pytest.mark.parametrize(
    "labels",
    [
        IDS,
        tuple(IDS),
        [float(i) for i in IDS],
        [[i] for i in IDS],
        np.array(IDS),
        ONE_HOT.tolist(),
        ONE_HOT.astype(bool),
    ],
    ids=["list", "tuple", "floats", "column", "array", "one-hot list", "one-hot array"],
)
def test_lists_and_arrays(labels):
    assert_ids(class_ids(labels, 5), IDS)


def test_column_of_ones_is_ids_not_one_hot():
    assert_ids(class_ids([[1], [1]], 2), [1, 1])


def test_as_many_rows_as_classes_is_still_one_row_a_sample():
    assert_ids(class_ids(np.eye(3)[[1, 2, 0]], 3), [1, 2, 0])


@pytest.mark.parametrize(
    "labels",
    [[], np.zeros(0, "int32"), np.zeros((0, 1)), np.zeros((0, 5)), np.zeros((0, 5), "bool")],
    ids=["list", "row", "column", "one-hot", "one-hot bool"],
)
def test_empty_batch(labels):
    assert_ids(class_ids(labels, 5), [])


@pytest.mark.parametrize(
    ("dtype", "label", "num_classes"),
    [
        ("uint8", 255, 85742),
        ("int8", 127, 85742),
        ("uint16", 65535, 85742),
        ("int32", 2**31 - 2, 2**31 - 1),
        ("uint64", 85741, 85742),
        ("float32", 85741, 85742),
        ("float64", 2**31 - 2, 2**31 - 1),
        ("float16", 2048, 2049),
        ("bfloat16", 256, 257),
        ("float32", 2**24, 2**24 + 1),
    ],
)
def test_large_ids(dtype, label, num_classes):
    labels = labels_of([label, 0], dtype)
    assert_ids(class_ids(labels, num_classes), [label, 0])


# Ignored rows


@pytest.mark.parametrize(
    ("dtype", "ignore_class"),
    [
        ("int32", -1),
        ("int64", -1),
        ("float32", -1),
        ("uint8", 255),
        ("int32", 5),
        *([] if ON_JAX else [("int64", -(2**40))]),
    ],
)
def test_ignored_rows_are_valid_and_do_not_count(run, dtype, ignore_class):
    labels = labels_of([2, ignore_class, 4], dtype)
    found = run(lambda labels: class_ids(labels, 5, ignore_class))(labels)
    assert_ids(found, [2, 0, 4], counted=[True, False, True])


def test_ignored_class_that_no_label_can_be():
    assert_ids(class_ids(np.int32([2, 0, 4]), 5, ignore_class=2**40), [2, 0, 4])


def test_a_class_can_be_ignored():
    assert_ids(class_ids([2, 1, 4], 5, ignore_class=2), [0, 1, 4], counted=[False, True, True])


def test_one_hot_rows_of_an_ignored_class_are_ignored():
    found = class_ids(np.eye(5)[[2, 1, 4]], 5, ignore_class=2)
    assert_ids(found, [0, 1, 4], counted=[False, True, True])


def test_unsigned_labels_never_equal_a_negative_ignore_class():
    assert_ids(class_ids(np.uint8([255, 3]), 256, ignore_class=-1), [255, 3])


# Refused


@pytest.mark.parametrize(
    ("labels", "row", "value"),
    [
        (np.int32([0, 7]), 1, "7"),
        (np.int32([0, -5]), 1, "-5"),
        (np.int64([2**32 + 1]), 0, "4294967297"),
        (np.int64([-(2**32) + 1]), 0, "-4294967295"),
        (np.uint32([2**32 - 1]), 0, "4294967295"),
        (np.uint64([2**63 + 1]), 0, "9223372036854775809"),
        (np.uint64([2**64 - 1]), 0, "18446744073709551615"),
        (np.uint8([200]), 0, "200"),
        (np.int8([-2]), 0, "-2"),
        (np.int32([[0], [7]]), 1, "7"),
        (np.float32([0.0, 1.5]), 1, "1.5"),
        (np.float64([1.0 + 1e-9]), 0, "1.000000001"),
        (np.float32([7.0]), 0, "7.0"),
        (np.float32([math.nan]), 0, "nan"),
        (np.float32([math.inf]), 0, "inf"),
        (np.float64([-math.inf]), 0, "-inf"),
        (np.float64([2.0**32 + 1]), 0, "4294967297.0"),
        ([3, 2, 9], 2, "9"),
    ],
)
def test_labels_outside_the_classes(labels, row, value):
    message = (
        "`labels` must be whole numbers from 0 to 4 (num_classes=5). "
        f"Received: labels[{row}]={value}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        class_ids(labels, 5)


@pytest.mark.parametrize("labels", [np.int32([4, 5, 1]), np.int32([[4], [5], [1]])])
def test_labels_that_count_from_one_get_a_hint(labels):
    message = (
        "`labels` must be whole numbers from 0 to 4 (num_classes=5); ids count from 0. "
        "Received: labels[1]=5"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        class_ids(labels, 5)


def test_minus_one_without_ignore_class_gets_a_hint():
    message = (
        "`labels` must be whole numbers from 0 to 4 (num_classes=5); to leave rows out give the "
        "head ignore_class=-1. Received: labels[1]=-1"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        class_ids([0, -1], 5)


@pytest.mark.parametrize(
    ("dtype", "label"),
    [
        ("int32", -2),
        ("int64", 2**32 - 1),
        ("uint8", 255),
        ("uint32", 2**32 - 1),
        ("uint64", 2**64 - 1),
    ],
)
def test_another_label_than_the_ignored_one_is_refused(dtype, label):
    """The unsigned ones have the bits of -1."""
    message = (
        "`labels` must be whole numbers from 0 to 4 (num_classes=5), or ignore_class=-1. "
        f"Received: labels[1]={label}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        class_ids(np.array([3, label], dtype), 5, ignore_class=-1)


@pytest.mark.parametrize(
    "row",
    [
        [0.0, 0.0, 0.0],
        [1.0, 1.0, 0.0],
        [0.5, 0.5, 0.0],
        [0.9, 0.1, 0.0],
        [2.0, 0.0, 0.0],
        [1.0, -1.0, 1.0],
        [1.0, math.nan, 0.0],
        [math.nan, math.nan, math.nan],
    ],
    ids=str,
)
def test_rows_that_are_not_one_hot(row):
    labels = np.array([[0.0, 1.0, 0.0], row])
    message = (
        f"`labels` must be one-hot rows: a single 1, all else 0. Received: labels[1]={labels[1]}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        class_ids(labels, 3)


@pytest.mark.parametrize("shape", [(), (4, 2), (4, 6), (4, 0), (4, 1, 1), (1, 4, 5)], ids=str)
def test_shapes(shape):
    message = (
        "`labels` must have shape (batch,), (batch, 1) or, one-hot, (batch, 5) for num_classes=5. "
        f"Received: labels.shape={shape}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        class_ids(np.zeros(shape, "int32"), 5)


@tensorflow_only
def test_shapes_are_refused_while_compiling():
    import tensorflow as tf

    message = (
        "`labels` must have shape (batch,), (batch, 1) or, one-hot, (batch, 5) for num_classes=5. "
        "Received: labels.shape=(None, 4)"
    )

    @tf.function(input_signature=[tf.TensorSpec((None, 4))])
    def compiled_ids(labels):
        return class_ids(labels, 5)

    with pytest.raises(ValueError, match=re.escape(message)):
        compiled_ids(tf.zeros((3, 4)))


@pytest.mark.parametrize(
    ("dtype", "exact"), [("float16", 2048), ("bfloat16", 256), ("float32", 2**24)]
)
def test_dtypes_that_cannot_hold_every_id(dtype, exact):
    message = (
        f"`labels` must be integers, or floats that can hold every id: {dtype} holds ids up to "
        f"{exact} exactly, and there are num_classes={exact + 2}. Give integer labels. "
        f"Received: labels.dtype={dtype}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        class_ids(ops.zeros(1, dtype), exact + 2)


def test_one_hot_in_half_precision_is_exact_for_any_number_of_classes():
    labels = ops.one_hot([69999, 2049], 70000, dtype="float16")
    assert_ids(class_ids(labels, 70000), [69999, 2049])


# Compiled, and left to the caller


BAD = [
    ("int32", [2, 5, -1, 4], [True, False, False, True]),
    ("int64", [2, 2**32 + 2, -(2**40), 4], [True, False, False, True]),
    ("uint64", [2, 2**32, 2**62, 4], [True, False, False, True]),
    ("float32", [2.0, 1.5, math.nan, 4.0], [True, False, False, True]),
    ("float64", [2.0, math.inf, -math.inf, 4.0], [True, False, False, True]),
]
# JAX cuts the numbers of 64 bits itself, before compiled code has them.
SEEN = [row for row in BAD if not (ON_JAX and "int64" in row[0])]
every_bad = pytest.mark.parametrize(("dtype", "labels", "valid"), BAD, ids=[row[0] for row in BAD])
every_seen = pytest.mark.parametrize(
    ("dtype", "labels", "valid"), SEEN, ids=[row[0] for row in SEEN]
)


@compiled
@every_seen
def test_compiled_code_marks_what_it_cannot_refuse(dtype, labels, valid, run):
    ids_of = run(lambda labels: class_ids(labels, 5))
    assert_ids(ids_of(np.array(labels, dtype)), [2, 0, 0, 4], valid=valid)


@every_bad
def test_refuse_false_marks_too(dtype, labels, valid):
    found = class_ids(labels_of(np.array(labels, dtype), dtype), 5, refuse=False)
    assert_ids(found, [2, 0, 0, 4], valid=valid)


@compiled
def test_compiled_code_marks_rows_that_are_not_one_hot(run):
    ids_of = run(lambda labels: class_ids(labels, 3))
    labels = np.float32([[0.0, 0, 1], [0.5, 0.5, 0], [0, 1, 1], [0, 0, 0], [math.nan, 1, 0]])
    assert_ids(ids_of(labels), [2, 0, 0, 0, 0], valid=[True, False, False, False, False])


@compiled
def test_compiled_code_tells_ignored_from_invalid(run):
    ids_of = run(lambda labels: class_ids(labels, 3, -1))
    found = ids_of(np.array([2, -1, 3], "int32"))
    assert_ids(found, [2, 0, 0], counted=[True, False, True], valid=[True, True, False])
