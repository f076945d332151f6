"""Labels as users give them -> class ids and the rows that count; refused where it can be seen."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_margin.backend import holds, is_concrete
from keras_margin.checks import check_rows
from keras_margin.numerics import l2_norm

# The whole numbers up to here are exact in these dtypes: larger ids would be silently other ids.
_LARGEST_EXACT_ID = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8}


class ClassIds(NamedTuple):
    """One entry a row of the batch."""

    ids: object  # int32 (batch,), 0 where the row is ignored or its label means no class
    counted: object  # bool (batch,), False where the row is ignored
    valid: object  # bool (batch,), False where the label means no class: the row's loss is NaN


def class_ids(labels, num_classes, ignore_class=None, *, refuse=True):
    """Integer ids, whole float ids or one-hot rows -> `ClassIds`.

    Args:
        labels: (batch,) or (batch, 1) ids of any integer dtype, or whole numbers in a float dtype;
            or (batch, num_classes) one-hot rows.
        num_classes: the ids are 0 .. num_classes - 1.
        ignore_class: an id whose rows take no part, or None.
        refuse: False leaves labels that mean no class to the caller, also where they can be seen.

    Raises:
        ValueError: a shape that is none of these; and, where the values are known (outside a
            compiled function), a label outside the classes, a fraction, a row that is not one-hot.
    """
    if isinstance(labels, (list, tuple)):
        labels = np.asarray(labels)
    if isinstance(labels, np.ndarray) and labels.dtype.kind not in "iufb":
        raise ValueError(f"`labels` must be numbers. Received: labels.dtype={labels.dtype}")
    given, labels = labels, ops.convert_to_tensor(_exact(labels))
    shape = tuple(labels.shape)
    dtype = keras.backend.standardize_dtype(labels.dtype)
    if not any(kind in dtype for kind in ("int", "float", "bool")):
        raise ValueError(f"`labels` must be numbers. Received: labels.dtype={dtype}")
    _check_shape(shape, num_classes)
    if len(shape) == 2 and shape[1] != 1:
        found = _from_one_hot(labels, dtype, ignore_class)
    else:
        _check_dtype(dtype, num_classes)
        found = _from_ids(ops.reshape(labels, (-1,)), dtype, num_classes, ignore_class)
    if refuse and is_concrete(found.valid):
        _check_values(given, found.valid, num_classes, ignore_class)
    return found


def _exact(labels):
    """NumPy labels as the backend can hold them: JAX would cut 2^32 + 1 to the label 1.

    What int32 cannot hold becomes its largest number, which is no class.
    """
    if not isinstance(labels, np.ndarray) or holds(labels.dtype):
        return labels
    with np.errstate(invalid="ignore"):
        ids = labels.astype("int32")
    return np.where(ids == labels, ids, np.iinfo("int32").max)


def _check_shape(shape, num_classes):
    if len(shape) == 1 or (len(shape) == 2 and shape[1] in (1, num_classes)):
        return
    raise ValueError(
        f"`labels` must have shape (batch,), (batch, 1) or, one-hot, (batch, {num_classes}) for "
        f"num_classes={num_classes}. Received: labels.shape={shape}"
    )


def usable_rows(head, embeddings, labels):
    """What of a batch a head can use.

    Args:
        head: it says num_classes, ignore_class and, by its centres, the dimension.
        embeddings: (batch, dim).
        labels: as in `class_ids`.

    Returns:
        The labels' `ClassIds`; bool (batch,), the rows that count, have a class and a finite
        embedding; the embeddings with 0 in place of rows that are not finite, since 0 * NaN would
        reach the centres' gradient.
    """
    found = class_ids(labels, head.num_classes, head.ignore_class)
    check_rows(embeddings, found.ids, head.centers.shape[1])
    # Labels of another length can be seen in compiled code only now; [y] would be broadcast.
    same = ops.shape(found.ids)[0] == ops.shape(embeddings)[0]
    found = found._replace(valid=ops.logical_and(found.valid, same))
    finite = ops.isfinite(l2_norm(ops.stop_gradient(embeddings)))
    embeddings = ops.where(ops.expand_dims(finite, 1), embeddings, 0.0)
    return found, found.counted & found.valid & finite, embeddings


def _check_dtype(dtype, num_classes):
    exact = _LARGEST_EXACT_ID.get(dtype)
    if exact is not None and num_classes - 1 > exact:
        raise ValueError(
            f"`labels` must be integers, or floats that can hold every id: {dtype} holds ids up to "
            f"{exact} exactly, and there are num_classes={num_classes}. Give integer labels. "
            f"Received: labels.dtype={dtype}"
        )


def _from_one_hot(labels, dtype, ignore_class):
    if dtype == "bool":
        labels = ops.cast(labels, "int32")
    is_one, is_zero = ops.equal(labels, 1), ops.equal(labels, 0)
    ones = ops.sum(ops.cast(is_one, "int32"), axis=-1)
    valid = ops.logical_and(ops.all(ops.logical_or(is_one, is_zero), axis=-1), ops.equal(ones, 1))
    ids = ops.cast(ops.argmax(ops.cast(is_one, "int32"), axis=-1), "int32")
    counted = ops.ones_like(valid)
    if ignore_class is not None:
        counted = ops.logical_not(ops.logical_and(valid, ids == ignore_class))
    return _class_ids(ids, counted, valid)


def _class_ids(ids, counted, valid):
    usable = ops.logical_and(valid, counted)
    return ClassIds(ops.cast(ops.where(usable, ids, 0), "int32"), counted, valid)


def _from_ids(labels, dtype, num_classes, ignore_class):
    is_whole = ops.ones_like(labels, dtype="bool")
    if "float" in dtype:
        is_whole = ops.equal(labels, ops.floor(labels))  # False for NaN
        if "64" not in dtype:
            labels = ops.cast(labels, "float32")
    else:
        # Compare in a dtype that holds both the labels and num_classes.
        wide = dtype in ("int64", "uint32", "uint64") and holds("int64")
        labels = ops.cast(labels, "int64" if wide else "int32")
        if dtype in ("uint32", "uint64"):
            # The largest has become -1, which may be the ignored class; uint32's only on JAX.
            largest = np.iinfo(keras.backend.standardize_dtype(labels.dtype)).max
            labels = ops.where(labels < 0, largest, labels)
    is_class = ops.logical_and(labels >= 0, labels <= num_classes - 1)  # exact in float32
    valid = ops.logical_and(is_whole, is_class)
    counted = ops.ones_like(valid)
    if ignore_class is not None and _can_be(ignore_class, labels.dtype):
        counted = ops.not_equal(labels, ops.cast(ignore_class, labels.dtype))
        valid = ops.logical_or(valid, ops.logical_not(counted))
    return _class_ids(labels, counted, valid)


def _can_be(label, dtype):
    """Whether a tensor of dtype can hold the label: 2^40 is no int32, and would be 0."""
    dtype = keras.backend.standardize_dtype(dtype)
    return "float" in dtype or np.iinfo(dtype).min <= label <= np.iinfo(dtype).max


def _check_values(labels, valid, num_classes, ignore_class):
    valid = ops.convert_to_numpy(valid)
    if valid.all():
        return
    row = int(np.argmin(valid))
    value = np.asarray(ops.convert_to_numpy(labels[row]))
    if value.size > 1:
        kind = "one-hot rows: a single 1, all else 0"
    else:
        value = value.reshape(()).item()
        ignored = f", or ignore_class={ignore_class}" if ignore_class is not None else ""
        kind = f"whole numbers from 0 to {num_classes - 1} (num_classes={num_classes}){ignored}"
        if value == num_classes:
            kind += "; ids count from 0"
        if value == -1 and ignore_class is None:
            kind += "; to leave rows out give the head ignore_class=-1"
    raise ValueError(f"`labels` must be {kind}. Received: labels[{row}]={value}")
