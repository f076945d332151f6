"""Batches of one size."""

import re

import keras
import numpy as np
import pytest

import keras_margin as km
from keras_margin.datasets import pad_last_batch

ROWS, CLASSES = 10, 5


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3)).astype("float32")
    return x, rng.integers(0, CLASSES, ROWS).astype("int32")


def batches_of(*arrays, size=4):
    return [tuple(a[i : i + size] for a in arrays) for i in range(0, len(arrays[0]), size)]


class Data(keras.utils.PyDataset):
    epochs = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return batches_of(*data())[index]

    def on_epoch_end(self):
        self.epochs += 1


def as_tf_data(batches):
    import tensorflow as tf

    arrays = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
    return tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(4)


FORMS = {"list": list, "dataset": as_tf_data, "PyDataset": lambda batches: Data()}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def arrays_of(padded):
    found = padded if hasattr(padded, "element_spec") else [padded[i] for i in range(len(padded))]
    return [keras.tree.map_structure(np.asarray, batch) for batch in found]


@every_form
def test_short_batches_are_filled(form):
    x, y = data()
    padded = arrays_of(pad_last_batch(form(batches_of(x, y)), 4, ignore_class=-1))
    assert len(padded) == 3
    for got, want in zip(padded[:2], batches_of(x, y)[:2], strict=True):
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(padded[2][0], x[[8, 9, 8, 8]])
    np.testing.assert_array_equal(padded[2][1], [*y[8:], -1, -1])
    assert padded[2][1].dtype == y.dtype


def test_shapes_of_a_dataset_are_known():
    x, _ = pad_last_batch(as_tf_data(batches_of(*data())), 4, ignore_class=-1).element_spec
    assert x.shape == (4, 3)


@pytest.mark.parametrize("form", [list, as_tf_data], ids=["list", "dataset"])
def test_columns_of_labels_and_weights(form):
    x, y = data()
    weights = np.linspace(0.1, 1.0, ROWS, dtype="float32")
    padded = arrays_of(pad_last_batch(form(batches_of(x, y[:, None], weights)), 4, ignore_class=7))
    np.testing.assert_array_equal(padded[2][1], [[y[8]], [y[9]], [7], [7]])
    np.testing.assert_array_equal(padded[2][2], [*weights[8:], 0.0, 0.0])


def test_inputs_of_several_parts():
    x, y = data()
    batches = [({"a": part, "b": -part}, labels) for part, labels in batches_of(x, y)]
    got, _ = pad_last_batch(batches, 4, ignore_class=-1)[2]
    np.testing.assert_array_equal(got["b"], -x[[8, 9, 8, 8]])


@every_form
def test_training_is_that_of_the_rows_that_are_there(form):
    x, y = data()
    results = []
    for batches in (form(batches_of(x, y)), None):
        kernel = keras.initializers.RandomNormal(seed=0)
        dense = keras.layers.Dense(2, kernel_initializer=kernel)
        backbone = keras.Sequential([keras.Input((3,)), dense])
        model = km.EmbeddingModel(backbone, km.AdaCos(CLASSES, ignore_class=-1, seed=0))
        model.compile(keras.optimizers.SGD(0.1))
        if batches is None:
            history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
        else:
            padded = pad_last_batch(batches, 4, ignore_class=-1)
            history = model.fit(padded, shuffle=False, verbose=0).history
        results.append([*(history[name][0] for name in sorted(history)), *model.get_weights()])
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_end_of_an_epoch_is_passed_on():
    inner = Data()
    pad_last_batch(inner, 4, ignore_class=-1).on_epoch_end()
    assert inner.epochs == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 3}, "from 1 to 3 rows. Received: 4 rows in batch 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1. Received: batch_size=0"),
        ({"ignore_class": None}, "ignore_class=None"),
        ({"ignore_class": 0.5}, "ignore_class=0.5"),
        ({"dataset": iter([])}, "a list of batches. Received: dataset of type list_iterator"),
        ({"dataset": [np.ones(3)]}, "Received: ndarray of 3 parts"),
        ({"dataset": [(np.ones((2, 3)), np.eye(2))]}, "Received: y.shape=(2, 2)"),
        ({"dataset": [(np.ones((2, 3)), np.ones(2, "uint8"))]}, "Received: y.dtype=uint8"),
        ({"dataset": [(np.ones((0, 3)), np.ones(0, int))]}, "Received: 0 rows in batch 0"),
    ],
)
def test_what_is_refused(change, message):
    given = {"dataset": batches_of(*data()), "batch_size": 4, "ignore_class": -1, **change}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        pad_last_batch(**given)[0]


def test_a_batch_of_a_dataset_that_is_too_long():
    import tensorflow as tf

    padded = pad_last_batch(as_tf_data(batches_of(*data())), 3, ignore_class=-1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="from 1 to 3 rows"):
        list(padded)


def test_labels_that_cannot_hold_the_class_to_ignore_are_refused():
    x, y = np.ones((3, 2), "float32"), np.zeros(3, "int8")
    message = "Labels of dtype int8 cannot hold ignore_class=300"
    with pytest.raises(ValueError, match=message):
        pad_last_batch([(x, y)], 4, ignore_class=300)[0]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        with pytest.raises(ValueError, match=message):
            pad_last_batch(dataset, 4, ignore_class=300)


def test_weights_of_one_column_are_filled_up_too():
    import tensorflow as tf

    parts = np.ones((3, 2), "float32"), np.zeros(3, "int32"), np.ones((3, 1), "float32")
    want = [[1.0], [1.0], [1.0], [0.0]]
    assert pad_last_batch([parts], 4, ignore_class=-1)[0][2].tolist() == want
    dataset = tf.data.Dataset.from_tensor_slices(parts).batch(4)
    (batch,) = pad_last_batch(dataset, 4, ignore_class=-1)
    assert batch[2].numpy().tolist() == want


def test_parts_of_other_lengths_are_refused():
    batch = np.ones((3, 2), "float32"), np.zeros(2, "int32")
    with pytest.raises(ValueError, match="All parts of a batch must have its rows. Received: 2"):
        pad_last_batch([batch], 4, ignore_class=-1)[0]
